"""The dense MLP: x + norm(fc2(activation(fc1(norm(x))))), with either norm or both, gated (SwiGLU, GeGLU) or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megapipe.config.layers import LayerConfig
from megapipe.config.model import ACTIVATIONS, ActivationKind
from megapipe.layers.linear import (
    LinearTable,
    collectives,
    column_gradient_bytes,
    output_std,
    row_gradient_bytes,
    weight_gradient_bytes,
)
from megapipe.layers.norm import NormTable, branch_norms, residual_stream
from megapipe.layers.table import MASK_BYTES, Backward, Gemm, Kept, Operation, RankShape, Table, total_bytes
from megapipe.sharding.spec import Fused, ParamSpec


def backward_tensors(model: LayerConfig) -> float:
    """Return how many tensors [..., F] an activation's backward makes besides its input's gradient."""
    return ACTIVATIONS[model.activation].backward_tensors + (model.activation_func_clamp_value is not None)


@dataclass(frozen=True, eq=False)
class MLPTable:
    """The MLP branch of one transformer layer, its norms included."""

    model: LayerConfig
    is_fp8: bool  # its linears multiply in 8 bits

    @cached_property
    def norms(self) -> tuple[NormTable | None, NormTable | None]:
        """The norms of the branch's input and of its output."""
        return branch_norms(self.model, "pre_mlp_layernorm", "post_mlp_layernorm")

    @property
    def activation(self) -> ActivationKind:
        """The row of its activation."""
        return ACTIVATIONS[self.model.activation]

    @property
    def gates(self) -> int:
        """2 where linear_fc1 makes gate and up, else 1."""
        return 2 if self.activation.is_gated else 1

    def parameters(self, prefix: str, layer: int, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the parameters of layer number `layer`, in model order."""
        model, hidden, gates, name = self.model, self.model.hidden_size, self.gates, f"{prefix}mlp"
        ffn, has_bias, std = model.ffn_hidden_size, model.add_bias_linear, model.init_method_std
        fc1 = LinearTable(f"{name}.linear_fc1", gates * ffn, hidden, Fused(0, gates), has_bias, std)
        fc2 = LinearTable(f"{name}.linear_fc2", hidden, ffn, Fused(1), has_bias, output_std(model))
        before, after = self.norms
        yield from before.parameters(prefix, layer, sequence_parallel) if before is not None else ()
        yield from fc1.parameters(layer, sequence_parallel)
        yield from fc2.parameters(layer, sequence_parallel)
        yield from after.parameters(prefix, layer, sequence_parallel) if after is not None else ()

    def gemms(self, tp: int) -> tuple[Gemm, Gemm]:
        """Return linear_fc1 and linear_fc2 on one of tp ranks."""
        hidden, ffn = self.model.hidden_size, self.model.ffn_hidden_size // tp
        return Gemm(hidden, self.gates * ffn, True, self.is_fp8), Gemm(ffn, hidden, False, self.is_fp8)

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank.

        ReLU's backward needs only its output. Recompute of the activation recomputes linear_fc2's input from
        linear_fc1's output; recompute of the MLP recomputes both from linear_fc1's input, or from the residual stream
        if the norm is recomputed too.
        """
        fc1, fc2 = self.gemms(shape.tp)
        (before, after), size = self.norms, self.model.hidden_size
        splits, has_dropout = shape.splits_backward, self.model.hidden_dropout > 0
        redoes_mlp = shape.recomputes("mlp")
        keeps_output, hidden = self.activation.keeps_output, shape.hidden_bytes(size)
        redoes_activation = shape.recomputes("activation") and not keeps_output
        width = shape.tokens * fc2.inputs  # elements between the linears, one gate
        wide, inner = width * shape.element, self.gates * width * shape.element

        keeps_activation = not redoes_activation and not redoes_mlp
        inner_kept = () if keeps_output or redoes_mlp else (Kept("mlp hidden", self.gates * width, shape.element),)
        activation_kept = (Kept("mlp activation", width, shape.element),) if keeps_activation else ()
        masks = (Kept("dropout masks", shape.own_tokens * size, MASK_BYTES),) if has_dropout else ()

        # the backward: what recompute makes, the gradient behind the dropout, and what waits for W
        inner_again = inner if redoes_mlp else 0
        replayed = wide if redoes_mlp else 0  # the replay holds its activation until its own backward is done
        behind = hidden if self.model.scales_branches or after is not None else 0
        fc2_input = inner if redoes_activation and not redoes_mlp else wide  # what waits for W in its place
        deferred = inner + hidden if splits else 0
        # a gated activation makes the other gate's product and its gradient, squared ReLU the ReLU
        made = int(backward_tensors(self.model) * wide)
        again = 0 if before is None else before.output_again_bytes(shape)
        fc1_backward = Backward(replayed + inner + again + column_gradient_bytes(fc1, shape))
        activation_backward = Backward(behind + wide + inner + inner_again + replayed + made, total_bytes(inner_kept))
        fc2_backward = Backward(
            behind + wide + inner_again + (0 if keeps_activation else wide) + row_gradient_bytes(fc2, shape),
            wide if keeps_activation and not splits else 0,
        )
        operations = (
            self._start(shape, replayed + deferred),
            Operation(
                "linear_fc1",
                gemm=fc1,
                collectives=collectives(fc1, shape),
                recompute_modules=("mlp",),
                deferred_bytes=hidden + inner,
                backward=fc1_backward,
            ),
            Operation("activation", inner_kept, backward=activation_backward),
            Operation(
                "linear_fc2",
                (*activation_kept, *masks),
                gemm=fc2,
                collectives=collectives(fc2, shape),
                deferred_bytes=fc2_input + hidden,
                backward=fc2_backward,
            ),
            *(() if after is None else (after.after_branch(shape, self.model.scales_branches),)),
        )
        return Table(operations, hidden + deferred, weight_gradient_bytes(fc1, shape))

    def _start(self, shape: RankShape, held: int) -> Operation:
        """Return the norm of the input, without it the residual stream. held: bytes while the norm's backward runs."""
        norm, hidden = self.norms[0], shape.hidden_bytes(self.model.hidden_size)
        if norm is None:
            return residual_stream(shape, self.model.hidden_size)
        redoes_norm = shape.recomputes("layernorm")
        frees = hidden if shape.splits_backward or redoes_norm else 2 * hidden
        backward = Backward(held + hidden + norm.gradient_bytes(shape), frees)
        keeps_statistics = not (redoes_norm and shape.recomputes("mlp"))
        return norm.operation(shape, keeps_statistics=keeps_statistics, backward=backward)

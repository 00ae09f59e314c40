"""What a backward makes and frees again while it runs: gradients on their way, gathered sequences, replays, weight gradients in fp32.

The most comes in the last layer of a stage, or in the head: what these free lowers the level for the layers before. So the moments of one
layer's backward are gone through in their order, each with what it holds at once less what the backward has freed before it. Counted on
one rank for one microbatch, on top of all that the stage has kept. `dry_run` counts the same with the real code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.plan.activations import (
    NO_DOCUMENTS,
    Documents,
    LocalSizes,
    deferred_bytes,
    is_explicit,
    layer_activation_bytes,
    replay_bytes,
    stage_bytes,
)
from megapipe.plan.fp8 import LinearBytes
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers

LOSS_BLOCK_BYTES = 1 << 23  # half types: logits are raised to fp32 in blocks of this size, two at a time


@dataclass(frozen=True)
class Backward:
    """One stage's backward. splits: only its first half, I, after which the linears' inputs and gradients wait for W. fp8: of the layers'
    linears, if they multiply in 8 bits."""

    model: ModelConfig
    sizes: LocalSizes
    layers: StageLayers
    recompute: RecomputeConfig
    documents: Documents = NO_DOCUMENTS
    is_cuda: bool = True
    gathers: bool = False  # sequence parallelism over more than one rank
    gather_chunks: int = 1  # of an all-gather that runs under its own GEMM
    splits: bool = False
    fp8: LinearBytes | None = None

    def most(self) -> int:
        """The largest of all moments, 0 or more."""
        return max([0, *(held - freed for held, freed in self._moments())])

    def most_in_parts(self) -> tuple[int, int]:
        """(in the head, in the layers), each 0 or more."""
        of_head = len(list(self._head())) if self.layers.has_head else 0
        differences = [held - freed for held, freed in self._moments()]
        return max([0, *differences[:of_head]]), max([0, *differences[of_head:]])

    def _moments(self) -> Iterator[tuple[int, int]]:
        """(bytes held beyond what was kept, bytes freed of it) in the order of the backward."""
        freed = behind = 0
        if self.layers.has_head:
            freed = sum(
                stage_bytes(self.model, self.sizes, _only_head(self.layers), self.recompute, self.documents).values()
            )
            behind = self.sizes.hidden_states
            if self.splits:  # the gradient of the logits waits, in their place
                freed -= self.sizes.hidden_states + self.sizes.tokens * self.sizes.vocab * self.sizes.element
            yield from ((held, 0) for held in self._head())
        if self.layers.has_embedding and not self.layers.num_layers:
            yield behind + self._gathered + self.sizes.tokens * self.sizes.hidden * self.sizes.wide, freed
        if self.layers.num_layers:
            yield from ((behind + held, freed + gone) for held, gone in self._layer())

    def _head(self) -> Iterator[int]:
        logits = self.sizes.tokens * self.sizes.vocab
        yield self.loss_blocks
        if self.model.final_logit_softcapping is not None:
            yield 2 * logits * self.sizes.wide
        gathered = 0 if self.splits else self._gathered
        yield self._inputs_of_column() + gathered + self._product(self.sizes.vocab, self.sizes.hidden)

    @property
    def loss_blocks(self) -> int:
        """Logits of half types raised to fp32, in the head's forward as in its backward."""
        if not self.layers.has_head or self.sizes.element == self.sizes.wide:
            return 0
        return min(2 * LOSS_BLOCK_BYTES, self.sizes.tokens * self.sizes.vocab * self.sizes.wide)

    def _layer(self) -> Iterator[tuple[int, int]]:
        """Of the last layer, whose activations a full recomputation has made anew."""
        sizes, kept = self.sizes, layer_activation_bytes(self.model, self.sizes, self._modules, self.documents)
        more = self._replayed + self._grown(sum(kept.values()))
        mask = sizes.hidden_states if self.model.hidden_dropout > 0 else 0  # the gradient behind a dropout
        hidden, activation = kept.get("mlp hidden", 0), kept.get("mlp activation", 0)
        inner = self._gates * self._width
        again = self._remade_mlp
        yield more + mask + self._width + sum(again) + self._gradient_of_row(sizes.ffn), 0
        gone = 0 if self.splits else activation
        replayed = again[1] if "mlp" in self._modules else 0  # held until the replay's backward is over
        yield more + mask + self._width + inner + again[0] + replayed + self._of_activation, gone
        gone += hidden
        more += replayed
        again_norm = sizes.hidden_states if "layernorm" in self._modules else 0
        yield (
            more + inner + again_norm + self._inputs_of_column() + self._weight_of_column(self._gates * sizes.ffn),
            gone,
        )
        waiting = inner + sizes.hidden_states if self.splits else 0
        yield more + waiting + sizes.hidden_states + self._of_norm, gone
        gone += 0 if self.splits else kept.get("norm outputs", 0) // 2
        gone += kept.get("residual stream", 0) // 2
        more += waiting + sizes.hidden_states + mask - replayed  # the gradient between the two halves of the layer
        yield more + sizes.query + self._gradient_of_row(sizes.query // (sizes.tokens * sizes.element)), gone
        yield more + sizes.query + self._of_attention(kept), gone
        freed = ["attention probabilities", "q, k, v", "q, k, v repeated"]
        if not self.recompute.recompute_keep_attention:  # else the checkpoint holds them until its backward is over
            freed.append("attention statistics")
        gone += sum(kept.get(what, 0) for what in freed)
        qkv = sizes.query + 2 * sizes.key
        yield (
            more
            + qkv
            + again_norm
            + self._inputs_of_column()
            + self._weight_of_column(qkv // (sizes.tokens * sizes.element)),
            gone,
        )

    @property
    def _modules(self) -> frozenset[str]:
        is_selective = self.recompute.recompute_granularity == "selective"
        return frozenset(self.recompute.recompute_modules) if is_selective else frozenset()

    @property
    def _gates(self) -> int:
        return 2 if self.model.activation in GATED_ACTIVATIONS else 1

    @property
    def _width(self) -> int:
        """Between the linears of the MLP, one gate."""
        return self.sizes.tokens * self.sizes.ffn * self.sizes.element

    @property
    def _whole(self) -> int:
        """Hidden states of the whole sequence."""
        return self.sizes.tokens * self.sizes.hidden * self.sizes.element

    @property
    def _gathered(self) -> int:
        return self._whole if self.gathers else 0

    @property
    def _replayed(self) -> int:
        recompute, count = self.recompute, self.layers.num_layers
        if recompute.recompute_granularity != "full":
            return 0
        if recompute.recompute_method == "block" and (recompute.recompute_num_layers or 1) < count:
            return 0  # the last layer keeps everything, and is gone when another is made again
        return replay_bytes(self.model, self.sizes, self.layers.num_layers, self.recompute, self.documents)

    def _grown(self, kept: int) -> int:
        """How far the first layer of a split backward may start above the last one: where more waits for W than was kept."""
        if not self.splits:
            return 0
        one = StageLayers(0, 1, has_embedding=False, has_head=False)
        waiting = deferred_bytes(self.model, self.sizes, one, self.recompute)
        return max(0, (self.layers.num_layers - 1) * (waiting - kept))

    @property
    def _remade_mlp(self) -> tuple[int, int]:
        """(linear_fc1's output, its activation) made again in the backward of linear_fc2."""
        if "mlp" in self._modules:
            return self._gates * self._width, self._width
        return 0, self._width if "activation" in self._modules and self.model.activation != "relu" else 0

    @property
    def _of_activation(self) -> int:
        """Beside its input's gradient: gated, the other gate's product and its gradient; squared ReLU, the ReLU made again."""
        return {True: 2 * self._width}.get(
            self._gates == 2, self._width if self.model.activation == "squared_relu" else 0
        )

    @property
    def _of_norm(self) -> int:
        """RMSNorm is written out but on CUDA: products in at least fp32."""
        sizes = self.sizes
        if self.is_cuda or self.model.normalization == "LayerNorm":
            return sizes.hidden_states
        return (3 if sizes.element == sizes.wide else 5) * sizes.own_tokens * sizes.hidden * sizes.wide

    def _of_attention(self, kept: dict[str, int]) -> int:
        """Gradients of q, k and v apart and then side by side; written out, those of the probabilities."""
        sizes, model = self.sizes, self.model
        qkv = sizes.query + 2 * sizes.key
        if not is_explicit(model):
            again = sizes.query + sizes.tokens * sizes.heads * sizes.wide if "core_attn" in self._modules else 0
            return again + 2 * qkv
        squares = sizes.batch * sizes.heads * sizes.seq * sizes.seq
        again = 0
        if "core_attn" in self._modules:
            whole = layer_activation_bytes(model, sizes, (), self.documents)
            again = sum(
                whole.get(what, 0) - kept.get(what, 0) for what in ("attention probabilities", "attention output")
            )
        cast = 2 if sizes.element != sizes.wide else 1
        dropped = sizes.element if model.attention_dropout > 0 else 0
        capped = sizes.wide if model.attn_logit_softcapping is not None else 0
        return again + squares * (sizes.element + dropped + cast * sizes.wide + capped)

    def _inputs_of_column(self) -> int:
        """The input gradient of a column-parallel linear, before and after its reduction."""
        return self._whole + (self.sizes.hidden_states if self.gathers else 0)

    def _gradient_of_row(self, columns: int) -> int:
        """The whole output gradient of a row-parallel linear, and its weight gradient. In chunks: first two of them beside the whole, or
        alone where the weight's half waits with its own slice."""
        weight = self._weight(self.sizes.hidden, columns)
        if not self.gathers or self.gather_chunks == 1:
            return self._gathered + weight
        two = 2 * -(-self._whole // self.gather_chunks)
        return max(two, weight) + (0 if self.splits else self._whole)

    def _weight_of_column(self, rows: int) -> int:
        return (0 if self.splits else self._gathered) + self._weight(rows, self.sizes.hidden)

    def _weight(self, rows: int, columns: int) -> int:
        """What the gradients of a layer's linear make, of its weight [rows, columns] and, where that comes alone, of its input."""
        if self.fp8 is None:
            return self._product(rows, columns)
        make = self.fp8.input_gradient if self.splits else self.fp8.weight_gradient
        return make(self.sizes.tokens, rows, columns)

    def _product(self, rows: int, columns: int) -> int:
        """A weight gradient before it is added: fp32 on CUDA, the model's dtype elsewhere; fp32 and fp64 add in place."""
        if self.splits or self.sizes.element == self.sizes.wide:
            return 0
        return rows * columns * (self.sizes.wide if self.is_cuda else self.sizes.element)

    def weights(self) -> int:
        """What W makes: two gathered sequences, the next one's under the GEMM of this one, and a weight gradient."""
        sizes = self.sizes
        made = [self._product(sizes.vocab, sizes.hidden)] if self.layers.has_head else []
        if self.layers.num_layers:
            made.append(self._weight(self._gates * sizes.ffn, sizes.hidden))
        return 2 * self._gathered + max(made, default=0)


def temporary_bytes(backward: Backward) -> dict[Op, int]:
    """Of B, I and W of a stage. backward: whole."""
    half = replace(backward, splits=True)
    return {Op.B: backward.most(), Op.I: half.most(), Op.W: backward.weights()}


def _only_head(layers: StageLayers) -> StageLayers:
    return StageLayers(layers.last_layer_exclusive, layers.last_layer_exclusive, has_embedding=False, has_head=True)

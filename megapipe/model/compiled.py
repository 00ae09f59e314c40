"""Transformer blocks under torch.compile (`--compile-blocks`): `CompiledBlock`, the compiled form of alike layers.

With one tp rank a block is one graph. The weight gradients of its linears have side effects, on main gradients or on
the queue of a split backward, that a compiled graph must not contain. So the graph computes the block and the gradients
of its linears' inputs; it returns the inputs, and hands the gradients of the outputs to a node of autograd before it,
which computes or queues dW = dy^T x as the eager backward does:

    _WeightGradients -> handles -> compiled graph -> hidden, inputs of the linears -> _KeepInputs -> hidden

A handle is a scalar expanded to the shape of a linear's output. Its value is not read; its gradient is dy.

With more tp ranks, selective recompute or fp8 the linears and core attention stay as they are, with their collectives
and their overlap, and each region between two of them is a graph: the norm, the heads (split, qk-norm, rotation), the
residual sum with the norm that follows, the activation, the last residual sum.

Dropout masks are drawn outside, with the keys of the eager block, and are inputs of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.config.layers import LayerConfig
from megapipe.model.attention import SelfAttention
from megapipe.model.context import LayerContext
from megapipe.model.core_attention import explicit_attention, fused_attention
from megapipe.model.mlp import ACTIVATIONS, GRADIENTS, MLP
from megapipe.tensor_parallel.gemms import SequenceGather, at_least_fp32
from megapipe.tensor_parallel.gradients import InputRecompute
from megapipe.tensor_parallel.linear import LinearWeightGradient, ParallelLinear
from megapipe.tensor_parallel.random import keyed_mask

Weights = tuple[Tensor, Tensor | None]  # weight and bias
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Parts(NamedTuple):
    """The modules of one block, of those that it has."""

    layer: int
    self_attention: SelfAttention | None
    mlp: MLP | None
    norms: dict[str, nn.Module]  # input_layernorm, post_self_attn_layernorm, pre_mlp_layernorm, post_mlp_layernorm
    recompute: frozenset[str]  # modules of selective recompute
    dropout_rank: int | None  # tp_rank of the dropout of hidden states, None where all tp ranks hold the same

    @property
    def linears(self) -> list[ParallelLinear]:
        """The linears in the order of a forward."""
        attention, mlp = self.self_attention, self.mlp
        found = [] if attention is None else [attention.linear_qkv, attention.linear_proj]
        return [*found, *([] if mlp is None else [mlp.linear_fc1, mlp.linear_fc2])]  # type: ignore[list-item]

    def norm_weights(self) -> dict[str, Weights]:
        """Return the weights of all norms, with those of q and k."""
        norms = dict(self.norms)
        if self.self_attention is not None and self.self_attention.config.qk_layernorm:
            norms |= {"q": self.self_attention.q_layernorm, "k": self.self_attention.k_layernorm}
        return {name: (norm.weight, getattr(norm, "bias", None)) for name, norm in norms.items()}  # type: ignore[misc]


class BlockFormulas:
    """The parts of a block between its linears as plain functions, for torch.compile.

    groups, queries: key/value heads of one of tp ranks, and query heads of each.
    """

    def __init__(self, config: LayerConfig, tp: int) -> None:
        self.epsilon, self.zero_centered = config.norm_epsilon, config.layernorm_zero_centered_gamma
        self.has_mean = config.normalization == "LayerNorm"
        self.has_attention, self.has_mlp = config.has_attention, config.has_mlp
        self.groups, self.head_dim = max(1, config.num_query_groups // tp), config.kv_channels
        self.queries = config.num_attention_heads // tp // self.groups
        self.qk_dims = 3 if config.qk_layernorm_scope == "projection" else 1
        self.scale, self.cap = config.softmax_scale, config.attn_logit_softcapping
        self.keeps = {
            "attention_probs": 1.0 - config.attention_dropout,
            "attention_output": 1.0 - config.hidden_dropout,
            "mlp_output": 1.0 - config.hidden_dropout,
        }
        name = config.activation
        self.function = GRADIENTS[name][0] if name in GRADIENTS else ACTIVATIONS[name]
        if name == "squared_relu":
            self.function = lambda x: F.relu(x).square()  # autograd does not differentiate one in place

    def norm(self, x: Tensor, weights: Weights, num_dims: int = 1) -> Tensor:
        """Return the norm of x over its last dims, computed in at least fp32."""
        dims, wide = tuple(range(-num_dims, 0)), at_least_fp32(x.dtype)
        weight, bias = weights
        scale, values = weight.to(wide).view(x.shape[-num_dims:]), x.to(wide)
        if self.has_mean and bias is not None:
            values = values - values.mean(dims, keepdim=True)
        values = values * torch.rsqrt(values.square().mean(dims, keepdim=True) + self.epsilon)
        values = values * (scale + 1 if self.zero_centered else scale)
        return (values if bias is None else values + bias.to(wide)).to(x.dtype)

    def heads(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, norms: dict[str, Weights]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split [s, b, g (n + 2) d] into q [s, b, g, n, d] and k, v [s, b, g, 1, d], normed and rotated."""
        x = qkv.view(*qkv.shape[:2], self.groups, self.queries + 2, self.head_dim)
        q, k, v = x.split((self.queries, 1, 1), dim=3)
        if "q" in norms:
            q, k = (self.norm(x, norms[name], self.qk_dims) for x, name in ((q, "q"), (k, "k")))
        if rotary is not None:
            q, k = (_rotated(x, *rotary) for x in (q, k))
            v = v.contiguous()  # written in the same pass; as a view it would keep all of qkv for the backward
        return q, k, v

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, explicit: bool, kept: Tensor | None
    ) -> Tensor:
        """Return core attention. kept: dropout mask of the probabilities."""
        if not explicit:
            return fused_attention(q, k, v, mask, self.scale)
        assert mask is not None
        dropout = None if kept is None else partial(self.dropout, kept=kept, site="attention_probs")
        return explicit_attention(q, k, v, mask, self.scale, self.cap, dropout)

    def activation(self, x: Tensor) -> Tensor:
        """Return the activation of linear_fc1's output."""
        return self.function(x)

    def dropout(self, x: Tensor, kept: Tensor | None, site: str) -> Tensor:
        """Return x times its mask over the probability of keeping an element; x itself without a mask."""
        return x if kept is None else x * kept * (1.0 / self.keeps[site])

    def add(self, hidden: Tensor, update: Tensor, norm: Weights | None, kept: Tensor | None, site: str) -> Tensor:
        """Return hidden + dropout(norm(update))."""
        return hidden + self.dropout(update if norm is None else self.norm(update, norm), kept, site)

    def add_and_norm(
        self,
        hidden: Tensor,
        update: Tensor,
        norm: Weights | None,
        kept: Tensor | None,
        site: str,
        following: Weights,
    ) -> tuple[Tensor, Tensor]:
        """Return `add`, and its norm."""
        hidden = self.add(hidden, update, norm, kept, site)
        return hidden, self.norm(hidden, following)

    def block(
        self,
        hidden: Tensor,
        context: tuple[tuple[Tensor, Tensor] | None, Tensor | None, bool],
        masks: dict[str, Tensor],
        norms: dict[str, Weights],
        linears: list[tuple[Tensor, Tensor | None, Tensor | None]],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the block's output and, detached, the inputs of its linears.

        context: rotary tables, attention mask, True for explicit attention. linears: weight, bias and handle of each.
        """
        rotary, mask, explicit = context
        inputs: list[Tensor] = []

        def linear(x: Tensor) -> Tensor:
            weight, bias, handle = linears[len(inputs)]
            inputs.append(x.detach())
            return F.linear(x, weight, bias) if handle is None else _TracedLinear.apply(x, weight, bias, handle)

        def normed(x: Tensor, name: str) -> Tensor:
            return self.norm(x, norms[name]) if name in norms else x

        def added(update: Tensor, norm: str, site: str) -> Tensor:
            return self.add(hidden, update, norms.get(norm), masks.get(site), site)

        if self.has_attention:
            q, k, v = self.heads(linear(normed(hidden, "input_layernorm")), rotary, norms)
            update = linear(self.attention(q, k, v, mask, explicit, masks.get("attention_probs")))
            hidden = added(update, "post_self_attn_layernorm", "attention_output")
        if self.has_mlp:
            update = linear(self.activation(linear(normed(hidden, "pre_mlp_layernorm"))))
            hidden = added(update, "post_mlp_layernorm", "mlp_output")
        return hidden, inputs


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head, as many as the tables have, in the tables' dtype."""
    half = cos.shape[-1]
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat([*turned, *([x[..., 2 * half :]] if x.shape[-1] > 2 * half else [])], dim=-1)


class CompiledBlock:
    """The compiled form of the blocks with one configuration.

    is_whole: one graph for the block; otherwise one for each region between linears, and what those recompute, as in
    the eager block. shape: of the hidden states; others, as in generation, run as written. compiler: torch.compile with
    its options.
    """

    def __init__(
        self, formulas: BlockFormulas, shape: tuple[int, ...], is_whole: bool, compiler: Compile | None = None
    ) -> None:
        self.formulas, self.shape, self.is_whole = formulas, shape, is_whole
        # dynamic=False: the trial and every step have the same shapes; fullgraph: a graph break is an error
        self._compile = compiler or partial(torch.compile, fullgraph=True, dynamic=False)
        self._functions: dict[str, Callable[..., Any]] = {}

    def accepts(self, hidden: Tensor, context: LayerContext) -> bool:
        """Return True for the hidden states and contexts of training and evaluation."""
        return hidden.shape == self.shape and context.cache is None

    def __call__(self, parts: Parts, hidden: Tensor, context: LayerContext) -> Tensor:
        """Return the block's output, with the backward that the eager block has."""
        masks = self._dropout_masks(parts, hidden, context)
        if not self.is_whole:
            return self._by_regions(parts, hidden, context, masks)
        run, linears, norms = self._compiled("block"), parts.linears, parts.norm_weights()
        given = context.rotary, context.mask, context.explicit
        weights = [(x.weight.detach(), None if x.bias is None else x.bias.detach()) for x in linears]
        if not torch.is_grad_enabled():
            output: Tensor = run(hidden, given, masks, norms, [(*each, None) for each in weights])[0]
            return output
        use = _BlockUse(linears)
        parameters = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        handles = _WeightGradients.apply(use, hidden.detach(), *parameters)
        each = [(*pair, handle) for pair, handle in zip(weights, handles, strict=True)]
        output, inputs = run(hidden, given, masks, norms, each)
        return _KeepInputs.apply(use, output, *inputs)

    def _by_regions(self, parts: Parts, hidden: Tensor, context: LayerContext, masks: dict[str, Tensor]) -> Tensor:
        attention, mlp, norms = parts.self_attention, parts.mlp, parts.norm_weights()
        normed: Tensor | None = None  # the input of the MLP, if the residual sum before it has computed it
        if attention is not None:
            start, recompute = hidden, None
            if "input_layernorm" in norms:
                norm = partial(self._compiled("norm"), weights=norms["input_layernorm"])
                start = norm(hidden)
                recompute = InputRecompute(norm, (hidden,)) if "layernorm" in parts.recompute else None
            qkv = attention.linear_qkv(start, recompute)
            if attention.config.has_projection_norms:  # with sums over tp
                q, k, v = attention.split_heads(qkv, context)
            else:
                q, k, v = self._compiled("heads")(qkv, context.rotary, {n: norms[n] for n in ("q", "k") if n in norms})
            update = attention.attend(q, k, v, context)
            site = "attention_output"
            tail = norms.get("post_self_attn_layernorm"), masks.get(site), site
            if mlp is not None and "pre_mlp_layernorm" in norms and not {"layernorm", "mlp"} & parts.recompute:
                following = norms["pre_mlp_layernorm"]
                hidden, normed = self._compiled("add_and_norm")(hidden, update, *tail, following)
            else:
                hidden = self._compiled("add")(hidden, update, *tail)
        if mlp is not None:
            activation = self._compiled("activation")
            if normed is None:
                update = mlp(hidden, parts.norms.get("pre_mlp_layernorm"), activation)
            else:
                update = mlp(normed, None, activation)
            site = "mlp_output"
            hidden = self._compiled("add")(hidden, update, norms.get("post_mlp_layernorm"), masks.get(site), site)
        return hidden

    def _compiled(self, name: str) -> Callable[..., Any]:
        """Return a function of the formulas, compiled. It has its own code, since torch limits the graphs of one."""
        if name not in self._functions:
            plain = getattr(BlockFormulas, name)
            own = FunctionType(plain.__code__.replace(), plain.__globals__, name, plain.__defaults__)
            self._functions[name] = self._compile(MethodType(own, self.formulas))
        return self._functions[name]

    def _dropout_masks(self, parts: Parts, hidden: Tensor, context: LayerContext) -> dict[str, Tensor]:
        """Draw the masks of one forward by their sites; none without dropout or outside training."""
        key, shapes = context.dropout_key, dict[str, tuple[tuple[int, ...], int | None]]()
        if key is None:
            return {}
        if parts.self_attention is not None:
            shapes["attention_output"] = hidden.shape, parts.dropout_rank
            if self.is_whole and context.explicit:
                heads, (seq, batch) = self.formulas.groups * self.formulas.queries, hidden.shape[:2]
                shapes["attention_probs"] = (batch, heads, seq, seq), parts.self_attention.core.head_rank
        if parts.mlp is not None:
            shapes["mlp_output"] = hidden.shape, parts.dropout_rank
        drops = {site: 1.0 - keep for site, keep in self.formulas.keeps.items()}
        return {
            site: keyed_mask(shape, drops[site], key, parts.layer, site, rank, hidden.device)
            for site, (shape, rank) in shapes.items()
            if drops[site]
        }


class _TracedLinear(Function):
    """y = x W^T + b inside a graph; the gradient of `handle`, which has y's shape, is dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad @ weight, None, None, grad


class _BlockUse:
    """One forward of a compiled block. inputs: of its linears, on the way from `_KeepInputs` to `_WeightGradients`."""

    def __init__(self, linears: list[ParallelLinear]) -> None:
        self.linears = linears
        self.inputs: tuple[Tensor, ...] = ()


class _WeightGradients(Function):
    """Returns a handle for each linear; the backward computes or queues the weight gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, use: _BlockUse, hidden: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """hidden: [s, b, h]. parameters: weight and bias of each linear in turn."""
        ctx.use, ctx.parameters = use, parameters
        scalar = hidden.new_empty(())
        return tuple([scalar.expand(*hidden.shape[:-1], linear.weight.shape[0]) for linear in use.linears])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        use: _BlockUse = ctx.use
        inputs, use.inputs = use.inputs, ()
        needed = [x if needs else None for x, needs in zip(ctx.parameters, ctx.needs_input_grad[2:], strict=True)]
        found: list[Tensor | None] = [None] * len(needed)
        for i in reversed(range(len(grads))):  # the order of the eager backward
            linear, grad, x = use.linears[i], grads[i], (inputs[i],)
            weight, bias = needed[2 * i : 2 * i + 2]
            pending = LinearWeightGradient(linear, weight, bias, x, None, None, SequenceGather(grad, None), grad)
            if linear.queue.is_deferring:
                linear.queue.submit(pending)
            else:
                pending.launch()
                found[2 * i : 2 * i + 2] = pending.compute()
        return None, None, *found


class _KeepInputs(Function):
    """Returns hidden; saves the inputs of the linears, and passes them to `_WeightGradients` in the backward."""

    @staticmethod
    def forward(ctx: Any, use: _BlockUse, hidden: Tensor, *inputs: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(*inputs)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.use.inputs = ctx.saved_tensors
        return None, grad, *[None] * len(ctx.use.inputs)

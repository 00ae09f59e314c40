"""Self-attention of one layer on one tp rank: projections, qk-norm, rotation, core attention softmax(scale q k^T) v.

linear_qkv's rows are in Megatron's order, one block per query group: [q_0 .. q_{n-1}, k, v] x head_dim. With
--attention-output-gate they are [q_0 .. q_{n-1}, gate_0 .. gate_{n-1}, k, v], and core attention's output is multiplied
by sigmoid of the gates (Qiu et al. 2025, arXiv:2505.06708). With fewer key/value heads than tp ranks, neighbouring
ranks share one: each holds its own query heads and a replica of k and v.

Shapes: s sequence, b batch, g key/value heads, n query heads per key/value head, d head_dim, all of this rank.
q: [s, b, g, n, d]; k, v: [s, b, g, 1, d]. Result: [s, b, h] (a slice of s with sequence parallelism).

Core attention runs the kernel that its options and context ask for: q, k and v may have any strides, k and v more keys
than s with a cache; its result is [s, b, g n d].

    fused_attention      torch's scaled_dot_product_attention; saves q, k, v (views into the tensor they come from),
                         its output and the log-sum-exp, [b, heads, s] fp32
    packed_attention     torch's variable-length kernel within packed documents (`gpu.packed_attention`); saves the same
    explicit_attention   separate GEMMs and softmax, for soft-capped logits, keyed dropout of the probabilities (the
                         same under every schedule and grid), attention sinks and --attention-softmax-in-fp32; saves
                         the probabilities, b heads s^2
    registered_attention functions of extensions (`model.registered`)
    BlockAttention       over a ring of cp ranks or the slices before, or with sinks (`ring_attention`); saves the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config.model import ATTENTIONS, AttentionHeads
from megapipe.gpu.packed_attention import packed_attention, torch_kernel
from megapipe.model.block_attention import BlockKernel, FusedBlocks, WrittenBlocks, prefers_cudnn
from megapipe.model.context import LayerContext, rotate_
from megapipe.model.context_parallel import ALONE
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.norm import Norm, NormFunction
from megapipe.model.partial_results import Passes
from megapipe.model.recompute import AttentionFunction
from megapipe.model.registered import registered_attention
from megapipe.model.ring_attention import BlockAttention
from megapipe.model.segments import NOTHING, Element, Elements, Operator, Segment, again_if, linear_element
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart
from megapipe.sharding.spec import Fused, Init, ParamSpec, QueryGroups
from megapipe.tensor_parallel.gemms import at_least_fp32
from megapipe.tensor_parallel.parameter import declared
from megapipe.tensor_parallel.random import keyed_dropout, keyed_mask


class SelfAttention(nn.Module):
    """Self-attention: elements from [s, b, h] (a slice of s with sequence parallelism) to the same shape."""

    declared_last = ("softmax_offset", "linear_proj")

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        config, tp = factory.config, factory.tp
        self.config, self.layer = config, layer
        self.recompute = factory.recompute
        self.head_dim = config.kv_channels
        self.groups = max(1, config.num_query_groups // tp.size)
        self.queries = config.num_attention_heads // tp.size // self.groups  # per group, on this rank
        self.core = CoreAttention(layer, factory, self.groups, self.queries, self.head_dim)
        heads, groups = config.num_attention_heads, config.num_query_groups
        width = heads * self.head_dim
        queries = 2 if config.attention_output_gate else 1  # projections as wide as the queries
        rows = queries * width + 2 * groups * self.head_dim
        slicing = QueryGroups(heads, groups, self.head_dim, is_gated=config.attention_output_gate)
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = factory.linear("column", layer, config.hidden_size, rows, qkv_bias, slicing)
        if config.qk_layernorm:
            self.q_layernorm, self.k_layernorm = factory.qk_norm(heads), factory.qk_norm(groups)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            offset = ParamSpec("", (heads,), 0, Fused(0), Init("normal", config.init_method_std), weight_decay=False)
            self.softmax_offset = declared(offset, tp.rank, tp.size)
        self.linear_proj = factory.linear("row", layer, width, config.hidden_size, config.add_bias_linear)

    def elements(self, norm: Elements = NOTHING) -> Iterator[Element]:
        """Yield the elements of the branch. norm: those before linear_qkv, which may be recomputed."""
        yield from again_if("layernorm" in self.recompute, norm)
        yield linear_element("linear_qkv", self.linear_qkv)
        yield self._heads()
        gate = [Segment("output_gate", gated)] if self.config.attention_output_gate else []
        yield from again_if("core_attn" in self.recompute, Elements([self.core_element, *gate]))
        yield linear_element("linear_proj", self.linear_proj)

    @property
    def core_element(self) -> Element:
        """Core attention."""
        return Operator(
            "core_attention",
            lambda context, q, k, v: self.core.of(context, self.softmax_offset)(q, k, v),
            slice(3),  # gates pass by
        )

    def _heads(self) -> Element:
        """Return the element that splits, norms and rotates heads: a segment, unless its norms are none."""
        is_rotary = self.config.rotary is not None
        options = self.config.attention_output_gate, self.config.qk_layernorm_after_rope and is_rotary
        heads = Heads(self.groups, self.queries, self.head_dim, *options)
        if self.config.qk_l2_norm:
            normed = replace(heads, norm=NormFunction(self.config.norm_epsilon, zero_centered=False))
            return Segment("heads", normed, lambda context, like: context.rotary or ())
        if not self.config.qk_layernorm:
            if self.config.position_tables is None:
                return Operator("heads", lambda context, qkv: heads(qkv))  # views alone
            return Segment("heads", heads, lambda context, like: context.rotary)
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        if not (isinstance(q_norm, Norm) and isinstance(k_norm, Norm) and q_norm.is_pure):
            return Operator("heads", lambda context, qkv: heads(qkv, *(context.rotary or ()), norms=(q_norm, k_norm)))
        normed = replace(heads, norm=q_norm.function)

        def operands(context: LayerContext, like: Tensor) -> tuple[Tensor | None, ...]:
            return *(*(context.rotary or ()), None, None)[:2], q_norm.weight, q_norm.bias, k_norm.weight, k_norm.bias

        return Segment("heads", normed, operands)


@dataclass(frozen=True)
class Heads:
    """Splits [s, b, g (n + 2) d] into q [s, b, g, n, d] and k, v [s, b, g, 1, d], normed and rotated; with gates
    [s, b, g (2 n + 2) d] into these and the gates, of q's shape. cos without sin: factors on q.

    norm: of q and of k, with the weights given.
    """

    groups: int
    queries: int
    head_dim: int
    is_gated: bool = False
    norms_last: bool = False  # the norms follow the rotation
    norm: NormFunction | None = None

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *weights: Tensor | None,  # and biases, of the norms of q and of k
        norms: tuple[nn.Module, nn.Module] | None = None,  # in place of `norm`
    ) -> tuple[Tensor, ...]:
        groups, queries, head_dim, compiles = self.groups, self.queries, self.head_dim, torch.compiler.is_compiling()

        def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            if norms is not None:
                return norms[0](q), norms[1](k)
            assert self.norm is not None
            return self.norm(q, *weights[:2]), self.norm(k, *weights[2:])

        has_norms = norms is not None or self.norm is not None
        is_normed_first = has_norms and not self.norms_last
        if cos is not None and not is_normed_first and not compiles:
            both = (slice(queries), slice(-2, -1)) if self.is_gated else (slice(queries + 1),)
            turned = both if sin is not None else (slice(queries),)
            qkv = rotate_(qkv, cos, sin, groups, head_dim, *turned)  # q and k, in place
        sizes = (queries, queries, 1, 1) if self.is_gated else (queries, 1, 1)
        q, *gate, k, v = qkv.view(*qkv.shape[:2], groups, sum(sizes), head_dim).split(sizes, dim=3)
        if is_normed_first:
            q, k = normed(q, k)
        if cos is not None and compiles:
            # v and the gates are written in the same pass; as views they would keep all of qkv for the backward
            q, v, *gate = rotated(q, cos, sin), *(x.contiguous() for x in (v, *gate))
            k = k.contiguous() if sin is None else rotated(k, cos, sin)
        elif cos is not None and is_normed_first:
            q = rotate_(q, cos, sin, groups, head_dim, slice(None))
            k = k if sin is None else rotate_(k, cos, sin, groups, head_dim, slice(None))
        return *(normed(q, k) if has_norms and self.norms_last else (q, k)), v, *gate


def gated(output: Tensor, gate: Tensor) -> Tensor:
    """Return output sigmoid(gate), computed in at least fp32. output: [s, b, g n d], gate: [s, b, g, n, d]."""
    return _Gated.apply(output, gate)  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    """`gated`; saves its inputs alone, which core attention and linear_qkv keep anyway."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(output, gate)
        return gate.to(at_least_fp32(gate.dtype)).sigmoid().flatten(2).mul(output).to(output.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output, gate = ctx.saved_tensors
        share = gate.to(at_least_fp32(gate.dtype)).sigmoid().flatten(2)
        of_output = (grad * share).to(output.dtype)
        of_gate = torch.ops.aten.sigmoid_backward(grad.to(share.dtype) * output, share)
        return of_output, of_gate.to(gate.dtype).view(gate.shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor | None) -> Tensor:
    """Return the rotation of the first channels of each head, as many as the tables have, for a graph of torch.compile.
    sin: None to multiply all by cos.

    `rotate_` writes in place, which a graph would do by a copy.
    """
    if sin is None:
        return (x * cos).to(x.dtype)
    half = cos.shape[-1]
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat([*turned, *([x[..., 2 * half :]] if x.shape[-1] > 2 * half else [])], dim=-1)


class CoreAttention:
    """Core attention of one layer, without parameters of its own.

    groups, queries: key/value heads on a tp rank, and query heads of each. value_width: channels of a value head, at
    most those of a key.
    """

    def __init__(self, layer: int, factory: LayerFactory, groups: int, queries: int, value_width: int) -> None:
        self.config, self.layer = factory.config, layer
        self.scale, self.value_width = factory.config.softmax_scale, value_width
        self.parallel = parallel = factory.context
        self.head_rank = factory.tp.rank  # among the ranks that compute core attention of other heads
        count, per_key = groups * queries, queries  # query heads during core attention
        if parallel is not None:
            self.head_rank, count = parallel.head_rank(self.head_rank), count // parallel.a2a.size
            per_key //= parallel.copies(groups)
        self.heads: AttentionHeads | None = None  # of a kind of attention that an extension has added
        if ATTENTIONS[self.config.attention_kind].function is not None:
            heads = range(self.head_rank * count, (self.head_rank + 1) * count)
            self.heads = AttentionHeads(self.scale, heads, self.config.num_attention_heads)
        self.kernel = factory.attention(layer, per_key, self.scale)
        self.passes = Passes(factory.kernels.fused)

    def of(self, context: LayerContext, offset: Tensor | None) -> AttentionFunction:
        """Return core attention as a function of q, k and v. offset: the layer's logits of attention sinks, if any."""
        core: AttentionFunction = partial(self._run, context=context, offset=offset)
        if context.kept_attention is not None and not context.blocks:  # blocks ask for kept results themselves
            core = partial(context.kept_attention, core)
        return core

    def _run(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, offset: Tensor | None) -> Tensor:
        parallel = self.parallel
        if context.cache is not None:
            return self._local(q, *context.cache.extend(self.layer, k, v), context, offset)
        if parallel is None:
            return self._attend(q, k, v, context, offset)
        q, k, v = parallel.heads_for_positions(q, k, v)
        output = self._attend(q, k, v, context, offset)
        return parallel.positions_for_heads(output.unflatten(-1, (-1, self.value_width))).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, offset: Tensor | None) -> Tensor:
        """Return attention over the keys of this rank, of its ring and of earlier slices."""
        if not context.blocks:
            return self._local(q, k, v, context, offset)
        ring = ALONE if self.parallel is None else self.parallel.exchange
        part = WHOLE_SEQUENCE if self.parallel is None else self.parallel.part
        kernel = self._block_kernel(q, k, v, context, part)
        attention = BlockAttention(
            self.layer,
            context.blocks,
            kernel,
            ring,
            context.adds_key_gradients,
            context.slice,
            context.kept_attention,
            self.passes,
        )
        return attention(q, k, v, self._sink(q, offset))

    def _sink(self, q: Tensor, offset: Tensor | None) -> Tensor | None:
        """Return the logits of attention sinks of q's heads; None without any."""
        heads, parallel = q.shape[2] * q.shape[3], self.parallel
        if self.config.softmax_type == "off-by-one":
            return q.new_zeros(heads)
        if offset is None or parallel is None:
            return offset
        return offset[parallel.a2a.rank * heads : (parallel.a2a.rank + 1) * heads]

    def _block_kernel(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, part: SequencePart) -> BlockKernel:
        """Return what computes blocks of attention. part: of every sequence, for which this rank has queries."""
        if not context.explicit and not (q.is_cuda and q.dtype is torch.float64):  # CUDA has no fused kernel for it
            return FusedBlocks(self.scale, prefers_cudnn(q, k, v, self.scale))
        rate, key, seq = self.config.attention_dropout, context.dropout_key, self.config.seq_length // part.ranks
        if rate == 0.0 or key is None:
            return WrittenBlocks(self.scale, self.config.attn_logit_softcapping)

        def kept(source: int, batch_and_heads: tuple[int, int], device: torch.device) -> Tensor:
            own, shape = replace(key, part=part, keys_of=source), (*batch_and_heads, seq, seq)
            return keyed_mask(shape, rate, own, self.layer, "attention_probs", self.head_rank, device)

        return WrittenBlocks(self.scale, self.config.attn_logit_softcapping, kept, 1.0 / (1.0 - rate))

    def _local(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, offset: Tensor | None) -> Tensor:
        """Return attention to keys of this rank. Without blocks, values narrower than keys get channels of zeros."""
        size, width = q.shape[-1], self.value_width
        if width == size:
            return self._whole(q, k, v, context, offset)
        heads = self._whole(q, k, F.pad(v, (0, size - width)), context, offset).unflatten(-1, (-1, size))
        return heads[..., :width].flatten(2)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, offset: Tensor | None) -> Tensor:
        if self.kernel is not None and context.cache is None:
            return self.kernel(q, k, v, context.borders)
        if context.borders is not None:
            kernel = partial(torch_kernel, scale=self.scale, window=self.config.window)
            return packed_attention(q, k, v, context.borders, kernel)
        if self.heads is not None:
            assert context.mask is not None
            return registered_attention(self.config.attention_kind, q, k, v, context.mask, self.heads)
        if not context.explicit:
            return fused_attention(q, k, v, context.mask, self.scale)
        assert context.mask is not None
        rate, key = self.config.attention_dropout, context.dropout_key
        if key is not None and self.parallel is not None:  # these are whole sequences
            key = replace(key, part=WHOLE_SEQUENCE)

        def dropout(probs: Tensor) -> Tensor:
            return keyed_dropout(probs, rate, key, self.layer, "attention_probs", self.head_rank)

        cap = self.config.attn_logit_softcapping
        return explicit_attention(q, k, v, context.mask, self.scale, cap, dropout, self._sink(q, offset))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Run torch's fused kernel. mask: additive, [1 or b, 1, s, keys] in q's dtype; None: causal, one query sees all."""
    seq, batch, groups, queries, _ = q.shape
    # CUDA's flash kernels share k and v between heads themselves; elsewhere expand shares them by a stride of 0
    native_gqa = q.is_cuda and mask is None and q.dtype in (torch.float16, torch.bfloat16)
    if not native_gqa:
        k, v = (x.expand(-1, batch, groups, queries, -1) for x in (k, v))
    # fold query groups into the batch, which shares k and v without a copy, unless each sequence has its own mask
    fold = 1 if queries > 1 and (mask is None or mask.shape[0] == 1) else 2
    q, k, v = (x.flatten(fold, fold + 1).permute(1, 2, 0, 3) for x in (q, k, v))  # [b g, n, s, d] or [b, g n, s, d]
    is_causal = mask is None and seq > 1
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=native_gqa
    )
    # the output has q's order of strides, [s, b, heads, d]: the reshape copies nothing
    return output.permute(2, 0, 1, 3).reshape(seq, batch, -1)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,  # additive, [1 or b, 1, s, keys]
    scale: float,
    cap: float | None,  # logits become cap * tanh(logits / cap)
    dropout: Callable[[Tensor], Tensor] | None,  # applied to the probabilities [b, g n, s, keys]
    offset: Tensor | None = None,  # [g n], the logit of a key without a value (an attention sink)
) -> Tensor:
    """Compute attention from GEMMs in q's dtype, with cap, mask and softmax in at least fp32."""
    seq, batch, groups, queries, head_dim = q.shape
    num_keys = k.shape[0]
    q = q.permute(1, 2, 3, 0, 4).reshape(batch * groups, queries * seq, head_dim)  # a copy where queries > 1
    k, v = (x.flatten(1, 3).transpose(0, 1) for x in (k, v))  # [b g, keys, d]
    # scale inside the GEMM: unscaled logits overflow fp16
    logits = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    logits = logits.view(batch, groups * queries, seq, num_keys)
    probs = _MaskedSoftmax.apply(logits, mask, cap, offset).to(v.dtype)
    if dropout is not None:
        probs = dropout(probs)
    output = torch.bmm(probs.view(batch * groups, queries * seq, num_keys), v)
    return output.view(batch, groups, queries, seq, head_dim).permute(3, 0, 1, 2, 4).reshape(seq, batch, -1)


class _MaskedSoftmax(torch.autograd.Function):
    """softmax(cap tanh(logits / cap) + mask) in at least fp32. Saves the probabilities and, with a cap, the tanh.

    offset: [heads], one more logit of every query, whose probability is left out (Xiao et al. 2023, arXiv:2309.17453).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor, cap: float | None, offset: Tensor | None) -> Tensor:
        ctx.dtype, ctx.offset_dtype = logits.dtype, None if offset is None else offset.dtype
        logits, squashed = logits.to(at_least_fp32(logits.dtype)), None
        if cap is not None:
            squashed = torch.div(logits, cap).tanh_()
            logits = squashed * cap
        logits = logits + mask
        probs = torch.softmax(logits, dim=-1)
        if offset is not None:
            probs *= torch.sigmoid(logits.logsumexp(-1, keepdim=True) - offset[:, None, None].to(logits.dtype))
        ctx.save_for_backward(probs, squashed)
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probs, squashed = ctx.saved_tensors
        grad = torch._softmax_backward_data(grad, probs, -1, probs.dtype)
        # a softmax's gradients sum to 0 over all of its logits
        of_offset = None if ctx.offset_dtype is None else grad.sum((0, 2, 3)).neg_().to(ctx.offset_dtype)
        if squashed is not None:
            torch.ops.aten.tanh_backward.grad_input(grad, squashed, grad_input=grad)  # in place
        return grad.to(ctx.dtype), None, None, of_offset

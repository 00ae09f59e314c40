"""`LayerContext`: the attention mask, rotary tables and real tokens that alike layers of a stage share for one
microbatch.

Rotary positions (Su et al. 2021, arXiv:2104.09864): channel c of a head is paired with c + r / 2, where r is the number
of rotated channels. Tables are in at least fp32. The backward is the rotation by the opposite angle and needs nothing
saved.

Masks are additive (0 or -inf), built once for each window and once per microbatch for documents. They cost s^2 elements
(b s^2 with documents) per stage and window, not per layer; plain causal attention with a fused kernel has no mask, nor
have kernels that take the borders of documents. With context parallelism positions are those in the whole sequence, and
layers that compute attention in blocks of queries and keys have a mask only for the blocks that need one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ATTENTIONS
from megapipe.errors import ConfigError
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.model.block_attention import MaskedBlock
from megapipe.model.dispatch import KeptRouting
from megapipe.model.microbatch import KVCache, Microbatch, MicrobatchSlice
from megapipe.model.recompute import KeptAttention
from megapipe.model.segments import Compiler
from megapipe.sharding.sequence import (
    WHOLE_SEQUENCE,
    SequencePart,
    SequenceSlice,
    attention_blocks,
    ring_steps,
)
from megapipe.tensor_parallel.gemms import at_least_fp32
from megapipe.tensor_parallel.random import DropoutKey

MaskedBlocks = tuple[MaskedBlock, ...]


@dataclass(frozen=True, eq=False)
class RealTokens:
    """The positions of a padded microbatch that hold tokens: routers see no others."""

    mask: Tensor  # bool [s, b], s the positions of this cp rank
    lengths: Tensor  # [b] int64, tokens of each sequence, those of all cp ranks

    def held(self, length: int, tp_rank: int) -> Tensor:
        """Return the mask of one tp rank, [length, b]; `length` is s, or s / tp with sequence parallelism."""
        parts = self.mask.shape[0] // length
        return self.mask if parts == 1 else self.mask.chunk(parts)[tp_rank]


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The inputs of a layer besides the hidden states."""

    rotary: tuple[Tensor, Tensor] | None  # cos and sin
    mask: Tensor | None  # [1 or b, 1, s, keys] in the activations' dtype; None: the kernel's causality
    # attention is written out: fused kernels lack soft-capping, keyed dropout, attention sinks and a softmax in fp32
    explicit: bool
    dropout_key: DropoutKey | None  # None outside training
    cache: KVCache | None = None
    borders: DocumentBorders | None = None  # attention stays within documents, without a mask
    kept_attention: KeptAttention | None = None  # keeps attention's results from the forward for the recompute
    kept_routing: KeptRouting | None = None  # keeps the routing of experts, likewise
    compiler: Compiler | None = None  # of the layer's segments
    # of attention in blocks, by rank of the ring whose keys they are; its own first. Of a slice: under 0
    blocks: Mapping[int, MaskedBlocks] = field(default_factory=dict)
    slice: MicrobatchSlice | None = None
    # factor on losses over the microbatch that are means: its tokens with --calculate-per-token-loss, which divides
    # by all tokens of the step
    loss_weight: Tensor | float = 1.0
    real: RealTokens | None = None  # for layers with experts; None: every position holds a token

    @property
    def masks(self) -> list[Tensor]:
        """All masks."""
        blocks = (each.mask for masked in self.blocks.values() for each in masked)
        return [mask for mask in (self.mask, *blocks) if mask is not None]

    def keeping(self, kept: KeptAttention | None) -> LayerContext:
        """Return the context with attention's results kept."""
        return self if kept is None else replace(self, kept_attention=kept)


class ContextBuilder:
    """Builds the contexts of each microbatch for the layers of one stage, by their global number."""

    def __init__(
        self,
        layers: Mapping[int, LayerConfig],
        has_attention_kernel: bool = False,
        part: SequencePart = WHOLE_SEQUENCE,
        rings: Mapping[int, SequencePart] | None = None,
        per_token_loss: bool = False,
    ) -> None:
        """has_attention_kernel: a library's kernel handles causality, window and soft-cap; only a cache needs masks.

        part: of every sequence, on this cp rank. rings: for each layer the part of which it has queries, once it has
        exchanged heads for positions; by default all of the sequence. per_token_loss: --calculate-per-token-loss.
        """
        self._has_experts = any(layer.num_experts is not None for layer in layers.values())
        self._per_token_loss = per_token_loss and self._has_experts
        whole = dict.fromkeys(layers, WHOLE_SEQUENCE) | dict(rings or {})
        named = {number: (layer, whole[number]) for number, layer in layers.items()}
        kinds = list(dict.fromkeys(named.values()))
        self._kinds, self._kind_of = kinds, {number: kinds.index(kind) for number, kind in named.items()}
        self.has_attention_kernel, self.part = has_attention_kernel, part
        configs = [layer for layer, _ in kinds]
        self.rotary = {layer.rotary: Rotary(layer, part) for layer in configs if layer.rotary is not None}
        # of one length only: generation asks for a new one with every token
        num_windows = max(1, len({layer.window_size for layer in configs}))
        self._causal_mask = lru_cache(maxsize=num_windows)(
            lambda seq, window, device, dtype: additive(causal(seq, window, device), dtype)
        )
        self._blocks = lru_cache(maxsize=num_windows * len(kinds))(blocks_with_masks)
        self._slices = cache(blocks_of_slice)  # one for each window and slice

    def __call__(self, microbatch: Microbatch, dtype: torch.dtype) -> dict[int, LayerContext]:
        """Build the contexts of a microbatch; alike layers share one. dtype: that of the activations."""
        make_mask, key = cache(partial(self._mask, microbatch, dtype)), microbatch.dropout_key
        make_blocks = cache(partial(self._masked_blocks, microbatch, dtype))
        tables = {options: rotary.tables(microbatch, at_least_fp32(dtype)) for options, rotary in self.rotary.items()}
        has_kernel = self.has_attention_kernel and microbatch.cache is None
        if has_kernel and microbatch.document_ids is not None:
            raise ValueError("this attention kernel takes the borders of documents, not a mask")
        contexts, of_slice, real = [], microbatch.slice, self.real_tokens(microbatch)
        seq = microbatch.tokens.shape[1] * self.part.ranks if of_slice is None else of_slice.place.seq
        weight: Tensor | float = 1.0
        if self._per_token_loss:
            weight = float(microbatch.tokens.numel()) if microbatch.loss_mask is None else microbatch.loss_mask.sum()
            if microbatch.loss_tokens is not None:
                weight = microbatch.loss_tokens
        for layer, ring in self._kinds:
            mask, explicit = None, False
            blocks: Mapping[int, MaskedBlocks] = {}
            if layer.has_attention and not has_kernel:
                explicit = layer.attn_logit_softcapping is not None or layer.attention_softmax_in_fp32
                explicit = explicit or (layer.softmax_type != "vanilla" and ring.ranks == 1)  # a ring adds sinks itself
                explicit = explicit or ATTENTIONS[layer.attention_kind].function is not None
                explicit = explicit or (layer.attention_dropout > 0.0 and key is not None)
                # documents have one mask for each window; a cache is longer than the new tokens
                if explicit and microbatch.borders is not None:
                    raise ValueError("attention that is written out needs document_ids, not the borders of documents")
                has_window = microbatch.cache is not None or (layer.window_size or seq) < seq
                is_needed = explicit or microbatch.document_ids is not None
                window = layer.window_size if has_window else None
                if ring.ranks > 1 or of_slice is not None:
                    blocks = make_blocks(ring, window)
                elif microbatch.borders is None:
                    mask = make_mask(is_needed, window)
            rotary = None if layer.rotary is None else tables[layer.rotary]
            kept = microbatch.cache, microbatch.borders
            own = LayerContext(rotary, mask, explicit, key, *kept, blocks=blocks, slice=of_slice, loss_weight=weight)
            contexts.append(own if real is None else replace(own, real=real))
        return {number: contexts[kind] for number, kind in self._kind_of.items()}

    def real_tokens(self, microbatch: Microbatch) -> RealTokens | None:
        """Return the positions that hold tokens; None without experts, or if all do."""
        padding = microbatch.padding
        if padding is None or not self._has_experts:
            return None
        real = ~padding.t()
        if self.part.ranks == 1:
            return RealTokens(real, real.sum(0))
        held = torch.cat([real[run.start : run.stop] for run in self.part.runs(real.shape[0])])
        return RealTokens(held, real.sum(0))

    def _masked_blocks(
        self, microbatch: Microbatch, dtype: torch.dtype, ring: SequencePart, window: int | None
    ) -> Mapping[int, MaskedBlocks]:
        seq, documents = microbatch.tokens.shape[1] * self.part.ranks, microbatch.document_ids
        if microbatch.slice is not None:
            place, of = microbatch.slice.place, (microbatch.tokens.device, dtype)
            made = (
                self._slices(place, window, *of)
                if documents is None
                else blocks_of_slice(place, window, *of, documents)
            )
            return {0: made}
        if documents is not None:
            return blocks_with_masks(ring, seq, window, microbatch.tokens.device, dtype, documents)
        return self._blocks(ring, seq, window, microbatch.tokens.device, dtype)

    def _mask(self, microbatch: Microbatch, dtype: torch.dtype, explicit: bool, window: int | None) -> Tensor | None:
        seq, device = microbatch.tokens.shape[1] * self.part.ranks, microbatch.tokens.device
        documents, kv_cache = microbatch.document_ids, microbatch.cache
        if kv_cache is not None:
            visible = kv_cache.visible(seq, window, device)
            if visible is None:
                length = kv_cache.length
                if not explicit and (length == 0 or seq == 1):
                    return None  # a single query sees all cached keys
                visible = torch.ones(seq, length + seq, dtype=torch.bool, device=device).tril_(length)
                visible = visible[None, None]
            return additive(visible, dtype)
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return additive(same & causal(seq, window, device), dtype)
        if not explicit and window is None:
            return None
        return self._causal_mask(seq, window, device, dtype)


def blocks_with_masks(
    ring: SequencePart,
    seq: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,  # [b, s], of the whole sequence
) -> dict[int, MaskedBlocks]:
    """Return the blocks of a part's queries by the rank whose keys they see, its own first, with their masks."""
    found: dict[int, MaskedBlocks] = {}

    def positions(part: SequencePart) -> Tensor:  # made on the device, which a copy from the host would wait for
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in part.runs(seq)])

    queries = positions(ring)
    for step in (0, *ring_steps(ring.ranks, seq, window)):
        source = (ring.rank - step) % ring.ranks
        keys = positions(SequencePart(source, ring.ranks))
        masked: list[MaskedBlock] = []
        for block in attention_blocks(ring, source, seq, window):
            if documents is None and block.kind != "masked":
                masked.append(MaskedBlock(block))
                continue
            q, k = queries[slice(*block.queries)], keys[slice(*block.keys)]
            visible = (q[:, None] >= k)[None, None]
            if window is not None:
                visible = visible & (q[:, None] < k + window)
            if documents is not None:
                visible = visible & (documents[:, q][:, None, :, None] == documents[:, k][:, None, None, :])
            masked.append(MaskedBlock(block._replace(kind="masked"), additive(visible, dtype), ~visible.any(-1)))
        found[source] = tuple(masked)
    return found


def blocks_of_slice(
    place: SequenceSlice,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,  # [b, s], of the whole sequence
) -> MaskedBlocks:
    """Return the blocks of a slice's queries, with their masks."""
    made = []
    for block in place.blocks(window, documents is not None):
        mask = None
        if block.kind == "masked":
            q = torch.arange(place.start, place.stop, device=device)
            k = torch.arange(*block.keys, device=device)
            visible = (q[:, None] >= k)[None, None]
            if window is not None:
                visible = visible & (q[:, None] < k + window)
            if documents is not None:
                visible = visible & (documents[:, q][:, None, :, None] == documents[:, k][:, None, None, :])
            mask = additive(visible, dtype)  # every query sees its own key
        made.append(MaskedBlock(block, mask))
    return tuple(made)


def causal(seq: int, window: int | None, device: torch.device) -> Tensor:
    """Return [1, 1, s, s], True where the query (row) i sees the key (column) j: j in (i - window, i]."""
    visible = torch.ones(seq, seq, dtype=torch.bool, device=device).tril_()
    if window is not None:
        visible.triu_(1 - window)
    return visible[None, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


class Rotary:
    """The cos and sin tables of alike layers, kept for the longest sequence so far (per device and dtype).

    part: of every sequence, on this cp rank.
    """

    def __init__(self, config: ResolvedModelConfig, part: SequencePart = WHOLE_SEQUENCE) -> None:
        self.config, self.part = config, part
        self.channels = config.rotary_channels()
        if self.channels % 2 or not self.channels:
            raise ConfigError(
                f"--rotary-percent {config.rotary_percent} of --kv-channels {config.kv_channels} is {self.channels} "
                "channels; rotary positions rotate pairs of channels: choose a percentage that gives an even number "
                "above 0"
            )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, microbatch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the positions, [s, b, 1, 1, r / 2] in dtype; b is 1 without position_ids."""
        if microbatch.position_ids is not None:
            return self._at(microbatch.position_ids.t(), dtype)
        seq, device, start = microbatch.tokens.shape[1], microbatch.tokens.device, microbatch.start
        key, first = (device, dtype), microbatch.slice
        held = self._tables[key][0].shape[0] if key in self._tables else 0
        if first is not None and held < first.place.seq:  # at once for all slices
            self._tables[key] = self._at(torch.arange(first.place.seq, device=device)[:, None], dtype)
        elif held < seq or (self.part.ranks > 1 and held != seq):
            positions = torch.from_numpy(self.part.positions(seq * self.part.ranks)).to(device)
            self._tables[key] = self._at(positions[:, None], dtype)
        cos, sin = self._tables[key]
        return cos[start : start + seq], sin[start : start + seq]

    def _at(self, positions_sb: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        even = torch.arange(0, self.channels, 2, dtype=dtype, device=positions_sb.device)
        frequencies = self.config.rotary_base ** (-even / self.channels)  # radians per position, [r / 2]
        frequencies = SCALINGS[self.config.rope_scaling_type](self.config, self.channels, frequencies)
        angles = (positions_sb[..., None].to(dtype) * frequencies)[:, :, None, None]
        amplitude = yarn_amplitude(self.config) if self.config.rope_scaling_type == "yarn" else 1.0
        return angles.cos() * amplitude, angles.sin() * amplitude


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, groups: int, heads: int, head_dim: int) -> Tensor:
    """Rotate, in place, the first `heads` of each group's heads.

    x: contiguous, viewed as [s, b, groups, heads or more, head_dim]; its first r channels are rotated, the others
    stay. No other operation may need the values of x: it is the output of a linear or of a norm.
    """
    return _Rotate.apply(x, cos, sin, (groups, heads, head_dim))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: tuple[int, int, int]) -> Tensor:
        ctx.tables, ctx.layout = (cos, sin), layout  # constants shared by all layers, not activations
        ctx.mark_dirty(x)
        _rotate_in_place(x, cos, sin, layout)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.tables
        # a copy, since hooks and other consumers may hold the gradient
        grad = grad.clone(memory_format=torch.contiguous_format)
        _rotate_in_place(grad, cos, -sin, ctx.layout)
        return grad, None, None, None


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, layout: tuple[int, int, int]) -> None:
    groups, heads, head_dim = layout
    rotate_pairs_(x.view(*x.shape[:2], groups, -1, head_dim)[:, :, :, :heads], cos, sin)


def rotate_pairs_(rotated: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate, in place and outside autograd, the first r channels of [s, b, groups, heads, r or more], any strides.

    cos, sin: [s, 1 or b, 1, 1, r / 2].
    """
    half = cos.shape[-1]
    first, second = rotated[..., :half], rotated[..., half : 2 * half]
    if rotated.dtype == cos.dtype:
        across = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(across)
    else:  # products in the tables' dtype, rounded once
        a, b = first.to(cos.dtype), second.to(cos.dtype)
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def _llama3(config: ResolvedModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """Llama 3.1: stretch wavelengths above original / low_freq_factor, keep those below original / high_freq_factor."""
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(frequencies / config.rope_scaling_factor, frequencies, kept)


def _yarn(config: ResolvedModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """NTK-by-parts of YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp from beta_fast to beta_slow turns."""

    def pair_with(turns: float) -> float:
        original = config.rope_original_max_position_embeddings
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first, last = pair_with(config.yarn_beta_fast), pair_with(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    pairs = torch.arange(channels // 2, dtype=frequencies.dtype, device=frequencies.device)
    # 0.001: the width that public implementations give an empty ramp
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return torch.lerp(frequencies, frequencies / config.rope_scaling_factor, stretched)


def yarn_amplitude(config: ResolvedModelConfig) -> float:
    """Return YaRN's factor of cos and sin, a quotient of terms 0.1 m ln(factor) + 1; logits get its square."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.rope_scaling_factor) + 1.0 if config.rope_scaling_factor > 1.0 else 1.0

    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return term(config.yarn_mscale) / term(config.yarn_mscale_all_dim)
    return term(1.0)


# (config, rotated channels, frequencies [r / 2]) -> scaled frequencies
SCALINGS = {
    "none": lambda config, channels, frequencies: frequencies,
    # position interpolation (Chen et al. 2023, arXiv:2306.15595)
    "linear": lambda config, channels, frequencies: frequencies / config.rope_scaling_factor,
    "llama3": _llama3,
    "yarn": _yarn,
}

"""`LayerContext`: the attention mask, rotary tables and real tokens that alike layers of a stage share for one
microbatch; `SharedTables`: what the stages of a rank share.

Rotary positions (Su et al. 2021, arXiv:2104.09864): channel c of a head is paired with c + r / 2, where r is the number
of rotated channels. Tables are in at least fp32. The backward is the rotation by the opposite angle and needs nothing
saved.

Masks are additive (0 or -inf), built once for each window and once per microbatch for documents. They cost s^2 elements
per rank and window, not per layer, and b s^2 with documents per stage and window; plain causal attention with a fused
kernel has no mask, nor have kernels that take the borders of documents. With context parallelism positions are those in
the whole sequence, and layers that compute attention in blocks of queries and keys have a mask only for the blocks that
need one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.layers import LayerConfig, has_narrow_values, is_explicit
from megapipe.errors import ConfigError
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.model.block_attention import MaskedBlock
from megapipe.model.microbatch import KVCache, Microbatch, MicrobatchSlice
from megapipe.model.recompute import KeptAttention
from megapipe.model.routing import KeptRouting
from megapipe.model.segments import Compiler
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart, SequenceSlice, Visibility
from megapipe.tensor_parallel.gemms import at_least_fp32
from megapipe.tensor_parallel.random import DropoutKey

MaskedBlocks = tuple[MaskedBlock, ...]
HeadLayout = tuple[int, int, tuple[slice, ...]]  # groups, channels of a head, the rotated heads of a group
Unit = tuple[int, int]  # a microbatch by its number in the global batch, and the number of its slice


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

    # cos and sin; with --yarn-query-scale a factor on queries, too; that alone with --nope-query-scale
    rotary: tuple[Tensor, ...] | None
    mask: Tensor | None  # [1 or b, 1, s, keys] in the activations' dtype; None: the kernel's causality
    # attention is written out: fused kernels lack soft-capping, keyed dropout and a softmax in fp32
    explicit: bool
    dropout_key: DropoutKey | None  # None outside training
    seen: Visibility | None = None  # the keys that core attention sees; None without attention
    cache: KVCache | None = None
    borders: DocumentBorders | None = None  # attention stays within documents, without a mask
    kept_attention: KeptAttention | None = None  # keeps attention's results from the forward for the recompute
    kept_routing: KeptRouting | None = None  # keeps the routing of experts, likewise
    compiler: Compiler | None = None  # of the layer's segments
    # of attention in blocks, by rank of the ring whose keys they are; its own first, under 0 without a ring
    blocks: Mapping[int, MaskedBlocks] = field(default_factory=dict)
    adds_key_gradients: bool = False  # Visibility.adds_key_gradients
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

    @property
    def unit(self) -> Unit:
        """The microbatch and slice of training."""
        assert self.dropout_key is not None
        return self.dropout_key.microbatch, 0 if self.slice is None else self.slice.place.number


@dataclass(eq=False)
class SharedTables:
    """Masks and rotary tables that do not depend on a microbatch, which the stages of a rank make once."""

    made: dict[Any, Any] = field(default_factory=dict)  # masks and blocks, for sequences of one length
    length: int = 0
    rotary: dict[Any, Rotary] = field(default_factory=dict)


class ContextBuilder:
    """Builds the contexts of each microbatch for the layers of one stage, by their global number."""

    def __init__(
        self,
        layers: Mapping[int, LayerConfig],
        has_attention_kernel: bool = False,
        part: SequencePart = WHOLE_SEQUENCE,
        rings: Mapping[int, SequencePart] | None = None,
        per_token_loss: bool = False,
        tables: SharedTables | None = None,
    ) -> None:
        """has_attention_kernel: a library's kernel handles causality, window and soft-cap; only a cache needs masks.

        part: of every sequence, on this cp rank. rings: for each layer the part of which it has queries, once it has
        exchanged heads for positions; by default all of the sequence. per_token_loss: --calculate-per-token-loss.
        tables: those of the rank's other stages.
        """
        self._has_experts = any(layer.num_experts is not None for layer in layers.values())
        self._per_token_loss = per_token_loss and self._has_experts
        whole = dict.fromkeys(layers, WHOLE_SEQUENCE) | dict(rings or {})
        named = {number: (layer, whole[number]) for number, layer in layers.items()}
        kinds = list(dict.fromkeys(named.values()))
        self._kinds, self._kind_of = kinds, {number: kinds.index(kind) for number, kind in named.items()}
        self.has_attention_kernel, self.part = has_attention_kernel, part
        configs = [layer for layer, _ in kinds]
        self._tables = tables or SharedTables()
        rotated = {layer.position_tables: layer for layer in configs if layer.position_tables is not None}
        self.rotary = {
            options: self._tables.rotary.setdefault((options, part), Rotary(layer, part))
            for options, layer in rotated.items()
        }

    def __call__(self, microbatch: Microbatch, dtype: torch.dtype) -> dict[int, LayerContext]:
        """Build the contexts of a microbatch; alike layers share one. dtype: that of the activations."""
        key, place, kv_cache = microbatch.dropout_key, microbatch.place(self.part), microbatch.cache
        if kv_cache is not None and kv_cache.length:
            place = SequenceSlice((kv_cache.length, kv_cache.length + place.length), 1)
        make = cache(partial(self._shared, microbatch, dtype))
        tables = {options: rotary.tables(microbatch, at_least_fp32(dtype)) for options, rotary in self.rotary.items()}
        has_kernel = self.has_attention_kernel and kv_cache is None
        if has_kernel and microbatch.document_ids is not None:
            raise ValueError("this attention kernel takes the borders of documents, not a mask")
        contexts, of_slice, real = [], microbatch.slice, self.real_tokens(microbatch)
        weight: Tensor | float = 1.0
        if self._per_token_loss:
            weight = float(microbatch.tokens.numel()) if microbatch.loss_mask is None else microbatch.loss_mask.sum()
            if microbatch.loss_tokens is not None:
                weight = microbatch.loss_tokens
        for layer, ring in self._kinds:
            mask, explicit, adds, seen = None, False, False, None
            blocks: Mapping[int, MaskedBlocks] = {}
            if layer.has_attention:
                seen = Visibility.of(place, microbatch.document_ids is not None, ring, **layer.limits)
            if seen is not None and not has_kernel:
                explicit = is_explicit(layer, has_dropout=key is not None)
                has_sinks = layer.softmax_type != "vanilla"  # in blocks a sink is one more block
                in_blocks = ring.ranks > 1 or of_slice is not None
                is_one_block = has_sinks or has_narrow_values(layer)
                in_blocks = in_blocks or (is_one_block and not explicit and kv_cache is None)
                explicit = explicit or (has_sinks and not in_blocks)
                if (explicit or in_blocks) and microbatch.borders is not None:
                    raise ValueError("attention that is written out, or in blocks, needs document_ids, not borders")
                sees_all = place.length == 1 or not place.start  # of the keys that a kernel without a mask sees
                is_causal = seen.is_causal and sees_all and (kv_cache is None or kv_cache.starts is None)
                if in_blocks:
                    blocks, adds = make(masked_blocks, seen), seen.adds_key_gradients
                elif microbatch.borders is None and (explicit or not is_causal):
                    mask = make(whole_mask, seen)
            rotary = None if layer.position_tables is None else tables[layer.position_tables]
            kept = microbatch.cache, microbatch.borders
            own = LayerContext(
                rotary,
                mask,
                explicit,
                key,
                seen,
                *kept,
                blocks=blocks,
                adds_key_gradients=adds,
                slice=of_slice,
                loss_weight=weight,
            )
            contexts.append(own if real is None else replace(own, real=real))
        return {number: contexts[kind] for number, kind in self._kind_of.items()}

    def real_tokens(self, microbatch: Microbatch) -> RealTokens | None:
        """Return the positions that hold tokens; None without experts, or if all do."""
        padding = microbatch.padding
        if padding is None or not self._has_experts:
            return None
        real = ~padding.t()
        held = torch.cat([real[run.start : run.stop] for run in self.part.runs(microbatch.place(self.part))])
        return RealTokens(held, real.sum(0))

    def _shared(self, microbatch: Microbatch, dtype: torch.dtype, make: Callable[..., Any], seen: Visibility) -> Any:
        """Return make(seen, device, dtype, ...), once for all microbatches where it does not depend on their values."""
        of, kv_cache = (microbatch.tokens.device, dtype), microbatch.cache
        if microbatch.document_ids is not None or kv_cache is not None:
            return make(seen, *of, microbatch.document_ids, None if kv_cache is None else kv_cache.starts)
        tables, key = self._tables, (make, seen, *of)
        if seen.place.seq != tables.length:  # generation asks for another length with every token
            tables.made.clear()
            tables.length = seen.place.seq
        if key not in tables.made:
            tables.made[key] = make(seen, *of)
        return tables.made[key]


def masked_blocks(
    seen: Visibility,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    starts: Tensor | None = None,
) -> dict[int, MaskedBlocks]:
    """Return the blocks that queries see, with their masks, by the rank whose keys they are, its own first. Arguments
    as in `visible`.
    """
    found: dict[int, MaskedBlocks] = {}
    queries = _positions(seen.query_runs, device)
    for source in seen.sources:
        keys, masked = _positions(seen.key_runs(source), device), list[MaskedBlock]()
        for block in seen.blocks(source):
            if block.kind != "masked":
                masked.append(MaskedBlock(block))
                continue
            positions = queries[slice(*block.queries)], keys[slice(*block.keys)]
            make = partial(_block_mask, block.can_be_empty, dtype, seen, *positions, documents, starts)
            masked.append(MaskedBlock(block, *make()) if documents is None else MaskedBlock(block, make=make))
        found[source] = tuple(masked)
    return found


def _block_mask(can_be_empty: bool, dtype: torch.dtype, *seen: Any) -> tuple[Tensor, Tensor | None]:
    """Return the mask of a block and its queries without a key. seen: the arguments of `visible`."""
    shown = visible(*seen)
    empty = ~shown.any(-1) if can_be_empty else None
    return additive(shown, dtype), empty


def whole_mask(
    seen: Visibility,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return the mask of all queries and keys of one rank, [1 or b, 1, queries, keys]. Arguments as in `visible`."""
    queries, keys = (_positions(runs, device) for runs in (seen.query_runs, seen.key_runs(0)))
    return additive(visible(seen, queries, keys, documents, starts), dtype)


def _positions(runs: Iterable[range], device: torch.device) -> Tensor:
    # made on the device, which a copy from the host would wait for
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def visible(
    seen: Visibility, q: Tensor, k: Tensor, documents: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Return [1 or b, 1, queries, keys], True where the query at a position of q sees the key at one of k.

    documents: of all positions, [b, s]. starts: of the sequences, [b]; what comes before them is padding.
    """
    rows = q[:, None]
    shown = (rows >= k)[None, None]
    begin = 0 if starts is None else starts.to(k.device)[:, None, None, None]
    if seen.window is not None:
        shown = shown & (k - begin >= seen.first_key(rows - begin))
    if documents is not None:
        shown = shown & (documents[:, q][:, None, :, None] == documents[:, k][:, None, None, :])
    if starts is not None:  # padding sees itself, so that no row of a softmax is empty
        shown = shown & (k >= begin) | (rows == k)
    return shown


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where visible, -inf elsewhere. Overwrites `visible`."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(visible.logical_not_(), -torch.inf)


class Rotary:
    """The cos and sin tables of alike layers, or their factors on queries, kept for the longest sequence so far (per
    device and dtype).

    part: of every sequence, on this cp rank.
    """

    def __init__(self, config: ResolvedModelConfig, part: SequencePart = WHOLE_SEQUENCE) -> None:
        self.config, self.part = config, part
        self.channels = config.rotary_channels()
        if config.position_embedding_type != "none" and (self.channels % 2 or not self.channels):
            raise ConfigError(
                f"--rotary-percent {config.rotary_percent} of --kv-channels {config.kv_channels} is {self.channels} "
                "channels; rotary positions rotate pairs of channels: choose a percentage that gives an even number "
                "above 0"
            )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def tables(self, microbatch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return cos and sin of the positions, [s, b, 1, 1, r / 2] in dtype, and with --yarn-query-scale the factors on
        queries, [s, b, 1, 1, 1]; b is 1 without position_ids. In layers without rotary positions the factors alone.
        """
        if microbatch.position_ids is not None:
            return self._at(microbatch.position_ids.t(), dtype)
        device, place, part = microbatch.tokens.device, microbatch.place(self.part), self.part
        key, start, length = (device, dtype), place.start // part.ranks, place.length // part.ranks
        held = self._tables[key][0].shape[0] if key in self._tables else 0
        local = place.seq // part.ranks  # positions of all slices
        if held < local or (part.ranks > 1 and held != local):
            positions = torch.from_numpy(replace(part, ends=place.ends).positions(place.seq)).to(device)
            self._tables[key] = self._at(positions[:, None], dtype)
        return tuple(table[start : start + length] for table in self._tables[key])

    def _at(self, positions_sb: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if self.config.position_embedding_type == "none":
            times = (positions_sb.to(dtype) + 1).div(self.config.nope_query_scale_length).floor()
            return ((1.0 + self.config.nope_query_scale * times.log1p())[:, :, None, None, None],)
        even = torch.arange(0, self.channels, 2, dtype=dtype, device=positions_sb.device)
        frequencies = self.config.rotary_base ** (-even / self.channels)  # radians per position, [r / 2]
        frequencies = SCALINGS[self.config.rope_scaling_type](self.config, self.channels, frequencies)
        angles = (positions_sb[..., None].to(dtype) * frequencies)[:, :, None, None]
        amplitude = yarn_amplitude(self.config) if self.config.rope_scaling_type == "yarn" else 1.0
        tables = angles.cos() * amplitude, angles.sin() * amplitude
        if not self.config.yarn_query_scale:
            return tables
        times = positions_sb.to(dtype).div(self.config.rope_original_max_position_embeddings).floor()
        return *tables, (1.0 + self.config.yarn_query_scale * times.log1p())[:, :, None, None, None]


def rotate_(x: Tensor, cos: Tensor, sin: Tensor | None, groups: int, head_dim: int, *heads: slice) -> Tensor:
    """Rotate, in place, some of each group's heads. sin: None to multiply them by cos.

    x: contiguous, viewed as [s, b, groups, heads of a group, head_dim]; its first r channels are rotated, the others
    stay. No other operation may need the values of x: it is the output of a linear or of a norm.
    """
    return _Rotate.apply(x, cos, sin, (groups, head_dim, heads))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor | None, layout: HeadLayout) -> Tensor:
        ctx.tables, ctx.layout = (cos, sin), layout  # constants shared by all layers, not activations
        ctx.mark_dirty(x)
        _rotate_in_place(x, cos, sin, layout)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.tables
        # a copy, since hooks and other consumers may hold the gradient
        grad = grad.clone(memory_format=torch.contiguous_format)
        _rotate_in_place(grad, cos, None if sin is None else -sin, ctx.layout)
        return grad, None, None, None


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor | None, layout: HeadLayout) -> None:
    groups, head_dim, heads = layout
    for each in heads:
        chosen = x.view(*x.shape[:2], groups, -1, head_dim)[:, :, :, each]
        if sin is None:
            chosen.copy_(chosen.to(cos.dtype) * cos)
        else:
            rotate_pairs_(chosen, cos, sin)


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

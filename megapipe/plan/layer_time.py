"""Seconds of one transformer layer and of the head, for one microbatch on one rank: GEMMs by their shapes, attention, what moves memory,
and tensor-parallel messages with what hides them.

Kernels run at a share of a peak that depends on the smallest size of a GEMM alone; everything else moves memory at a share of its rate.
With fp8 the GEMMs of a layer's linears have the peak of fp8, and casts move memory; attention and the head do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.dtypes import FP8
from megapipe.plan.activations import LocalSizes, is_explicit, layer_activation_bytes
from megapipe.plan.comm_chunks import WHOLE, CommChunks, comm_chunks
from megapipe.plan.flops import mean_keys
from megapipe.plan.fp8 import Casts
from megapipe.plan.hardware import Hardware, Link
from megapipe.plan.linears import linear_shapes
from megapipe.plan.traffic import (
    ALL_REDUCE,
    collective_bytes,
    head_collectives,
    layer_collectives,
    repeated_collectives,
)
from megapipe.schedule.action import Op

POINTWISE_PASSES = (
    2.0  # each byte a layer keeps is written once and read once in the forward; a backward moves twice as much
)


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of F, I and W of one layer, head or stage on one rank, by what takes them: 'gemm', 'attention', 'pointwise', 'tp'.

    hidden: tensor-parallel messages that a whole backward runs under its GEMMs, so that B takes I + W - hidden.
    """

    forward: Mapping[str, float]
    inputs: Mapping[str, float]
    weights: Mapping[str, float]
    hidden: float = 0.0
    seconds: Mapping[Op, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        forward, inputs, weights = (sum(parts.values()) for parts in (self.forward, self.inputs, self.weights))
        of_op = {Op.F: forward, Op.I: inputs, Op.W: weights, Op.B: inputs + weights - self.hidden}
        object.__setattr__(self, "seconds", of_op)

    def of(self, op: Op) -> float:
        return self.seconds[op]

    def __add__(self, other: OpSeconds) -> OpSeconds:
        return OpSeconds(
            _added(self.forward, other.forward),
            _added(self.inputs, other.inputs),
            _added(self.weights, other.weights),
            self.hidden + other.hidden,
        )

    def __mul__(self, count: int) -> OpSeconds:
        def times(parts: Mapping[str, float]) -> dict[str, float]:
            return {part: count * seconds for part, seconds in parts.items()}

        return OpSeconds(times(self.forward), times(self.inputs), times(self.weights), count * self.hidden)


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {part: one.get(part, 0.0) + other.get(part, 0.0) for part in {**one, **other}}


@dataclass(frozen=True)
class Tensors:
    """One microbatch on one rank. model: resolved. casts: of a layer whose linears multiply in fp8."""

    model: ModelConfig
    sizes: LocalSizes
    tp: int
    sequence_parallel: bool
    dtype: str
    chunks: CommChunks = WHOLE
    casts: Casts | None = None

    @classmethod
    def of(cls, model: ModelConfig, tp: int, sequence_parallel: bool, micro_batch_size: int, dtype: str) -> Tensors:
        """With what is the default in all else."""
        return cls(
            model, LocalSizes.of(model, tp, sequence_parallel, micro_batch_size, dtype), tp, sequence_parallel, dtype
        )

    @classmethod
    def asked(
        cls, config: Config, model: ModelConfig, tp: int, sequence_parallel: bool, micro_batch_size: int
    ) -> Tensors:
        """With the kernels, the loss and the overlaps that a configuration asks for, its layers in the model's dtype."""
        sizes = LocalSizes.asked(config, model, tp, sequence_parallel, micro_batch_size)
        chunks = comm_chunks(config.parallel) if tp > 1 else WHOLE
        return cls(model, sizes, tp, sequence_parallel, config.precision.dtype, chunks)

    def gemms(self) -> list[tuple[int, int, int]]:
        """(tokens, inputs, outputs) of the linears of a layer: linear_qkv, linear_proj, linear_fc1, linear_fc2."""
        return [(self.sizes.tokens, *shape) for shape in linear_shapes(self.model, self.sizes)]


def layer_seconds(tensors: Tensors, recompute: RecomputeConfig, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """One transformer layer. Recomputation is part of I."""
    linears = tensors.gemms()
    gemms = [_linear_seconds(tensors, hardware, *sizes) for sizes in linears]
    gemm, attention = sum(gemms), attention_seconds(tensors, hardware)
    kept = sum(layer_activation_bytes(tensors.model, tensors.sizes).values()) - _squares(tensors)
    pointwise = POINTWISE_PASSES * kept / hardware.pointwise_bytes_per_second
    collective, count = _collective_seconds(tensors, tp_link), layer_collectives(tensors.sequence_parallel, recompute)
    columns, rows = (linears[0], linears[2]), (linears[1], linears[3])
    gathers, reductions = (partial(each, tensors, hardware, tp_link) for each in (_gather_seconds, _reduction_seconds))
    messages = sum(map(gathers, columns)) + sum(map(reductions, rows))
    casts = [_cast_seconds(tensors, hardware, op, linears) for op in (Op.F, Op.I, Op.W)]
    forward = {"gemm": gemm, "attention": attention, "pointwise": pointwise + casts[0], "tp": messages}
    repeated = {0: 0.0, 1: gathers(linears[2]), 4: messages}[repeated_collectives(tensors.sequence_parallel, recompute)]
    inputs = {
        "gemm": gemm,
        "attention": _backward_of_attention(tensors.model) * attention,
        "pointwise": 2.0 * pointwise + casts[1],
        "tp": sum(map(gathers, rows)) + sum(map(reductions, columns)) + repeated,
    }
    weights = {"gemm": gemm, "pointwise": casts[2], "tp": count.weights * collective}
    again = _recomputed(tensors, recompute, hardware, forward)
    hidden = sum(_hidden(tensors, tp_link, gemms[linear], reductions(linears[linear])) for linear in (0, 2))
    return OpSeconds(forward, {part: inputs[part] + again.get(part, 0.0) for part in inputs}, weights, hidden)


def head_seconds(tensors: Tensors, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """Final norm, output layer and loss."""
    sizes = tensors.sizes
    linear = sizes.tokens, sizes.hidden, sizes.vocab
    gemm, reduction = (
        _gemm_seconds(hardware, tensors.dtype, *linear),
        _reduction_seconds(tensors, hardware, tp_link, linear),
    )
    logits = sizes.tokens * sizes.vocab * sizes.wide
    collective, count = _collective_seconds(tensors, tp_link), head_collectives(tensors.sequence_parallel)
    again = 1 if sizes.chunks_loss else 0  # logits in chunks are computed once more in a backward
    return OpSeconds(
        {
            "gemm": gemm,
            "pointwise": 3 * logits / hardware.pointwise_bytes_per_second,
            "tp": _gather_seconds(tensors, hardware, tp_link, linear),
        },
        {
            "gemm": (1 + again) * gemm,
            "pointwise": (2 + again) * logits / hardware.pointwise_bytes_per_second,
            "tp": reduction,
        },
        {"gemm": gemm, "tp": count.weights * collective},
        _hidden(tensors, tp_link, gemm, reduction),
    )


def attention_seconds(tensors: Tensors, hardware: Hardware) -> float:
    """softmax(q k^T) v: fused kernels skip what a causal mask hides; written out, all is computed, and probabilities are moved."""
    model, sizes = tensors.model, tensors.sizes
    if not is_explicit(model):
        flops = 4.0 * sizes.tokens * mean_keys(sizes.seq, model.window_size) * sizes.heads * sizes.channels
        return flops / (hardware.peak(tensors.dtype) * hardware.attention_share)
    squares = float(sizes.batch * sizes.heads * sizes.seq * sizes.seq)
    dropped = 2.0 * sizes.element + 1.0 if model.attention_dropout > 0 else 0.0  # read, write, and the mask
    flops = 4.0 * squares * sizes.channels
    moved = squares * (4.0 * sizes.element + dropped)
    return (
        flops / (hardware.peak(tensors.dtype) * hardware.attention_share) + moved / hardware.pointwise_bytes_per_second
    )


def _backward_of_attention(model: ModelConfig) -> float:
    """Its backward in forwards: four products for two; a fused kernel makes the probabilities again."""
    return 2.0 if is_explicit(model) else 2.5


def _squares(tensors: Tensors) -> int:
    """Bytes kept of matrices of queries and keys: their time is the attention's."""
    kept = layer_activation_bytes(tensors.model, tensors.sizes)
    return kept.get("attention probabilities", 0)


def _linear_seconds(tensors: Tensors, hardware: Hardware, rows: int, inputs: int, outputs: int) -> float:
    """One product of a layer's linear, in the arithmetic of the layer."""
    return _gemm_seconds(hardware, tensors.dtype if tensors.casts is None else FP8, rows, inputs, outputs)


def _gemm_seconds(hardware: Hardware, dtype: str, rows: int, inputs: int, outputs: int) -> float:
    flops = 2.0 * rows * inputs * outputs
    compute = flops / (hardware.peak(dtype) * hardware.gemm_share(min(rows, inputs, outputs)))
    operand = 1.0 if dtype == FP8 else 2.0
    moved = operand * (rows * inputs + inputs * outputs) + 2.0 * rows * outputs
    return max(compute, moved / hardware.memory_bytes_per_second)


def _cast_seconds(tensors: Tensors, hardware: Hardware, op: Op, gemms: list[tuple[int, int, int]]) -> float:
    """What fp8 moves beside these GEMMs in F, I or W."""
    casts = tensors.casts
    if casts is None:
        return 0.0
    read = sum(rows * inputs for rows, inputs, _ in gemms)
    written = sum(rows * outputs for rows, _, outputs in gemms)
    weights = sum(inputs * outputs for _, inputs, outputs in gemms)
    moved = {
        Op.F: casts.inputs * read + casts.weight * weights,
        Op.I: casts.gradients * written,
        Op.W: casts.both * (read + written) + casts.weight_gradient * weights,
    }[op]
    return moved / hardware.pointwise_bytes_per_second


def _collective_seconds(tensors: Tensors, link: Link, chunks: int = 1) -> float:
    """Of one of so many chunks of an all-gather or reduce-scatter of hidden states."""
    if tensors.tp == 1:
        return 0.0
    return collective_bytes(tensors.sizes, tensors.tp) / chunks / link.bytes_per_second + link.latency_seconds


def _gather_seconds(tensors: Tensors, hardware: Hardware, link: Link, linear: tuple[int, int, int]) -> float:
    """What gathering the tokens of a linear adds to its GEMM; nothing without sequence parallelism."""
    chunks = tensors.chunks.gather
    return (
        _exposed(tensors, hardware, _collective_seconds(tensors, link, chunks), chunks, linear)
        if tensors.sequence_parallel
        else 0.0
    )


def _reduction_seconds(tensors: Tensors, hardware: Hardware, link: Link, linear: tuple[int, int, int]) -> float:
    """What the sum over tp of a linear's result adds to its GEMM: a reduce-scatter, without sequence parallelism an all-reduce."""
    chunks = tensors.chunks.reduce
    return _exposed(tensors, hardware, _passes(tensors) * _collective_seconds(tensors, link, chunks), chunks, linear)


def _exposed(
    tensors: Tensors, hardware: Hardware, collective: float, chunks: int, linear: tuple[int, int, int]
) -> float:
    """Of a collective in chunks that each take so long and run under the GEMM of a neighbour: one, what is longer than a GEMM of the
    others, and what smaller GEMMs take longer than one."""
    tokens, *sizes = linear
    whole, part = (_linear_seconds(tensors, hardware, rows, *sizes) for rows in (tokens, max(1, tokens // chunks)))
    return collective + (chunks - 1) * max(0.0, collective - part) + max(0.0, chunks * part - whole)


def _passes(tensors: Tensors) -> int:
    """Collectives that a sum over tp counts as."""
    return 1 if tensors.sequence_parallel else ALL_REDUCE


def _hidden(tensors: Tensors, link: Link, gemm: float, reduction: float) -> float:
    """Of a column-parallel linear's backward: under sequence parallelism its input is gathered again under the GEMM of the input gradient,
    which is then scattered under that of the weights; without, it is all-reduced there. Whole in both, where I alone, whose reduction is
    given, may cut it into chunks."""
    collective, passes = _collective_seconds(tensors, link), _passes(tensors)
    gather = min(collective, gemm) if tensors.sequence_parallel else 0.0
    return gather + min(passes * collective, gemm) - (passes * collective - reduction)


def _recomputed(
    tensors: Tensors, recompute: RecomputeConfig, hardware: Hardware, forward: Mapping[str, float]
) -> dict[str, float]:
    """What a backward computes again; its tensor-parallel messages are counted in `traffic`."""
    if recompute.recompute_granularity is None:
        return {}
    if recompute.recompute_granularity == "full":
        without = {"tp", "attention"} if recompute.recompute_keep_attention else {"tp"}
        return {part: seconds for part, seconds in forward.items() if part not in without}
    modules, again = frozenset(recompute.recompute_modules), dict.fromkeys(forward, 0.0)
    if "core_attn" in modules:
        again["attention"] += forward["attention"]
    if "mlp" in modules:
        first = tensors.gemms()[2]
        again["gemm"] += _linear_seconds(tensors, hardware, *first)
        again["pointwise"] += _cast_seconds(tensors, hardware, Op.F, [first])
    kept = layer_activation_bytes(tensors.model, tensors.sizes)
    saved = sum(kept.values()) - sum(
        layer_activation_bytes(tensors.model, tensors.sizes, modules - {"core_attn"}).values()
    )
    again["pointwise"] += POINTWISE_PASSES * saved / hardware.pointwise_bytes_per_second
    return again

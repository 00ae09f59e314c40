"""Seconds of one transformer layer and of the head, for one microbatch on one rank: GEMMs by their shapes, attention, what moves memory,
and tensor-parallel messages with what hides them.

Kernels run at a share of a peak that depends on the smallest size of a GEMM alone; everything else moves memory at a share of its rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.planner.activations import LocalSizes, is_explicit, layer_activation_bytes
from megapipe.planner.comm_chunks import WHOLE, CommChunks
from megapipe.planner.flops import mean_keys
from megapipe.planner.hardware import Hardware, Link
from megapipe.planner.traffic import ALL_REDUCE, collective_bytes, head_collectives, layer_collectives, repeated_collectives
from megapipe.schedule.action import Op

POINTWISE_PASSES = 2.0  # each byte a layer keeps is written once and read once in the forward; a backward moves twice as much


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
    """One microbatch on one rank. model: resolved."""

    model: ModelConfig
    sizes: LocalSizes
    tp: int
    sequence_parallel: bool
    dtype: str
    chunks: CommChunks = WHOLE

    @classmethod
    def of(
        cls, model: ModelConfig, tp: int, sequence_parallel: bool, micro_batch_size: int, dtype: str, chunks: CommChunks = WHOLE
    ) -> Tensors:
        sizes = LocalSizes.of(model, tp, sequence_parallel, micro_batch_size, dtype)
        return cls(model, sizes, tp, sequence_parallel, dtype, chunks if tp > 1 else WHOLE)

    def gemms(self) -> list[tuple[int, int, int]]:
        """(tokens, inputs, outputs) of the linears of a layer: linear_qkv, linear_proj, linear_fc1, linear_fc2."""
        s = self.sizes
        gates = 2 if self.model.activation in GATED_ACTIVATIONS else 1
        queries = s.heads * s.channels
        return [
            (s.tokens, s.hidden, queries + 2 * s.groups * s.channels),
            (s.tokens, queries, s.hidden),
            (s.tokens, s.hidden, gates * s.ffn),
            (s.tokens, s.ffn, s.hidden),
        ]


def layer_seconds(tensors: Tensors, recompute: RecomputeConfig, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """One transformer layer. Recomputation is part of I."""
    linears = tensors.gemms()
    gemms = [_gemm_seconds(hardware, tensors.dtype, *sizes) for sizes in linears]
    gemm, attention = sum(gemms), attention_seconds(tensors, hardware)
    kept = sum(layer_activation_bytes(tensors.model, tensors.sizes).values()) - _squares(tensors)
    pointwise = POINTWISE_PASSES * kept / hardware.pointwise_bytes_per_second
    collective, count = _collective_seconds(tensors, tp_link), layer_collectives(tensors.sequence_parallel, recompute)
    columns, rows = (linears[0], linears[2]), (linears[1], linears[3])
    gathers, reductions = (partial(each, tensors, hardware, tp_link) for each in (_gather_seconds, _reduction_seconds))
    messages = sum(map(gathers, columns)) + sum(map(reductions, rows))
    forward = {"gemm": gemm, "attention": attention, "pointwise": pointwise, "tp": messages}
    repeated = {0: 0.0, 1: gathers(linears[2]), 4: messages}[repeated_collectives(tensors.sequence_parallel, recompute)]
    inputs = {
        "gemm": gemm,
        "attention": _backward_of_attention(tensors.model) * attention,
        "pointwise": 2.0 * pointwise,
        "tp": sum(map(gathers, rows)) + sum(map(reductions, columns)) + repeated,
    }
    weights = {"gemm": gemm, "tp": count.weights * collective}
    again = _recomputed(tensors, recompute, hardware, forward)
    hidden = sum(_hidden(tensors, tp_link, gemms[linear], reductions(linears[linear])) for linear in (0, 2))
    return OpSeconds(forward, {part: inputs[part] + again.get(part, 0.0) for part in inputs}, weights, hidden)


def head_seconds(tensors: Tensors, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """Final norm, output layer and loss."""
    sizes = tensors.sizes
    linear = sizes.tokens, sizes.hidden, sizes.vocab
    gemm, reduction = _gemm_seconds(hardware, tensors.dtype, *linear), _reduction_seconds(tensors, hardware, tp_link, linear)
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
    return flops / (hardware.peak(tensors.dtype) * hardware.attention_share) + moved / hardware.pointwise_bytes_per_second


def _backward_of_attention(model: ModelConfig) -> float:
    """Its backward in forwards: four products for two; a fused kernel makes the probabilities again."""
    return 2.0 if is_explicit(model) else 2.5


def _squares(tensors: Tensors) -> int:
    """Bytes kept of matrices of queries and keys: their time is the attention's."""
    kept = layer_activation_bytes(tensors.model, tensors.sizes)
    return kept.get("attention probabilities", 0)


def _gemm_seconds(hardware: Hardware, dtype: str, rows: int, inputs: int, outputs: int) -> float:
    flops = 2.0 * rows * inputs * outputs
    compute = flops / (hardware.peak(dtype) * hardware.gemm_share(min(rows, inputs, outputs)))
    moved = 2.0 * (rows * inputs + inputs * outputs + rows * outputs)
    return max(compute, moved / hardware.memory_bytes_per_second)


def _collective_seconds(tensors: Tensors, link: Link, chunks: int = 1) -> float:
    """Of one of so many chunks of an all-gather or reduce-scatter of hidden states."""
    if tensors.tp == 1:
        return 0.0
    return collective_bytes(tensors.sizes, tensors.tp) / chunks / link.bytes_per_second + link.latency_seconds


def _gather_seconds(tensors: Tensors, hardware: Hardware, link: Link, linear: tuple[int, int, int]) -> float:
    """What gathering the tokens of a linear adds to its GEMM; nothing without sequence parallelism."""
    chunks = tensors.chunks.gather
    return _exposed(tensors, hardware, _collective_seconds(tensors, link, chunks), chunks, linear) if tensors.sequence_parallel else 0.0


def _reduction_seconds(tensors: Tensors, hardware: Hardware, link: Link, linear: tuple[int, int, int]) -> float:
    """What the sum over tp of a linear's result adds to its GEMM: a reduce-scatter, without sequence parallelism an all-reduce."""
    chunks = tensors.chunks.reduce
    return _exposed(tensors, hardware, _passes(tensors) * _collective_seconds(tensors, link, chunks), chunks, linear)


def _exposed(tensors: Tensors, hardware: Hardware, collective: float, chunks: int, linear: tuple[int, int, int]) -> float:
    """Of a collective in chunks that each take so long and run under the GEMM of a neighbour: one, what is longer than a GEMM of the
    others, and what smaller GEMMs take longer than one."""
    tokens, *sizes = linear
    whole, part = (_gemm_seconds(hardware, tensors.dtype, rows, *sizes) for rows in (tokens, max(1, tokens // chunks)))
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


def _recomputed(tensors: Tensors, recompute: RecomputeConfig, hardware: Hardware, forward: Mapping[str, float]) -> dict[str, float]:
    """What a backward computes again; its tensor-parallel messages are counted in `traffic`."""
    if recompute.recompute_granularity is None:
        return {}
    if recompute.recompute_granularity == "full":
        return {part: seconds for part, seconds in forward.items() if part != "tp"}
    modules, again = frozenset(recompute.recompute_modules), dict.fromkeys(forward, 0.0)
    if "core_attn" in modules:
        again["attention"] += forward["attention"]
    if "mlp" in modules:
        again["gemm"] += _gemm_seconds(hardware, tensors.dtype, *tensors.gemms()[2])
    kept = layer_activation_bytes(tensors.model, tensors.sizes)
    saved = sum(kept.values()) - sum(layer_activation_bytes(tensors.model, tensors.sizes, modules - {"core_attn"}).values())
    again["pointwise"] += POINTWISE_PASSES * saved / hardware.pointwise_bytes_per_second
    return again

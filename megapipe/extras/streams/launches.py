"""The roofline of a step: its kernels, the bytes that they move, and the seconds that these take.

`count` counts the launches of the code on a fake CUDA device, for a plan with few layers and microbatches; here are the
seconds of each launch at rates that good kernels reach, and the step that follows from them.
`megapipe plan --roofline` prints it. Nothing of this was measured on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple

from megapipe.config.parallel import RecomputeConfig
from megapipe.dtypes import FP8
from megapipe.formatting import text_table
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import ALL_REDUCE, ring_bytes
from megapipe.plan.activations import layers_with_recompute
from megapipe.plan.hardware import GIGA, TERA, WITHOUT_MATRIX_UNITS, Hardware
from megapipe.plan.layer_costs import layer_flops
from megapipe.plan.layer_time import OpSeconds, context_links, expert_links_of, ring_link
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, optimizer_bytes, predict_step
from megapipe.plan.traces import EXPERT_GROUPS
from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.partition import StageLayers

# Shares of data-sheet peaks that good kernels reach on large tensors of an H100 SXM: 690 of 989 TFLOP/s in GEMMs (and
# as much of the peak in fp8), 2.5 of 3.35 TB/s, attention 600 TFLOP/s forward and 480 backward.
GEMM_SHARE, MEMORY_SHARE = 690 / 989, 2.5 / 3.35
ATTENTION_SHARES = (600 / 989, 480 / 989)
KERNEL_SECONDS = 2e-6  # from the end of one kernel to the start of the next
# kinds of launches; '' moves memory
GEMM, ATTENTION, ATTENTION_BACKWARD = "GEMM", "attention", "attention backward"
COLLECTIVE, MESSAGE, HOST_WAIT = "collective", "message", "host wait"
KERNELS = ("", GEMM, ATTENTION, ATTENTION_BACKWARD)
COMPUTE = {op.value for op in COMPUTE_OPS}
LAYER_GROUPS = ("tp", "cp", "ep", "etp", "kv")  # whose collectives stand in layers; of the others a step has its own
LEAST_SHOWN = 5e-6  # seconds
OF_MODEL = ("num_layers", "layer_pattern", "window_attn_skip_freq", "no_rope_freq", "moe_layer_freq")


class Launch(NamedTuple):
    """One kernel, collective or message, or one wait of the host, as a rank launches it.

    layer: its global number, None outside of layers. part: the element of the layer. op, stage, microbatch: of the
    action; '' and -1 outside of the row. num_bytes: read and written; of a collective its whole tensor. dtype: of a
    product's operands. group: kind of the group of a collective.
    """

    queue: str
    name: str
    file: str  # file:function
    layer: int | None
    part: str
    op: str
    stage: int
    microbatch: int
    num_bytes: float = 0.0
    kind: str = ""
    flops: float = 0.0
    dtype: str = ""
    group: str = ""


Timed = tuple[Launch, float]  # with the seconds that it adds
Counted = Mapping[int, Sequence[Timed]]  # of each rank one step


def achievable(hardware: Hardware) -> Hardware:
    """Return hardware with the rates of good kernels in place of those of the time model."""
    return replace(
        hardware,
        gemm_shares=((1, GEMM_SHARE), (2, GEMM_SHARE)),
        memory_bytes_per_second=hardware.memory_bytes_per_second * MEMORY_SHARE,
        attention_share=ATTENTION_SHARES[0],
        attention_rates={},
    )


def launch_seconds(plan: RunPlan, hardware: Hardware) -> Callable[[Launch], float]:
    """Return the function that gives the seconds of a launch. hardware: `achievable`."""
    dtypes = {"float16": "fp16", "bfloat16": "bf16"}
    shares = {GEMM: GEMM_SHARE, ATTENTION: ATTENTION_SHARES[0], ATTENTION_BACKWARD: ATTENTION_SHARES[1]}

    def peak(dtype: str) -> float:
        if dtype.startswith("float8"):
            return hardware.peak(FP8)
        return hardware.peak(dtypes[dtype]) if dtype in dtypes else hardware.peak("bf16") / WITHOUT_MATRIX_UNITS

    def seconds(launch: Launch) -> float:
        if launch.kind == COLLECTIVE:
            return collective_seconds(launch, plan, hardware)
        if launch.kind in (MESSAGE, HOST_WAIT):
            return 0.0
        moved = launch.num_bytes / hardware.memory_bytes_per_second if launch.kind in ("", GEMM) else 0.0
        computed = launch.flops / (peak(launch.dtype) * shares[launch.kind]) if launch.kind else 0.0
        return max(moved, computed) + KERNEL_SECONDS

    hardware.peak(plan.config.precision.dtype)  # an error before anything is counted
    return seconds


def collective_seconds(launch: Launch, plan: RunPlan, hardware: Hardware) -> float:
    """Return the seconds of a collective on the links of its group."""
    topology, kind = plan.topology, launch.group
    links = hardware.node, hardware.network
    ranks = len(topology.group_of(kind, 0))
    if kind in EXPERT_GROUPS and launch.name != "all_reduce":
        return expert_links_of(topology, *links).seconds(kind, launch.num_bytes, ranks)
    link, num_bytes = ring_link(topology, kind, *links), ring_bytes(launch.num_bytes, ranks)
    if launch.name == "shift":
        link, num_bytes = context_links(topology, *links).ring, launch.num_bytes
    elif launch.name == "all_to_all":
        contexts = context_links(topology, *links)
        link = contexts.inner if kind == "cp_a2a" else contexts.exchange
    passes = ALL_REDUCE if launch.name == "all_reduce" else 1
    return passes * (num_bytes / link.bytes_per_second + link.latency_seconds)


@dataclass
class Row:
    """The launches of one part: numbers, and seconds that they add."""

    kernels: float = 0.0
    collectives: float = 0.0
    waits: float = 0.0
    num_bytes: float = 0.0  # of what is no GEMM or attention
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Row) -> Row:
        return Row(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Work:
    """The work of a layer, or of the ends of a stage. rows: by part, for one microbatch.

    seconds: of each op by what takes them, as in OpSeconds. once: seconds a step, beyond those of its microbatches.
    """

    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    seconds: dict[Op, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    once: float = 0.0

    @property
    def total(self) -> Row:
        return sum(self.rows.values(), Row())

    def add(self, launch: Launch, seconds: float, share: float = 1.0) -> None:
        """Add a launch to its row, or a share of it where it is one of several alike."""
        row = self.rows[f"{launch.group} messages" if launch.group else launch.part]
        row.seconds += seconds * share
        row.waits += share * (launch.kind == HOST_WAIT)
        row.collectives += share * (launch.kind == COLLECTIVE)
        row.kernels += share * (launch.kind in KERNELS)
        row.flops += launch.flops * share
        row.num_bytes += launch.num_bytes * share * (launch.kind in ("", COLLECTIVE))


class Kind(NamedTuple):
    """The properties by which layers are alike."""

    options: tuple[Hashable, ...]
    is_fp8: bool
    recompute: RecomputeConfig
    predicts: bool


class Ends(NamedTuple):
    """The ends of the model that a stage holds."""

    has_embedding: bool
    has_head: bool


Owner = Kind | Ends


def kinds_of(plan: RunPlan, stage: StageLayers) -> list[tuple[int, Kind, LayerSpec]]:
    """Return the layers of a stage by their global number; those of multi-token prediction come after all others."""
    found = []
    numbers = chain(range(stage.first_layer, stage.last_layer_exclusive), count(plan.config.model.num_layers))
    for number, (spec, recompute) in zip(numbers, layers_with_recompute(plan.model, plan.shape, stage), strict=False):
        predicts = number >= plan.config.model.num_layers
        found.append((number, Kind((spec.comm_type, *_values(spec.config)), spec.is_fp8, recompute, predicts), spec))
    return found


def _values(layer: Any) -> Iterator[Hashable]:
    """Yield the options of a layer, without those that say which layers of the model have it."""
    return (getattr(layer, field.name) for field in fields(layer) if field.name not in OF_MODEL)


def ranks_to_count(plan: RunPlan) -> tuple[int, ...]:
    """Return the pp_ranks that together hold both ends of the model and every kind of layer."""
    held: dict[int, set[Hashable]] = {}
    for pp_rank in range(plan.topology.pp):
        stages = [plan.partition.stages[stage] for stage in plan.placement.stages_of(pp_rank)]
        held[pp_rank] = {kind for stage in stages for _, kind, _ in kinds_of(plan, stage)}
        held[pp_rank] |= {(stage.has_embedding, stage.has_head) for stage in stages}
    chosen: list[int] = []
    missing = set().union(*held.values())
    while missing:
        best = max(held, key=lambda pp_rank: len(held[pp_rank] & missing))
        chosen.append(best)
        missing -= held[best]
    return tuple(chosen)


@dataclass(frozen=True)
class Roofline:
    """The counted work and the step that follows from it.

    plan: the whole one. works: of layers of each kind, and of stages outside of their layers. update: of the optimizer
    and of all else that a step has once, as counted on the rank where it takes longest.
    """

    plan: RunPlan
    works: Mapping[Owner, Work]
    update: Work
    update_seconds: float
    step: StepTime

    @property
    def seconds(self) -> float:
        return self.step.seconds - self.step.parts["optimizer"] + self.update_seconds

    @cached_property
    def layers(self) -> dict[Kind, tuple[list[int], LayerSpec]]:
        """The global numbers of the layers of each kind, and one of them."""
        found: dict[Kind, tuple[list[int], LayerSpec]] = {}
        for stage in self.plan.partition.stages:
            for number, kind, spec in kinds_of(self.plan, stage):
                found.setdefault(kind, ([], spec))[0].append(number)
        return found


def roofline(plan: RunPlan, small: RunPlan, hardware: Hardware, counted: Counted) -> Roofline:
    """Return the step of a plan. small: the plan whose ranks were counted. hardware: of the table."""
    hardware = achievable(hardware)
    works, updates = _works(small, hardware, counted)
    held = [[works[kind] for _, kind, _ in kinds_of(plan, stage)] for stage in plan.partition.stages]
    casts = [sum(work.once for work in of_stage) for of_stage in held]
    ends = [works.get(Ends(stage.has_embedding, stage.has_head), Work()) for stage in plan.partition.stages]
    stages = tuple(_op_seconds([*layers, of_ends]) for layers, of_ends in zip(held, ends, strict=True))
    longest = max(updates, key=lambda rank: updates[rank].total.seconds)
    # an update is as long as its bytes, which the planner knows for both
    counted_bytes = _update_bytes(small, small.topology.coordinates(longest).pp_rank)
    rate = updates[longest].total.seconds / max(1, counted_bytes)
    seconds = max(
        rate * _update_bytes(plan, pp_rank) + sum(casts[stage] for stage in plan.placement.stages_of(pp_rank))
        for pp_rank in range(plan.topology.pp)
    )
    return Roofline(plan, works, updates[longest], seconds, predict_step(plan, hardware, stages))


def _update_bytes(plan: RunPlan, pp_rank: int) -> int:
    return optimizer_bytes(plan, pp_rank, plan.config.kernels.optimizer_impl == "compiled")


def _works(small: RunPlan, hardware: Hardware, counted: Counted) -> tuple[dict[Owner, Work], dict[int, Work]]:
    """Return the mean work of layers of each kind and of the ends of stages, and what each rank does once a step."""
    seconds_of = launch_seconds(small, hardware)
    layers = {number: kind for stage in small.partition.stages for number, kind, _ in kinds_of(small, stage)}
    works: dict[Owner, Work] = defaultdict(Work)
    once: dict[int, Work] = defaultdict(Work)
    owned: list[tuple[int, Owner, Launch, float]] = []
    seen: dict[tuple[int, int], set[int]] = defaultdict(set)  # microbatches, by rank and stage
    for rank, (launch, seconds) in ((rank, timed) for rank, log in counted.items() for timed in log):
        owner = _owner(small, layers, launch)
        if launch.kind == MESSAGE:  # the simulated schedule has them
            continue
        if owner is None:
            once[rank].add(launch, 0.0 if launch.group else seconds)
        else:
            owned.append((rank, owner, launch, seconds))
            seen[rank, launch.stage].add(launch.microbatch)
    ends = {key: (min(numbers), max(numbers)) for key, numbers in seen.items()}
    # what is counted several times: an owner on ranks and in layers, and there each op after the first microbatch
    places: dict[Owner, set[Any]] = defaultdict(set)
    runs: dict[tuple[Owner, str], set[Any]] = defaultdict(set)
    for rank, owner, launch, _ in owned:
        place, (first, last) = (rank, launch.stage, launch.layer), ends[rank, launch.stage]
        places[owner].add(place)
        if launch.microbatch > first or first == last:
            runs[owner, launch.op].add((place, launch.microbatch))
    for rank, owner, launch, seconds in owned:
        if launch.group == "ep" and small.parts is not None:
            seconds = seconds_of(launch)  # what overlap hides is the planner's
        work, share, (first, last) = works[owner], 1 / len(places[owner]), ends[rank, launch.stage]
        if launch.microbatch == last:
            work.add(launch, seconds, share)
        if launch.microbatch > first or first == last:
            part = launch.group or ("layers" if isinstance(owner, Kind) else "ends")
            work.seconds[Op(launch.op)][part] += seconds / len(runs[owner, launch.op])
        if first != last and launch.microbatch in (first, last):
            work.once += seconds * share * (1 if launch.microbatch == first else -1)
    return dict(works), once


def _owner(small: RunPlan, layers: Mapping[int, Kind], launch: Launch) -> Owner | None:
    """Return what a launch is work of; None: of the step. layers: the kind of each, by its number."""
    if launch.op not in COMPUTE or (launch.group and launch.group.partition("_")[0] not in LAYER_GROUPS):
        return None
    stage = small.partition.stages[launch.stage]
    return Ends(stage.has_embedding, stage.has_head) if launch.layer is None else layers[launch.layer]


def _op_seconds(works: Iterable[Work]) -> OpSeconds:
    """Return the seconds of a stage with these layers and ends."""
    sums: dict[Op, dict[str, float]] = {op: defaultdict(float) for op in (Op.F, Op.B, Op.I, Op.W)}
    for work in works:
        for op, parts in work.seconds.items():
            for part, seconds in parts.items():
                sums[op][part] += seconds
    split = sum(sums[Op.I].values()) + sum(sums[Op.W].values())
    if not split:
        return OpSeconds(sums[Op.F], sums[Op.B], {})
    whole = sum(sums[Op.B].values())
    return OpSeconds(sums[Op.F], sums[Op.I], sums[Op.W], split - whole if whole else 0.0)


def report(found: Roofline, cut: Sequence[str], hardware: Hardware) -> str:
    """Return what is printed. cut: what was left out of the counted step. hardware: of the table."""
    fast, plan = achievable(hardware), found.plan
    peak = hardware.peak(plan.config.precision.dtype)
    tera = [share * peak / TERA for share in (GEMM_SHARE, *ATTENTION_SHARES)]
    is_compiled = plan.config.kernels.compile_blocks == "on"
    how = "are compiled" if is_compiled else "run as written (--compile-blocks on counts them compiled)"
    lines = [
        f"roofline of {hardware.name}: counted on a fake device, derived, not measured. TFLOP/s: GEMMs {tera[0]:.0f}, "
        f"attention {tera[1]:.0f} forward and {tera[2]:.0f} backward; memory "
        f"{fast.memory_bytes_per_second / TERA:.2f} TB/s, {1e6 * KERNEL_SECONDS:.0f} us between kernels",
        *(f"  counted with {line}" for line in cut),
        f"  a compiled region counts as one kernel, and another for each maximum that it scales by; blocks {how}",
    ]
    for kind, (numbers, spec) in found.layers.items():
        work = found.works[kind]
        seconds = work.total.seconds
        flops = layer_flops(spec, plan.shape.whole_seq, causal=True) * 3.0 * plan.shape.tokens / plan.shape.tp
        lines.append(
            f"{described(kind, spec)}, {numbers_text(numbers)}: one microbatch, forward and backward "
            f"{1e3 * seconds:.2f} ms, MFU {flops / seconds / peak:.1%}"
        )
        lines += _table(work.rows, seconds)
    for owner, work in found.works.items():
        if isinstance(owner, Ends) and any(owner):
            names = ["embedding"] * owner.has_embedding + ["final norm, output layer, loss"] * owner.has_head
            lines.append(f"{', '.join(names)}: one microbatch, forward and backward {1e3 * work.total.seconds:.2f} ms")
            lines += _table(work.rows, work.total.seconds)
    lines.append(f"once a step, as counted (of the whole model: {1e3 * found.update_seconds:.2f} ms)")
    lines += _table(found.update.rows, found.update.total.seconds)
    return "\n".join([*lines, *_step_lines(found)])


def described(kind: Kind, spec: LayerSpec) -> str:
    """Return words for a layer."""
    words = ["layer of multi-token prediction" if kind.predicts else "layer"]
    config = spec.config
    if config.mixer is not None:
        words.append(f"with {config.mixer}")
    elif not config.has_attention:
        words.append("without attention")
    elif config.window_size is not None:
        words.append(f"with a window of {config.window_size}")
    if spec.num_experts:
        words.append("with experts")
    elif not config.has_mlp:
        words.append("without an MLP")
    if kind.recompute.recompute_granularity is not None:
        words.append(f"with {kind.recompute.recompute_granularity} recompute")
    return " ".join(words)


def numbers_text(numbers: Sequence[int]) -> str:
    """Return how many layers these are, and the first and last number."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    between = "to" if numbers[-1] - numbers[0] == len(numbers) - 1 else "..."
    return f"{len(numbers)} layers ({numbers[0]} {between} {numbers[-1]})"


def _table(rows: Mapping[str, Row], seconds: float) -> Iterator[str]:
    table: list[tuple[str, ...]] = [("part", "kernels", "collectives", "host waits", "TFLOP", "GB", "ms", "share")]
    for part, row in (*rows.items(), ("sum", sum(rows.values(), Row()))):
        counts = (f"{count:.4g}" if count else "" for count in (row.kernels, row.collectives, row.waits))
        flops = f"{row.flops / TERA:.3f}" if row.flops else ""
        moved = f"{row.num_bytes / GIGA:.2f}" if row.num_bytes else ""
        times = (f"{1e3 * row.seconds:.2f}", f"{row.seconds / seconds:.1%}") if row.seconds else ("", "")
        table.append((part, *counts, flops, moved, *times))
    return text_table(table, left=(0,), indent=2)


def _step_lines(found: Roofline) -> Iterator[str]:
    """Yield the parts of a step and its sum."""
    step, seconds = found.step, found.seconds
    names = {
        "layers": "layers",
        "ends": "embedding, output layer and loss",
        "bubble": "bubble and waits for messages",
        "reduce": "reductions of gradients, exposed",
        "gather": "gathers of parameters, exposed",
        "optimizer": "update",
    }
    yield (
        f"a step of {found.plan.batch.num_microbatches} microbatches on the rank that computes longest: "
        f"{1e3 * seconds:,.2f} ms, MFU {step.mfu * step.seconds / seconds:.1%}, "
        f"{step.tokens / seconds:,.0f} tokens/s"
    )
    table = [("part", "ms", "share")]
    for part, own in {**step.parts, "optimizer": found.update_seconds}.items():
        if abs(own) >= LEAST_SHOWN:
            name = names.get(part, f"{part} messages, exposed")
            table.append((name, f"{1e3 * own:,.2f}", f"{own / seconds:.1%}"))
    yield from text_table(table, left=(0,), indent=2)

"""The search for a layout: every legal (tp, pp, chunks, schedule, dp, microbatch, recompute) of a configuration on a number of
accelerators, the fastest first, with what each takes in time and memory and why near misses fell out.

A candidate is a configuration that training resolves, too; nothing is predicted that `resolve` refuses. Candidates are tried in order of a
lower bound of their time, and the search ends when no bound left is below the times of the best: what it returns is the best by the model
of `step_time`, not by a heuristic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.planner.activations import LocalSizes, is_explicit, stage_bytes
from megapipe.planner.hardware import Hardware
from megapipe.planner.layer_time import OpSeconds, Tensors, head_seconds, layer_seconds
from megapipe.planner.memory import RankMemory, all_rank_memory, rank_memory
from megapipe.planner.resolve import resolve, resolve_model, vary
from megapipe.planner.run_plan import RunPlan
from megapipe.planner.shelf import Shelf
from megapipe.planner.step_time import StepTime, predict_step
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.model_specs import model_specs

# schedules a search tries: (name, chunks a rank); chunks of 0: every number that divides the layers among all stages
SCHEDULES_TRIED = (("1f1b", 1), ("interleaved", 0), ("zb-h1", 1), ("zb-v", 2))
MOST_CHUNKS = 8
MICRO_BATCH_SIZES = (1, 2, 4)
RECOMPUTES = (
    RecomputeConfig(),
    RecomputeConfig("selective", recompute_modules=("core_attn",)),
    RecomputeConfig("selective", recompute_modules=("layernorm", "activation")),
    RecomputeConfig("selective", recompute_modules=("core_attn", "layernorm", "activation")),
    RecomputeConfig("full", "uniform", 1),
)
MOST_MISSES = 3
NEAR_MISS = 1.25  # of the memory there is: above it a layout is not worth a word
BYTES_OF_WEIGHT_AND_GRADIENT = 6  # bf16 weight, fp32 gradient; the least of any precision with a table entry


@dataclass(frozen=True)
class Layout:
    """What a search varies."""

    tp: int
    pp: int
    chunks: int
    schedule: str
    micro_batch_size: int
    recompute: RecomputeConfig

    def applied_to(self, config: Config) -> Config:
        """The configuration with this layout; what it says of cuts and groups by hand is left to be derived."""
        parallel = dataclasses.replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            num_virtual_stages_per_pipeline_rank=self.chunks if self.schedule == "interleaved" else None,
            num_layers_per_virtual_pipeline_stage=None,
            pipeline_model_parallel_layout=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            microbatch_group_size_per_virtual_pipeline_stage=None,
            pipeline_schedule=self.schedule,
            pipeline_memory_limit=None,
            sequence_parallel=self.tp > 1,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        training = dataclasses.replace(config.training, micro_batch_size=self.micro_batch_size)
        return dataclasses.replace(config, parallel=parallel, training=training, recompute=self.recompute)

    def __str__(self) -> str:
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        return f"tp {self.tp} x pp {self.pp}{chunks}, {self.schedule}, microbatch {self.micro_batch_size}, {recompute_text(self.recompute)}"


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction. plan: as training would make it."""

    layout: Layout
    plan: RunPlan = field(repr=False)
    time: StepTime = field(repr=False)
    memory: tuple[RankMemory, ...] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.total for rank in self.memory)


@dataclass(frozen=True)
class Found:
    """best: the fastest that fit, fastest first. misses: faster than the best that fits, but too large, fastest first.

    num_tried: layouts whose bound was worked out; num_predicted: those that were simulated.
    """

    best: tuple[Candidate, ...]
    misses: tuple[Candidate, ...]
    num_tried: int
    num_predicted: int


def search(
    config: Config, world_size: int, hardware: Hardware, pinned: Callable[[Layout], bool] = lambda _: True, num_best: int = 10
) -> Found:
    """The `num_best` fastest layouts of `config` on `world_size` accelerators.

    config: with the vocabulary's and the global batch size. pinned: layouts to look at; by default all. Raises ConfigError without a global
    batch size, and if not one layout is legal.
    """
    if config.training.global_batch_size is None:
        raise ConfigError("--global-batch-size is missing: how many sequences a step takes decides how much parallelism can be fed")
    bounds, shorts = _Bounds(config, world_size, hardware), _Shorts(config, world_size, hardware)
    wanted = [(bounds.of(layout), layout) for layout in layouts(config, world_size, hardware) if pinned(layout)]
    bounded = sorted(((bound, layout) for bound, layout in wanted if bound is not None), key=lambda pair: pair[0].seconds)
    best: list[tuple[float, Layout]] = []
    misses: list[tuple[float, Layout]] = []
    num_predicted, refused = 0, ""
    for bound, layout in bounded:
        if len(best) == num_best and bound.seconds >= best[-1][0]:
            break
        if bound.least_bytes > NEAR_MISS * hardware.usable_bytes:
            continue
        try:
            seconds, need = shorts.of(layout, best[-1][0] if len(best) == num_best else math.inf)
        except ConfigError as error:
            refused = f"{layout}: {error}"
            continue
        num_predicted += 1
        if need <= hardware.usable_bytes:
            best = sorted([*best, (seconds, layout)], key=lambda pair: pair[0])[:num_best]
        elif need <= NEAR_MISS * hardware.usable_bytes:
            misses.append((seconds, layout))
    if not best and not misses:
        least = min((bound.least_bytes for bound, _ in bounded), default=None)
        raise ConfigError(_nothing_found(config, world_size, hardware, refused, least))
    faster = sorted((miss for miss in misses if not best or miss[0] < best[0][0]), key=lambda pair: pair[0])[:MOST_MISSES]
    found = sorted((predict(config, layout, world_size, hardware) for _, layout in best), key=lambda each: each.time.seconds)
    return Found(tuple(found), tuple(predict(config, layout, world_size, hardware) for _, layout in faster), len(bounded), num_predicted)


def predict(config: Config, layout: Layout, world_size: int, hardware: Hardware) -> Candidate:
    """One layout in full. Raises ConfigError if training would refuse it."""
    plan = resolve(layout.applied_to(config), world_size, hardware.ranks_per_node)
    return predict_plan(layout, plan, hardware)


def predict_plan(layout: Layout, plan: RunPlan, hardware: Hardware) -> Candidate:
    """A plan in full; layout: what it came from."""
    return Candidate(layout, plan, predict_step(plan, hardware), all_rank_memory(plan))


class _Shorts:
    """Steps of some three pipeline fills in place of whole ones: beyond that only the steady middle grows, by the work of the busiest
    rank, and no rank keeps more. Plans that differ in microbatch and recompute alone share what does not depend on these."""

    def __init__(self, config: Config, world_size: int, hardware: Hardware) -> None:
        self._config, self._world_size, self._hardware = config, world_size, hardware
        self._plans: dict[Hashable, RunPlan] = {}
        self.shelf = Shelf()

    def of(self, layout: Layout, slowest: float) -> tuple[float, int]:
        """(seconds of a step, bytes of the rank that needs most); only a lower bound of the bytes if it takes `slowest` seconds or more or
        does not nearly fit, of the seconds in the second case nothing: inf. Raises ConfigError."""
        batch, dp, usable = self._config.training.global_batch_size, self._world_size // layout.tp // layout.pp, self._hardware.usable_bytes
        assert batch is not None
        count = batch // dp // layout.micro_batch_size
        few = count if count <= 4 * layout.pp else 3 * layout.pp + count % layout.pp
        plan = self._plan(layout, few * dp * layout.micro_batch_size)
        need = rank_memory(plan, 0).total
        if need > NEAR_MISS * usable:
            return math.inf, need
        time = predict_step(plan, self._hardware)
        seconds = time.seconds + (count - few) * max(time.timeline.work_seconds) / few
        if seconds < slowest:
            need = max(rank.total for rank in all_rank_memory(plan))
        return seconds, need

    def _plan(self, layout: Layout, batch: int) -> RunPlan:
        training = dataclasses.replace(self._config.training, global_batch_size=batch, rampup_batch_size=None)
        config = layout.applied_to(dataclasses.replace(self._config, training=training))
        key = layout.tp, layout.pp, layout.chunks, layout.schedule
        if key in self._plans:
            return vary(self._plans[key], config)
        self._plans[key] = resolve(config, self._world_size, self._hardware.ranks_per_node, self.shelf)
        return self._plans[key]


def layouts(config: Config, world_size: int, hardware: Hardware) -> Iterator[Layout]:
    """All that the sizes allow; some are refused later."""
    model, batch = config.model, config.training.global_batch_size
    assert batch is not None
    for tp in divisors(min(hardware.ranks_per_node, world_size)):
        if world_size % tp or model.num_attention_heads % tp:
            continue
        for pp in divisors(world_size // tp):
            dp = world_size // tp // pp
            if pp > model.num_layers or batch % dp:
                continue
            for size in MICRO_BATCH_SIZES:
                if batch // dp % size:
                    continue
                for schedule, chunks in _schedules(model.num_layers, pp):
                    for recompute in RECOMPUTES:
                        of_attention = recompute.recompute_granularity == "selective" and "core_attn" in recompute.recompute_modules
                        if of_attention and not is_explicit(model):
                            continue  # fused kernels keep next to nothing of core attention
                        yield Layout(tp, pp, chunks, schedule, size, recompute)


def _schedules(num_layers: int, pp: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for name, chunks in SCHEDULES_TRIED:
        if chunks:
            if pp * chunks <= num_layers:
                yield name, chunks
            continue
        for count in range(2, MOST_CHUNKS + 1):
            if pp * count <= num_layers and any((num_layers + ends) % (pp * count) == 0 for ends in (0, 2)):
                yield name, count


@dataclass(frozen=True)
class Bound:
    """What no plan of a layout can go below."""

    seconds: float
    least_bytes: float


class _Bounds:
    """Bounds of a configuration's layouts; what many of them share is worked out once."""

    def __init__(self, config: Config, world_size: int, hardware: Hardware) -> None:
        self._config, self._world_size, self._hardware = config, world_size, hardware
        self._models: dict[int, ModelConfig | None] = {}
        self._elements: dict[int, int] = {}
        self._layers: dict[tuple[int, int, RecomputeConfig], tuple[OpSeconds, OpSeconds, int]] = {}

    def of(self, layout: Layout) -> Bound | None:
        """None where the model itself refuses this tp. Whatever the cut of the layers:

        Time: rank r waits for one forward of all ranks before it and is waited for by one backward of them, so that the longest rank takes
        at least W q / (1 - (1 - q/m)^p), W being all ranks' work on a microbatch and q the part of it that fills and drains the pipeline.
        Memory: rank r keeps min(p - r, m) microbatches of its layers, so that the largest is at least L / sum over r of 1 / (bytes of one
        layer on rank r).
        """
        model = self._model(layout.tp)
        if model is None:
            return None
        batch, pp, dp = self._config.training.global_batch_size, layout.pp, self._world_size // layout.tp // layout.pp
        assert batch is not None
        count = batch // dp // layout.micro_batch_size
        layer, head, layer_bytes = self._parts(model, layout)
        whole = model.num_layers * (layer.of(Op.F) + layer.of(Op.B)) + head.of(Op.F) + head.of(Op.B)
        filling = model.num_layers * (layer.of(Op.F) + layer.of(Op.I if layout.schedule == "zb-h1" else Op.B)) / whole
        filling = 0.0 if layout.schedule == "zb-v" else filling / layout.chunks
        seconds = count * whole / pp if not filling else whole * filling / (1.0 - (1.0 - filling / count) ** pp)
        state = self._elements[layout.tp] / layout.tp / model.num_layers * (BYTES_OF_WEIGHT_AND_GRADIENT + 12 / dp)
        least = model.num_layers / sum(1.0 / (state + min(pp - rank, count) * layer_bytes) for rank in range(pp))
        return Bound(seconds, least)

    def _model(self, tp: int) -> ModelConfig | None:
        if tp not in self._models:
            try:
                model = resolve_model(dataclasses.replace(self._config.model, padded_vocab_size=None), tp)
            except ConfigError:
                self._models[tp] = None
                return None
            self._models[tp] = model
            self._elements[tp] = sum(math.prod(spec.shape) for spec in model_specs(model, tp > 1))
        return self._models[tp]

    def _parts(self, model: ModelConfig, layout: Layout) -> tuple[OpSeconds, OpSeconds, int]:
        """Of one microbatch: a layer, the head, bytes that a layer keeps."""
        key = layout.tp, layout.micro_batch_size, layout.recompute
        if key not in self._layers:
            dtype, hardware, sliced = self._config.precision.dtype, self._hardware, layout.tp > 1
            sizes = LocalSizes.of(model, layout.tp, sliced, layout.micro_batch_size, dtype)
            tensors = Tensors(model, sizes, layout.tp, sliced, dtype)
            kept = stage_bytes(model, sizes, StageLayers(0, 1, False, False), layout.recompute)
            self._layers[key] = (
                layer_seconds(tensors, layout.recompute, hardware, hardware.node),
                head_seconds(tensors, hardware, hardware.node),
                sum(kept.values()),
            )
        return self._layers[key]


def _nothing_found(config: Config, world_size: int, hardware: Hardware, refused: str, least: float | None) -> str:
    if refused:
        return f"no layout on {world_size} {hardware.name} is legal; the last one tried: {refused}"
    if least is None:
        return (
            f"no layout on {world_size} {hardware.name}: --global-batch-size {config.training.global_batch_size} must be a multiple of the "
            "data parallel size, whatever tensor and pipeline parallel size are chosen, and flags must leave a choice; change one of them"
        )
    return (
        f"the model does not fit on {world_size} {hardware.name}: any layout needs {least / 2**30:.1f} GiB or more of the "
        f"{hardware.usable_bytes / 2**30:.1f} GiB of each that can be used; take more of them, or others"
    )


def recompute_text(recompute: RecomputeConfig) -> str:
    if recompute.recompute_granularity is None:
        return "no recompute"
    if recompute.recompute_granularity == "full":
        return "full recompute"
    return "recompute " + "+".join(recompute.recompute_modules)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

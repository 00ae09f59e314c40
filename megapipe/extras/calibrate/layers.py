"""Measured seconds of embedding, layers and head of a configuration at the shapes of the run: forward, backward and its
two halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.comm.collectives import barrier, broadcast_object, gather_objects
from megapipe.comm.groups import ProcessGroups
from megapipe.config.config import Config
from megapipe.config.layer_pattern import PARTS
from megapipe.config.layers import LAYER_OPTIONS, MARKS, LayerConfig
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig, strategy_of
from megapipe.gpu.device_clock import DeviceClock, device_clock
from megapipe.model.microbatch import Microbatch
from megapipe.plan.layer_costs import PartCost
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.families import default_schedule
from megapipe.schedule.partition import from_counts
from megapipe.schedule.placement import loop
from megapipe.tensor_parallel.random import DropoutKey

NUM_LAYERS = 2  # timed together: a single layer's weights would stay in the caches
EMBEDDING, LAYERS, HEAD = range(3)  # stages of the measured plan
MIN_REPEATS, MAX_REPEATS = 3, 200  # after a warm-up


def one_pipeline_rank(config: Config, world_size: int, layer: LayerConfig | None = None) -> Config:
    """Return the configuration without a pipeline and sharded weights on `world_size` ranks.

    layer: only few layers, all of this kind, whose parts are measured.
    """
    defaults: dict[str, Any] = {
        option.name: option.default
        for option in dataclasses.fields(ParallelConfig)
        if "pipeline" in option.name or option.name.startswith("data_parallel_sharding")
    }
    defaults["use_distributed_optimizer"] = strategy_of(config.parallel) != "no_shard"
    sequences = config.training.micro_batch_size * max(1, world_size // config.parallel.tensor_model_parallel_size)
    return replace(
        config,
        model=config.model if layer is None else _alike(config.model, layer),
        parallel=replace(config.parallel, **defaults),
        training=replace(config.training, global_batch_size=sequences, rampup_batch_size=None),
        optimizer=replace(config.optimizer, optimizer_post_validation=False),
        offload=OffloadConfig(),  # its copies overlap with other layers
    )


def _alike(model: ModelConfig, layer: LayerConfig) -> ModelConfig:
    """Return the model with NUM_LAYERS layers of one kind."""
    values: dict[str, Any] = {name: getattr(layer, name) for name in LAYER_OPTIONS}
    missing = [f"{part}=none" for part in PARTS if not getattr(layer, f"has_{part}")]
    pattern = (f"{NUM_LAYERS} {' '.join(missing)}",) if missing else ()
    frequencies: dict[str, Any] = dict.fromkeys(MARKS)
    return replace(model, **values | frequencies, num_layers=NUM_LAYERS, layer_pattern=pattern)


def profile_parts(
    plan: RunPlan, groups: ProcessGroups, device: torch.device, seconds: float
) -> tuple[PartCost, PartCost, PartCost]:
    """Return the costs of embedding, one layer and head on the slowest rank of the world. Called by all ranks.

    plan: of `one_pipeline_rank`. seconds: for each of about ten figures. With full recompute a layer is timed without
    and with it; the difference is the time of the recomputation.
    """
    full = plan.config.recompute.recompute_granularity == "full"
    has_budget = plan.config.recompute.recompute_memory_budget is not None  # recompute follows from FLOPs then
    plain = RecomputeConfig() if full or has_budget else plan.config.recompute
    parts = _Parts(plan, plain, groups, device, seconds)
    embedding, layers, head = parts.cost(EMBEDDING), parts.cost(LAYERS), parts.cost(HEAD)
    if full:
        recomputed = _Parts(plan, plan.config.recompute, groups, device, seconds).cost(LAYERS)
        layers = replace(layers, replay=max(0.0, recomputed.backward - layers.backward))
    layer = PartCost(*(value * (1.0 / NUM_LAYERS) for value in dataclasses.astuple(layers)))
    return embedding, layer, head


class _Parts:
    """Embedding, layers and head as three stages of one rank, with their parameters and inputs."""

    def __init__(
        self, plan: RunPlan, recompute: RecomputeConfig, groups: ProcessGroups, device: torch.device, seconds: float
    ) -> None:
        config, cut = replace(plan.config, recompute=recompute), from_counts([0, NUM_LAYERS, 0], NUM_LAYERS)
        plan = replace(plan, config=config, placement=loop(1, 3), partition=cut, schedule_name=default_schedule(3))
        self._runtime = InferenceRuntime(plan, groups, device, trains=True)
        self._world, self._clock, self._seconds = groups.world, device_clock(device), seconds
        model, training = plan.config.model, plan.config.training
        shape = training.micro_batch_size, model.seq_length
        generator = torch.Generator().manual_seed(training.seed)
        tokens, labels = (torch.randint(model.vocab_size, shape, generator=generator).to(device) for _ in range(2))
        self._microbatch = Microbatch(tokens, labels, dropout_key=DropoutKey(training.seed, 0, 0))
        (message,) = self._runtime.message(0)
        self._hidden = torch.randn(message.shape, generator=generator).to(device, message.dtype)

    def cost(self, stage: int) -> PartCost:
        """Return the median times of a stage on the slowest rank."""
        whole = self._medians((lambda: self._forward(stage), lambda: self._backward(stage, "backward")))
        halves = self._medians(
            (
                lambda: self._forward(stage),
                lambda: self._backward(stage, "backward_input"),
                lambda: self._runtime.runners[stage].backward_weight(0),
            )
        )
        return PartCost(forward=whole[0], backward=whole[1], inputs=halves[1], weights=halves[2])

    def _forward(self, stage: int) -> None:
        inputs = () if stage == EMBEDDING else (self._hidden,)
        self._runtime.runners[stage].forward(0, inputs, self._microbatch, _objective if stage == HEAD else None)

    def _backward(self, stage: int, how: str) -> None:
        gradients: tuple[Tensor | None, ...] = (None,) if stage == HEAD else (self._hidden,)
        getattr(self._runtime.runners[stage], how)(0, gradients)

    def _medians(self, steps: tuple[Callable[[], None], ...]) -> list[float]:
        """Return the median time of each step, with all steps run in turn.

        All ranks repeat equally often, since the steps contain collectives of tensor parallelism.
        """
        timed(self._clock, steps, 1)
        once = sum(timed(self._clock, steps, 1)[0])
        times = max(MIN_REPEATS, min(MAX_REPEATS, int(self._seconds / max(once, 1e-9))))
        times = broadcast_object(times, self._world)
        barrier(self._world)
        own = [median(column) for column in zip(*timed(self._clock, steps, times), strict=True)]
        return [max(column) for column in zip(*gather_objects(own, self._world), strict=True)]


def timed(clock: DeviceClock, steps: tuple[Callable[[], None], ...], times: int) -> list[list[float]]:
    """Run the steps in turn, `times` times, and return the seconds of each: [times][steps].

    A GPU is synchronized only after all launches, so that its queue stays full, as in training.
    """
    moments = [clock.mark()]
    for _ in range(times):
        for step in steps:
            step()
            moments.append(clock.mark())
    seconds = [clock.seconds(begin, end) for begin, end in pairwise(moments)]
    return [seconds[first : first + len(steps)] for first in range(0, len(seconds), len(steps))]


def _objective(output: Any, _: Any) -> tuple[Tensor, Tensor]:
    return output.loss_sum, output.loss_sum.detach()

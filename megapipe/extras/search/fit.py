"""`Fit`: the memory of a plan's fullest rank beside that of its accelerator, and changes that were planned and fit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.extras.search.experiments import layout_flags
from megapipe.formatting import bytes_text
from megapipe.plan.hardware import GIB, Hardware
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step

TIMES = (2, 4, 8)  # by which sizes and ranks are tried larger
MOST_SHOWN = 3
# as Megatron's --grad-reduce-in-bf16 does
BF16_GRADIENTS: dict[str, Any] = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
RECOMPUTES: tuple[dict[str, Any], ...] = (  # those that recompute least first
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "activation")},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
Change = tuple[Config, int]  # and the number of ranks


class Fit(NamedTuple):
    """The memory that the fullest rank of a plan needs, and changes with which a plan that does not fit does."""

    hardware: Hardware
    pp_rank: int
    needed_bytes: int
    world_size: int
    remedies: tuple[tuple[str, Fit, float], ...] = ()  # flags, and the memory and seconds of a step with them

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.hardware.usable_bytes

    def data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        remedies = [
            {"flags": flags, "world_size": fit.world_size, "needed_bytes": fit.needed_bytes, "step_seconds": seconds}
            for flags, fit, seconds in self.remedies
        ]
        sizes = {"needed_bytes": self.needed_bytes, "usable_bytes": self.hardware.usable_bytes}
        return {"fits": self.fits, "fullest_pp_rank": self.pp_rank, **sizes, "would_fit": remedies}

    def lines(self) -> Iterator[str]:
        """Yield it as text: whether it fits and by how much, then what fits."""
        hardware, usable = self.hardware, self.hardware.usable_bytes
        left = bytes_text(abs(usable - self.needed_bytes))
        yield (
            f"{'fits' if self.fits else 'DOES NOT FIT'}: pp_rank {self.pp_rank} needs {bytes_text(self.needed_bytes)} "
            f"with NCCL; {bytes_text(usable)} of {hardware.name}'s {hardware.memory_bytes / GIB:.4g} GiB "
            f"can be used: {left} {'are left' if self.fits else 'too little'}"
        )
        for flags, fit, seconds in self.remedies:
            need = f"{bytes_text(fit.needed_bytes)}, {seconds:.3g} s a step on {fit.world_size} ranks"
            yield f"fits with {flags or 'more ranks'}: {need} (planned)"
        if not self.fits and not self.remedies:
            yield "nothing that was planned fits: recompute, sharding, tp, pp, ranks; try megapipe plan --gpus N"


def fit_of(plan: RunPlan, hardware: Hardware) -> Fit:
    """Return whether a plan fits, without remedies."""
    fullest = max(all_rank_memory(plan, hardware.nccl_bytes), key=lambda rank: rank.device_bytes)
    return Fit(hardware, fullest.pp_rank, fullest.device_bytes, plan.topology.world_size)


def with_remedies(config: Config, plan: RunPlan, hardware: Hardware) -> Fit:
    """Return whether a plan fits and, if not, the fastest changes on the fewest ranks that were planned and fit.

    config: that of the plan, before it was resolved. Tried are single changes, these with full recompute, more ranks.
    """
    fit = fit_of(plan, hardware)
    rows, ranks = list(_changes(config, plan)), plan.topology.world_size
    with_full = [[(_with(each, "recompute", RECOMPUTES[-1]), ranks) for each, _ in row] for row in rows]
    pipelines = [
        (_with(config, "parallel", {"pipeline_model_parallel_size": plan.topology.pp * times}), ranks * times)
        for times in TIMES
    ]
    more = [[(config, ranks * times) for times in TIMES], pipelines]
    found: list[tuple[str, Fit, float]] = []
    for tried in () if fit.fits else (rows, with_full, more):
        for row in () if found else tried:
            found += islice(chain.from_iterable(_planned(each, config, plan, hardware) for each in row), 1)
    best = sorted(found, key=lambda remedy: (remedy[1].world_size, remedy[2]))
    return fit._replace(remedies=tuple(best[:MOST_SHOWN]))


def _with(config: Config, section: str, values: dict[str, Any]) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def _changes(config: Config, plan: RunPlan) -> Iterator[list[Change]]:
    """Yield the changes that can save memory on as many ranks, in rows of which only the first that fits is wanted."""
    t, parallel = plan.topology, config.parallel
    if parallel.data_parallel_sharding_strategy is None:
        yield [(_with(config, "parallel", {"use_distributed_optimizer": True}), t.world_size)]
    if parallel.grad_reduce_in_bf16:
        yield [(_with(config, "optimizer", BF16_GRADIENTS), t.world_size)]
    yield [(_with(config, "training", {"micro_batch_size": 1}), t.world_size)]
    if config.recompute.recompute_memory_budget is None and config.recompute.recompute_granularity != "full":
        yield [(_with(config, "recompute", values), t.world_size) for values in RECOMPUTES]
    sizes = [{"tensor_model_parallel_size": t.tp * times, "sequence_parallel": True} for times in TIMES]
    yield [(_with(config, "parallel", values), t.world_size) for values in sizes]
    sizes = [{"pipeline_model_parallel_size": t.pp * times} for times in TIMES]
    yield [(_with(config, "parallel", values), t.world_size) for values in sizes]


def _planned(change: Change, config: Config, plan: RunPlan, hardware: Hardware) -> Iterator[tuple[str, Fit, float]]:
    """Yield the change as flags, with its memory and seconds, if it can be planned and fits."""
    (changed, size), t = change, plan.topology
    per_node = t.ranks_per_node if size <= t.world_size else hardware.on(size).ranks_per_node
    too_wide = changed.parallel.tensor_model_parallel_size > max(t.tp, hardware.ranks_per_node)
    if too_wide or (changed, size) == (config, t.world_size):
        return
    try:
        planned = replace(
            resolve(changed, size, per_node if per_node and size > per_node else None), expert_load=plan.expert_load
        )
    except ConfigError:  # such as layers or heads that do not divide
        return
    if (fit := fit_of(planned, hardware)).fits:
        words, micro = layout_flags(config, changed), changed.training.micro_batch_size
        words += [] if micro == config.training.micro_batch_size else ["--micro-batch-size", str(micro)]
        yield shlex.join(words), fit, predict_step(planned, hardware).seconds

"""`smallest`: a plan with fewer layers and microbatches, whose step has all kinds of actions of the whole one.

On the fake device a tensor takes no memory, so sizes, the grid and every switch stay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.extras.dry_run.microbatches import fewest_microbatches, schedule_of
from megapipe.extras.verify.fewer_layers import kinds_of_layers, with_layers
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action
from megapipe.schedule.schedule import Schedule

MIN_LAYERS = 2  # of a stage: one beside another
MAX_UNITS = 3  # of a stage: one is gathered while another computes and the last is freed


def smallest(config: Config, plan: RunPlan, has_all_pairs: bool = True) -> tuple[RunPlan, list[str]]:
    """Return the plan to run, and what was cut from the given one, as text. config: that of the plan, as given.

    has_all_pairs: of successive actions; else there are as few microbatches as the schedule takes, of two or more.
    """
    cut, topology = [], plan.topology
    fewer = _fewer_microbatches(plan, has_all_pairs)
    if fewer != (full := plan.batch.num_microbatches):
        which = ", which have all pairs of successive actions of every rank" if has_all_pairs else ""
        cut.append(f"{fewer} of {full} microbatches{which}")
    size = fewer * plan.batch.samples_per_microbatch
    training = config.training.with_batch(size)
    whole = dataclasses.replace(config, training=training)
    counts = _layer_counts(plan, has_all_pairs)
    if (total := sum(counts)) != (num_layers := plan.config.model.num_layers):
        try:
            found = resolve(with_layers(whole, plan, counts), topology.world_size, topology.ranks_per_node)
            cut.append(f"{total} of {num_layers} layers, which have all kinds of layers of every stage")
            return found, cut
        except ConfigError as error:
            cut.append(f"all {num_layers} layers, since fewer are refused: {error}")
    return resolve(whole, topology.world_size, topology.ranks_per_node), cut


def _fewer_microbatches(plan: RunPlan, has_all_pairs: bool) -> int:
    """Return the fewest microbatches, of two or more; those with all pairs of successive actions of the full rows."""
    full, pp = plan.batch.num_microbatches, plan.topology.pp
    if not has_all_pairs:
        return fewest_microbatches(plan, range(min(2, full), full), lambda schedule: True)

    def pairs(schedule: Schedule) -> list[set[tuple[object, ...]]]:
        return [{_kind(pair) for pair in itertools.pairwise(row)} for row in schedule.rows]

    wanted = pairs(schedule_of(plan, full))

    def has_all(schedule: Schedule) -> bool:
        return all(all_of <= some for all_of, some in zip(wanted, pairs(schedule), strict=True))

    return fewest_microbatches(plan, range(pp, full, pp), has_all)


def _kind(actions: Iterable[Action]) -> tuple[object, ...]:
    return tuple((action.stage, action.op) for action in actions)


def _layer_counts(plan: RunPlan, is_cut: bool) -> list[int]:
    """Return the layers to keep of every stage: of all kinds, and for every group of layers that runs by itself.

    is_cut: also where the layers of a stage together decide what each recomputes.
    """
    config, layers = plan.config, kinds_of_layers(plan)
    units = min(config.parallel.data_parallel_sharding_units, MAX_UNITS)
    recompute = config.recompute  # of a block also a layer behind it
    groups = max(MIN_LAYERS, units, (recompute.recompute_num_layers or 0) + (recompute.recompute_method == "block"))
    groups = max(groups, config.offload.cpu_offloading_num_layers)
    if recompute.recompute_memory_budget is not None and not is_cut:
        groups = len(layers)
    counts = []
    for stage in plan.whole_stages().partition.stages:
        held = layers[stage.first_layer : stage.last_layer_exclusive]
        counts.append(min(len(held), max(groups, len(set(held)))))
    return counts

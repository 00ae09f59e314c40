"""`smallest`: a plan with fewer layers and microbatches, whose step has all kinds of actions of the whole one.

On the fake device a tensor takes no memory, so sizes, the grid and every switch stay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from megapipe.config.config import Config, convert
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.verify.shrink import frozen_of_layers, kinds_of_layers, layer_pattern, unlike_layers
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.schedule_choice import BY_HAND
from megapipe.schedule.action import Action
from megapipe.schedule.partition import from_counts

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
            found = resolve(_with_layers(plan, whole, counts), topology.world_size, topology.ranks_per_node)
            cut.append(f"{total} of {num_layers} layers, which have all kinds of layers of every stage")
            return found, cut
        except ConfigError as error:
            cut.append(f"all {num_layers} layers, since fewer are refused: {error}")
    return resolve(whole, topology.world_size, topology.ranks_per_node), cut


def _fewer_microbatches(plan: RunPlan, has_all_pairs: bool) -> int:
    """Return the fewest microbatches, of two or more; those with all pairs of successive actions of the full rows."""
    full, pp = plan.batch.num_microbatches, plan.topology.pp

    def pairs(count: int) -> list[set[tuple[object, ...]]]:
        rows = (plan.schedule if plan.parts is None else plan.part_schedule)(count).rows
        return [{_kind(pair) for pair in itertools.pairwise(row)} for row in rows]

    wanted = pairs(full) if has_all_pairs else []
    for count in range(pp, full, pp) if has_all_pairs else range(min(2, full), full):
        try:
            found = pairs(count)
        except MegapipeError:  # the schedule cannot run this number
            continue
        if not has_all_pairs or all(all_of <= some for all_of, some in zip(wanted, found, strict=True)):
            return count
    return full


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


def _with_layers(plan: RunPlan, whole: Config, counts: list[int]) -> Config:
    """Return the configuration with so many layers of every stage."""
    config = plan.config
    partition = plan.whole_stages().partition
    numbers = unlike_layers(kinds_of_layers(plan), partition, counts)
    layers = [layer_configs(config.model)[number] for number in numbers]
    has_experts = [int(layer.num_experts is not None) for layer in layers]
    model = convert(
        ModelConfig,
        config.model,
        num_layers=len(layers),
        layer_pattern=layer_pattern(config.model, layers, lambda layer: {}),
        window_attn_skip_freq=None,
        no_rope_freq=None,
        moe_layer_freq=str(has_experts) if any(has_experts) and not all(has_experts) else None,
    )
    kinds = config.parallel.cp_comm_type
    if len(kinds) > 1:
        kinds = tuple(kind for kind, _ in zip(itertools.cycle(dict.fromkeys(kinds)), layers, strict=False))
    layout = from_counts(counts, len(layers)).layout()
    parallel = dataclasses.replace(
        whole.parallel,
        cp_comm_type=kinds,
        **BY_HAND | {"pipeline_model_parallel_layout": layout},
        pipeline_schedule=plan.schedule_name,
        num_virtual_stages_per_pipeline_rank=config.parallel.num_virtual_stages_per_pipeline_rank,
    )
    optimizer = dataclasses.replace(whole.optimizer, freeze=frozen_of_layers(plan, numbers))
    return dataclasses.replace(whole, model=model, parallel=parallel, optimizer=optimizer)

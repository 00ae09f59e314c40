"""The steps from a model to the stages that train, in order; each is independent of those after it.

    1  cut        a stage has its layers, the first one the embedding, the last one the head   schedule/partition.py
    2  tp         this rank's slices of linears, embedding and loss; sequence parallelism      tensor_parallel/
    3  cp         this rank's positions of a sequence, and how attention sees the others       sharding/sequence.py
    4  experts    the experts of this rank, and the all-to-alls to the others                  model/dispatch.py
    5  kernels    who computes GEMMs (plain, fp8, a library), norms and attention              gpu/kernels.py
    6  recompute  ranges of a layer's list of elements that the backward runs again            model/segments.py
    7  W          weight gradients wait for their own action where a schedule splits backwards pipeline/stage.py
    8  shard      parameters and gradients in flat buffers, divided by level 0 to 3            data_parallel/store.py
    9  schedule   rows of actions run the stages, or parts of them between all-to-alls         pipeline/engine.py

Steps 1 to 7 are arguments of `GPTStage`; `compose_stage` takes all of them from the plan, and step 8 fills the
parameters. `runtime.TrainingRuntime` does step 9, with graphs and offload where asked for; `train.compiled_blocks`
compiles the segments of the layers' lists after the weights are loaded, since it compares results first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.comm.groups import ContextGroups, ExpertGroups, Group, ProcessGroups, backend_of, second_communicator
from megapipe.config.parallel import SHARDING_STRATEGIES, strategy_of
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.store import Sharing
from megapipe.dtypes import DTYPES
from megapipe.gpu.kernels import Kernels
from megapipe.gpu.libraries import Apex
from megapipe.layers.model import comm_chunks
from megapipe.model.context import SharedTables
from megapipe.model.deep_ep import DeepEP, why_not_deep_ep
from megapipe.model.stage import GPTStage
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.sharding.audit import audit_buffers
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue
from megapipe.tensor_parallel.random import draw

DrawSlice = Callable[[ParamSpec, int, int], Tensor]  # (spec, tp_rank, tp) -> this rank's slice of the initial values


def parameter_dtype(name: str) -> torch.dtype:
    """Return the dtype of weights, activations and pipeline messages for a name in the configuration."""
    found: torch.dtype = getattr(torch, DTYPES[name].torch_name)
    return found


class StageCommunicators(NamedTuple):
    """The groups that the layers of one stage communicate over, and how ranks share its parameters and its experts."""

    tp: Group
    experts: ExpertGroups
    context: ContextGroups
    sharings: tuple[Sharing, Sharing]


class ComposedStage(NamedTuple):
    """One stage with parameters, ready to be run."""

    module: GPTStage
    buffers: StageBuffers
    runner: StageRunner


def communicators(plan: RunPlan, groups: ProcessGroups, trains: bool) -> list[StageCommunicators]:
    """Return the groups of each stage of this rank: the same ones, but those that compute at the same time (pairs of
    DualPipe, which a rank's first stage forms with its second, unit by unit) have their own.

    A collective where groups are made: what it makes depends on the plan, never on the rank.
    """
    experts = ExpertGroups(groups.ep, groups.etp, groups.dp, groups.cp, groups.ep_places, groups.ep_nodes)
    in_parts, hidden = plan.parts is not None, plan.config.model.hidden_size
    uses_deep_ep = not why_not_deep_ep(plan.config, plan.topology, in_parts, backend_of(groups.ep))
    if uses_deep_ep:
        experts = replace(experts, deep_ep=DeepEP.of(groups.ep, hidden))
    first = StageCommunicators(groups.tp, experts, groups.context, sharings(plan, groups, trains))
    found = [first] * len(plan.placement.stages_of(groups.pp.rank))
    if trains and plan.parts is None and Op.OVERLAP in plan.schedule(min(plan.decisive_counts)).ops:
        tp = second_communicator(first.tp) if first.tp.size > 1 else first.tp
        context = first.context
        if groups.cp.size > 1:
            context = ContextGroups(*map(second_communicator, (context.cp, context.a2a, context.p2p)))
        experts = first.experts
        if plan.model.has_experts:
            ep, etp, dp = (second_communicator(group) for group in (groups.ep, groups.etp, groups.dp))
            levels = experts.places, experts.nodes
            if experts.has_levels:
                levels = second_communicator(experts.places), second_communicator(experts.nodes)
            experts = ExpertGroups(ep, etp, dp, context.cp, *levels)
            if uses_deep_ep:
                experts = replace(experts, deep_ep=DeepEP.of(ep, hidden))
        leg = plan.whole_stages().placement.stages_of(groups.pp.rank)[0]
        units = plan.num_units[leg] if plan.num_units else 1
        second = StageCommunicators(tp, experts, context, first.sharings)
        found[units:] = [second] * (len(found) - units)
    if trains and plan.parts is not None:  # counts of rows must not wait behind rows
        counts = second_communicator(groups.ep_nodes if experts.has_levels else groups.ep)
        found = [each._replace(experts=replace(each.experts, counts=counts)) for each in found]
    return found


def sharings(plan: RunPlan, groups: ProcessGroups, trains: bool) -> tuple[Sharing, Sharing]:
    """Return how this rank shares dense parameters, and experts, with others.

    Sharded weights are gathered over NCCL communicators of their own: behind a reduction on the same one, which has one
    stream, the gather for the next computation would wait. A collective, as `communicators`.
    """
    level = SHARDING_STRATEGIES.index(strategy_of(plan.config.parallel))  # 0 none, else as ZeRO-1, 2 or 3
    dense, experts = (Sharing.of(groups, level, is_expert) for is_expert in (False, True))
    if not trains or level < 3 or backend_of(groups.world) != "nccl":
        return dense, experts
    gatherers = second_communicator(dense.shards)
    dense = replace(dense, gatherers=gatherers)
    if plan.model.has_experts:
        is_same = experts.shards.handle is dense.shards.handle
        experts = replace(experts, gatherers=gatherers if is_same else second_communicator(experts.shards))
    return dense, experts


def compose_stage(
    plan: RunPlan,
    groups: ProcessGroups,
    stage: int,
    own: StageCommunicators,
    kernels: Kernels,
    device: torch.device,
    tables: SharedTables,
    *,
    trains: bool,
    draw_slice: DrawSlice | None = None,
    lender: StageBuffers | None = None,
) -> ComposedStage:
    """Return one stage of this rank.

    tables: masks and rotary tables, which all stages of a rank share. trains: with main gradients, a queue for split
    backwards, and the weight versions that the schedule needs. draw_slice: initial values instead of those drawn from
    the seed. lender: buffers of the first stage, whose embedding this one uses.
    """
    config, parallel = plan.config, plan.config.parallel
    queue = WeightQueue() if trains else None
    module = GPTStage(
        config.model,
        plan.partition.stages[stage],  # 1
        own.tp,  # 2
        sequence_parallel=parallel.sequence_parallel,
        chunks=comm_chunks(parallel),
        context=own.context,  # 3
        cp_comm_types=parallel.cp_comm_type,
        experts=own.experts,  # 4
        kernels=kernels,  # 5
        recompute=plan.layer_recompute(stage) if plan.recompute_differs else config.recompute,  # 6
        weight_queue=queue,  # 7
        tables=tables,
        loss=config.training,
    )
    buffers = _buffers(plan, groups, stage, own.sharings, device, trains)  # 8
    dtype = torch.promote_types(parameter_dtype(config.precision.dtype), torch.float32)

    def initial(spec: ParamSpec) -> Tensor:
        cut = groups.cut_of(spec.is_expert)
        return draw(spec, *cut, config.training.seed, dtype) if draw_slice is None else draw_slice(spec, *cut)

    outer = kernels.optimizer.add_outer if isinstance(kernels.optimizer, Apex) else None
    buffers.materialize(module, initial, partial(GradientSlot, kernel=outer) if trains else None, lender)
    for router in module.routers().values():
        if router.expert_bias is not None:
            router.expert_bias = router.expert_bias.to(device)
    begin_row = partial(module.begin_row, buffers.num_versions)
    if trains and config.recompute.recompute_in_bubbles:
        module.replays = []
    return ComposedStage(module, buffers, StageRunner(module, queue, begin_row, replays=module.replays))


def _buffers(
    plan: RunPlan,
    groups: ProcessGroups,
    stage: int,
    sharings: tuple[Sharing, Sharing],
    device: torch.device,
    trains: bool,
) -> StageBuffers:
    """Return the flat buffers of a stage, after an audit of what they cover."""
    layouts = plan.buffers(stage, groups.tp.rank)
    audit_buffers(plan.stage_specs[stage], layouts, *groups.cut_of(False), groups.cut_of(True))
    pp_rank = plan.topology.coordinates(groups.world.global_rank).pp_rank
    return StageBuffers(
        layouts,
        device,
        parameter_dtype(plan.config.precision.dtype),
        parameter_dtype(plan.state_dtypes.gradient) if trains else None,
        plan.num_weight_versions(pp_rank) if trains else 1,
        *sharings,
        is_apart=plan.accumulates_apart,
        changes_in_flight=trains and not plan.is_synchronous,
    )

"""The audit of every rank, what represents all ranks, and `count_rank`: one step of one rank on the meta device.

Ranks of one kind do the same, so one of them is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megapipe.assembly.compose import DrawSlice
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups, Traffic, fake_process_groups
from megapipe.comm.trace import Tracer
from megapipe.data.batch import Batch, DocumentRules
from megapipe.errors import CommunicationError
from megapipe.extras.dry_run.microbatches import microbatches_to_run
from megapipe.optimizer.schedule import Rates
from megapipe.plan.activations import layers_of
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op, stage_action
from megapipe.sharding.audit import audit_buffers
from megapipe.topology import GROUP_NAMES, all_coordinates
from megapipe.trace.meta import LiveBytes, MetaMode
from megapipe.train.nonfinite import OutputWatch
from megapipe.train.stream import train_step


@dataclass(frozen=True)
class RankKind:
    """Ranks with the same shapes and the same row of the schedule."""

    ranks: tuple[int, ...]  # global, ascending
    pp_ranks: tuple[int, ...]


def audit_grid(plan: RunPlan) -> int:
    """Check every rank of the world and return the world's number of process groups.

    Each place in the grid is taken by one rank. Each rank is in exactly one group of every kind (of 'embedding' only
    the ends of a pipeline are), the same that it builds itself. Every stage's parameters fill their buffers on every
    tp_rank. Raises CommunicationError, ConfigError.
    """
    topology = plan.topology
    places = [place for _, place in all_coordinates(topology)]
    if len(set(places)) != topology.world_size:
        raise CommunicationError(f"{topology.world_size} ranks have {len(set(places))} places in the grid")
    num_groups = 0
    for name in GROUP_NAMES:
        groups = topology.groups(name)
        num_groups += len(groups)
        counts = Counter(rank for ranks in groups for rank in ranks)
        for ranks in groups:
            if topology.group_of(name, ranks[0]) != ranks or topology.group_of(name, ranks[-1]) != ranks:
                ends = f"rank {ranks[0]} or {ranks[-1]}"
                raise CommunicationError(f"{ends} builds a group {name} other than {ranks[:4]}..., which it belongs to")
        for rank, place in enumerate(places):
            expected = 1 if name != "embedding" or place.pp_rank in (0, topology.pp - 1) else 0
            if counts[rank] != expected:
                raise CommunicationError(f"rank {rank} is in {counts[rank]} groups {name}, not in {expected}")
    for stage in range(plan.placement.num_stages):
        for tp_rank in range(topology.tp):
            experts = (0, topology.ep * topology.etp)
            audit_buffers(plan.stage_specs[stage], plan.buffers(stage, tp_rank), tp_rank, topology.tp, experts)
    return num_groups


def kinds_of_ranks(plan: RunPlan) -> tuple[RankKind, ...]:
    """Return the kinds of all ranks, ordered by their first ranks; dp and cp make no difference to a step."""
    topology, schedule = plan.topology, plan.schedule(plan.batch.num_microbatches)
    behaviour: dict[tuple[int, int], Hashable] = {}  # by pp_rank and tp_rank: what such a rank does and holds
    for pp_rank in range(topology.pp):
        held = plan.placement.stages_of(pp_rank)
        actions = tuple((held.index(stage), op, microbatch) for stage, op, microbatch in schedule.rows[pp_rank])
        stages = (plan.partition.stages[stage] for stage in held)
        layers = tuple((layers_of(plan.model, part), part.has_embedding, part.has_head) for part in stages)
        specs = [plan.stage_specs[stage] for stage in held]
        row = actions, layers, plan.num_weight_versions(pp_rank)
        for tp_rank in range(topology.tp):
            cuts = {False: (tp_rank, topology.tp), True: (0, topology.ep * topology.etp)}
            shapes = tuple(tuple(sorted(spec.local_shape(*cuts[spec.is_expert]) for spec in each)) for each in specs)
            behaviour[pp_rank, tp_rank] = row, shapes
    found: dict[Hashable, list[int]] = {}
    for rank, place in all_coordinates(topology):
        found.setdefault(behaviour[place.pp_rank, place.tp_rank], []).append(rank)
    return tuple(
        RankKind(tuple(ranks), tuple(sorted({topology.coordinates(rank).pp_rank for rank in ranks})))
        for ranks in found.values()
    )


META = torch.device("meta")
STATE = ("weights", "gradients", "gathered weights", "whole gradients", "optimizer")
# groups in which every microbatch sends the same; the others communicate once a step, unless gradients are sharded
PER_MICROBATCH = ("tp", "pp", "cp", "cp_a2a", "cp_p2p", "kv", "ep", "ep_nodes", "ep_places", "etp")
RATES = Rates(1e-3, 0.1)  # arbitrary: there are no values

ReadBatch = Callable[[int, int], Batch]  # (dp_rank, microbatch number) -> the microbatch, of every step


def empty_slices(device: torch.device) -> DrawSlice:
    """Return initial values of parameters for a device on which there are no values."""
    return lambda spec, tp_rank, tp: torch.empty(spec.local_shape(tp_rank, tp), device=device)


def random_reader(plan: RunPlan) -> ReadBatch:
    """Return a function (dp_rank, microbatch) -> a batch of random token ids."""
    micro, seq = plan.config.training.micro_batch_size, plan.config.model.seq_length
    data = plan.config.data
    rules = DocumentRules(0, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)

    def read(dp_rank: int, k: int) -> Batch:
        samples = np.random.default_rng([dp_rank, k]).integers(1, plan.config.model.vocab_size, (micro, seq + 1))
        return Batch.of(samples.astype(np.int64), tuple(range(micro)), rules)

    return read


def run_steps(
    runtime: TrainingRuntime,
    read: ReadBatch,
    num_steps: int = 1,
    num_microbatches: int | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Run training steps that may have no values. num_microbatches: those of the full global batch if None. begin:
    called before each step.
    """
    plan, dp_rank = runtime.plan, runtime.coordinates.dp_rank
    step = train_step(runtime)
    for number in range(num_steps):
        begin()
        count = num_microbatches or plan.batch.num_microbatches
        batch = runtime.microbatches(count, partial(read, dp_rank), number)
        step.run(batch, RATES)
        del batch
    runtime.stores.finish_weights()


@dataclass(frozen=True)
class RankCount:
    """The memory and the messages of one rank in a step."""

    global_rank: int
    items: Mapping[str, int]  # bytes at the peak: those of STATE, and 'step' for everything else
    peak_action: str  # the action of the row during which the peak occurred, such as "3B5"; '' after the row
    before_action: int  # bytes of the step at that action's start
    num_run: int  # microbatches run
    seconds: float
    traffic: Traffic | None = None  # messages of the whole step; None for real ranks

    @property
    def peak(self) -> int:
        return sum(self.items.values())


def count_rank(
    plan: RunPlan, global_rank: int, read: ReadBatch, device: str = "cuda", *, in_full: bool = False
) -> RankCount:
    """Run one step of this rank with meta tensors. device: whose kernels are counted, 'cuda' or 'cpu'.

    Unless in_full, only as many microbatches of a long step are run as show all its situations (`grid`); messages are
    extrapolated to the whole step.
    """
    full = plan.batch.num_microbatches
    pp_rank = plan.topology.coordinates(global_rank).pp_rank
    count = full if in_full else microbatches_to_run(plan, pp_rank)
    traffic, live = Traffic(), LiveBytes()
    traffic.observe = lambda tensor: live.name([tensor], "messages")
    with MetaMode(device), live:
        groups = fake_process_groups(plan.topology, global_rank, traffic)
        found, watch = count_step(plan, groups, META, live, read, empty_slices(META), count, traffic)
    if count != full:
        groups_of_rows = PER_MICROBATCH if plan.sharding is None else (*PER_MICROBATCH, "replicas", "shards")
        watch.extend(plan.schedule(count).rows[pp_rank], plan.schedule(full).rows[pp_rank], groups_of_rows)
    return found


def count_step(
    plan: RunPlan,
    groups: ProcessGroups,
    device: torch.device,
    live: LiveBytes,
    read: ReadBatch,
    draw_slice: DrawSlice | None = None,
    num_microbatches: int | None = None,
    traffic: Traffic | None = None,
    build: Callable[..., TrainingRuntime] = TrainingRuntime,
) -> tuple[RankCount, ActionWatch]:
    """Build the runtime and run the first step; called inside `live`, with meta tensors or on a real rank.

    draw_slice: initial values, those of training if None. num_microbatches: those of the full global batch if None.
    build: makes the runtime.
    """
    started = time.perf_counter()
    watch = ActionWatch(live, traffic)
    runtime = build(plan, groups, device, draw_slice, watch)
    if runtime.offload is not None:  # its pool is host memory
        pool = runtime.offload.pool
        pool.allocate = partial(live.outside, pool.allocate)
    buffers = [buffer for held in runtime.buffers.values() for buffer in held.buffers]
    trained = [buffer for held in runtime.buffers.values() for buffer in held.trained]
    live.name((tensor for buffer in buffers for tensor in buffer.kept_parameters), "weights")
    live.name((tensor for buffer in trained for tensor in buffer.kept_gradients), "gradients")
    live.follow((b.parameters for b in buffers if b.level == 3), "gathered weights")
    live.follow((b.gradients for b in trained if b.level >= 2), "whole gradients")
    held = dict(runtime.optimizer.held())
    if "host" in held:  # Muon copies matrices to the device and computes there
        live.leave_out(held.pop("host"))
        if not any(bucket.has_matrices for buffer in trained for bucket in buffer.layout.buckets):
            rule: Any = runtime.optimizer.rule
            rule.step = live.uncounted(rule.step)
    for item, tensors in held.items():
        live.name(tensors, item)
    live.label = "step"
    count = num_microbatches or plan.batch.num_microbatches
    outputs = OutputWatch(runtime) if plan.config.training.check_for_nan_in_loss_and_grad else None
    run_steps(runtime, read, num_microbatches=count, begin=live.begin)
    watch.finish()
    del outputs
    items = {item: live.at_peak.get(item, 0) for item in STATE}
    state = sum(items.values())
    items["step"] = live.peak - state
    seconds = time.perf_counter() - started
    rank = groups.world.global_rank
    before_action = max(watch.before_action - state, 0)
    return RankCount(rank, items, watch.peak_action, before_action, count, seconds, traffic), watch


class ActionWatch(Tracer):
    """A tracer that records in which action the peak occurred, the bytes at its start, and what actions sent."""

    def __init__(self, live: LiveBytes, traffic: Traffic | None = None) -> None:
        super().__init__()
        self._live, self._traffic = live, traffic
        self._level = self._at_start = 0
        self._has_risen = False
        self.peak_action, self.before_action = "", 0
        self._sent_before = Traffic()
        self._sent_by: dict[tuple[int, Op], Traffic] = {}  # the last action of each kind
        self.settle = self._mark
        live.at_new_peak = self._rise

    def event(self, name: str, kind: str, start_ns: int, end_ns: int | None = None) -> None:
        if kind == "action":
            if self._has_risen:
                self.peak_action, self.before_action = name, self._at_start
            if self._traffic is not None:
                action = stage_action(name)
                self._sent_by[action.stage, action.op] = self._traffic.since(self._sent_before)
                self._sent_before = self._traffic.copy()
        if kind in ("action", "row"):
            self._has_risen = False

    def finish(self) -> None:
        """End the step: a peak after the row belongs to no action."""
        if self._has_risen:
            self.peak_action, self.before_action = "", self._level

    def extend(self, run: Sequence[Action], whole: Sequence[Action], groups: Sequence[str]) -> None:
        """Extrapolate the messages of a shorter row in these groups: each further action sends what the last of its
        kind sent.
        """
        assert self._traffic is not None
        missing = Counter((action.stage, action.op) for action in whole)
        missing.subtract((action.stage, action.op) for action in run)
        for kind, count in missing.items():
            if count and kind in self._sent_by:
                self._traffic.add(self._sent_by[kind], count, groups)

    def _rise(self) -> None:
        self._has_risen = True

    def _mark(self) -> None:
        """Record the bytes; called before and after every action, when the engine reads the clock."""
        self._at_start, self._level = self._level, self._live.now

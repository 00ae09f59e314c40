"""`count_rank`: one step of one rank of a planned world, with its real runtime on the meta device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups, Traffic, fake_process_groups
from megapipe.comm.trace import Tracer
from megapipe.data.batch import Batch
from megapipe.extras.dry_run.grid import microbatches_to_run
from megapipe.extras.dry_run.meta import LiveBytes, MetaMode
from megapipe.optimizer.schedule import Rates
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op, stage_action
from megapipe.sharding.spec import ParamSpec
from megapipe.train.nonfinite import OutputWatch
from megapipe.train.step import train_step

META = torch.device("meta")
STATE = ("weights", "gradients", "gathered weights", "whole gradients", "optimizer", "rollback")
# groups in which every microbatch sends the same; the others communicate once a step, unless gradients are sharded
PER_MICROBATCH = ("tp", "pp", "cp", "cp_a2a", "cp_p2p", "kv", "ep", "etp")
RATES = Rates(1e-3, 0.1)  # arbitrary: there are no values

ReadBatch = Callable[[int, int], Batch]  # (dp_rank, microbatch number) -> the first step's microbatch


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

    def empty(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return torch.empty(spec.local_shape(tp_rank, tp), device=META)

    with MetaMode(device), live:
        groups = fake_process_groups(plan.topology, global_rank, traffic)
        found, watch = count_step(plan, groups, META, live, read, empty, count, traffic)
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
    draw_slice: Callable[[ParamSpec, int, int], Tensor] | None = None,
    num_microbatches: int | None = None,
    traffic: Traffic | None = None,
) -> tuple[RankCount, ActionWatch]:
    """Build the runtime and run the first step; called inside `live`, with meta tensors or on a real rank.

    draw_slice: initial values, those of training if None. num_microbatches: those of the full global batch if None.
    """
    started = time.perf_counter()
    watch = ActionWatch(live, traffic)
    runtime = TrainingRuntime(plan, groups, device, draw_slice, watch)
    if runtime.offload is not None:  # its pool is host memory
        pool = runtime.offload.pool
        pool.allocate = partial(live.outside, pool.allocate)
    buffers = [buffer for held in runtime.buffers.values() for buffer in held.buffers]
    live.name((tensor for buffer in buffers for tensor in buffer.kept_parameters), "weights")
    live.name((buffer.kept_gradients for buffer in buffers), "gradients")
    live.follow((b.parameters for b in buffers if b.level == 3), "gathered weights")
    live.follow((b.gradients for b in buffers if b.level >= 2), "whole gradients")
    held = dict(runtime.optimizer.held())
    if "host" in held:  # Muon copies matrices to the device and computes there
        live.leave_out(held.pop("host"))
        if not any(bucket.has_matrices for buffer in buffers for bucket in buffer.layout.buckets):
            rule: Any = runtime.optimizer.rule
            rule.step = live.uncounted(rule.step)
    for item, tensors in held.items():
        live.name(tensors, item)
    live.label = "step"
    count = num_microbatches or plan.batch.num_microbatches
    dp_rank = runtime.coordinates.dp_rank
    keys = Keys(plan.config.training.seed, 0, dp_rank, plan.topology.dp)
    read_own = lambda k: read(dp_rank, k)  # noqa: E731
    parts = runtime.sequence_part, runtime.packs_documents, runtime.num_ahead
    microbatches = Microbatches(count, read_own, keys, device, *parts)
    outputs = OutputWatch(runtime) if plan.config.training.check_for_nan_in_loss_and_grad else None
    live.begin()
    train_step(runtime, plan.config.logging.log_num_zeros_in_grad).run(microbatches, RATES)
    runtime.finish_parameters()
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

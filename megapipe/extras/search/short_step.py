"""The time and memory of a layout, predicted from a short step of a few pipeline fills, so that a search is fast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

from megapipe.config.config import Config
from megapipe.extras.search.layout import Layout, takes_any_chunks
from megapipe.plan.hardware import Hardware
from megapipe.plan.memory import RankMemory, all_rank_memory, rank_memory
from megapipe.plan.resolve import resolve, vary
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, predict_step
from megapipe.schedule.action import Op

FILLS = 4  # a short step has about this many times pp microbatches


class ShortSteps:
    """Short-step predictions of a configuration's layouts.

    Beyond `FILLS` pipeline fills only the steady middle of a step grows, by the same time for every pp microbatches;
    the peak memory stays the same. Plans that differ only in microbatch size and recompute share the rest.
    """

    def __init__(self, config: Config, world_size: int, hardware: Hardware) -> None:
        self._config, self._world_size, self._hardware = config, world_size, hardware
        self._plans: dict[Hashable, RunPlan] = {}

    def of(self, layout: Layout, slowest: float, most_bytes: float) -> tuple[float, int]:
        """Return (seconds of a step, bytes of the fullest rank). Raises ConfigError.

        If the first rank already needs more than `most_bytes`: (inf, its bytes). If the step takes `slowest` seconds or
        more, the bytes are only a lower bound.
        """
        batch, dp = self._config.training.global_batch_size, self._world_size // layout.tp // layout.pp
        assert batch is not None
        count = batch // dp // layout.micro_batch_size
        few = count if count <= (FILLS + 1) * layout.pp else FILLS * layout.pp + count % layout.pp
        plan = self._plan(layout, few * dp * layout.micro_batch_size)
        need = _in_a_whole_step(rank_memory(plan, 0), count, few)
        if need > most_bytes:
            return math.inf, need
        time = predict_step(plan, self._hardware)
        seconds = time.seconds + (count - few) // layout.pp * _period(time, layout.pp)
        if seconds < slowest:
            need = max(_in_a_whole_step(rank, count, few) for rank in all_rank_memory(plan))
        return seconds, need

    def _plan(self, layout: Layout, batch: int) -> RunPlan:
        training = dataclasses.replace(self._config.training, global_batch_size=batch, rampup_batch_size=None)
        config = layout.applied_to(dataclasses.replace(self._config, training=training))
        key = dataclasses.replace(layout, micro_batch_size=1, recompute=None)  # type: ignore[arg-type]
        if key in self._plans:
            return vary(self._plans[key], config)
        self._plans[key] = resolve(config, self._world_size, self._hardware.ranks_per_node)
        return self._plans[key]


def _in_a_whole_step(rank: RankMemory, count: int, few: int) -> int:
    """Return the rank's bytes in a whole step, which holds the inputs of all `count` microbatches instead of `few`."""
    return rank.total + rank.items["microbatches"] // few * (count - few)


def _period(time: StepTime, pp: int) -> float:
    """Return the seconds that pp more microbatches take in the middle of a step.

    Measured between two input gradients of the last stage that are pp microbatches apart.
    """
    timeline = time.timeline
    last = timeline.schedule.num_stages - 1
    rank = timeline.schedule.placement.rank_of_stage[last]
    row = timeline.schedule.rows[rank]
    ends = [
        timeline.ends[rank][slot] for slot, (stage, op, _) in enumerate(row) if stage == last and op in (Op.B, Op.I)
    ]
    middle = len(ends) - 1 - pp - (pp // 2 if takes_any_chunks(timeline.schedule.name) else 0)
    return ends[middle] - ends[middle - pp] if middle >= pp else max(timeline.work_seconds) * pp / len(ends)

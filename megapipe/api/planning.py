"""`make_plan` and `make_schedule`: what a run will do, and the order of a pipeline's work."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from megapipe.api.config import Config
from megapipe.assembly.datasets import with_vocabulary
from megapipe.errors import ConfigError
from megapipe.extras.report.schedules import Model
from megapipe.extras.report.timeline import svg, timeline_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.costs import AutoGoal, Seconds
from megapipe.schedule.families import build_schedule, schedule_family
from megapipe.schedule.lower import lower
from megapipe.schedule.schedule import Row, Schedule, to_csv
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.validate import ValidationReport, validate


def make_plan(config: Config, world_size: int, ranks_per_node: int | None = None) -> RunPlan:
    """Plan a run on `world_size` ranks: the plan that `Trainer` would carry out there; nothing is started::

        plan = make_plan(Config.from_yaml("configs/llama3_8b.yaml"), 64, ranks_per_node=8)
        print(plan_text(plan))

    ranks_per_node: None for one node. The plan's stable attributes: `config` with every derived value, `topology` (tp,
    cp, pp, dp), `schedule_name`, `num_chunks`, `partition` (the layers of each stage), `batch`, and
    `schedule(num_microbatches)`. The configuration may lack what only a job needs, such as data. Raises ConfigError
    with the rule and a way out for what cannot run on so many ranks.
    """
    return resolve(with_vocabulary(config.load(is_job=False).config), world_size, ranks_per_node)


class PipelineSchedule:
    """A pipeline schedule: what every pipeline rank does, in order. Made by `make_schedule`.

    rows: [pipeline rank][slot] -> Action, a tuple (stage, op, microbatch) whose text is '2F0' (stage 2, forward,
    microbatch 0). Ops: F forward, B backward; in schedules that split it I (input gradient) and W (weight gradient).
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @property
    def name(self) -> str:
        return self._schedule.name

    @property
    def rows(self) -> tuple[Row, ...]:
        return self._schedule.rows

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The pipeline rank that holds each stage; for DualPipe that of even microbatches."""
        return self._schedule.placement.rank_of_stage

    def validate(self) -> ValidationReport:
        """Prove that the schedule with its messages runs to its end. Raises ScheduleError with the faulty action."""
        return validate(lower(self._schedule))

    def simulate(
        self,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        *,
        transfer: float = 0.0,
        latency: float = 0.0,
    ) -> Timeline:
        """Predict the start and end of every action, in seconds.

        forward, input_gradient, weight_gradient: seconds of all the layers of one rank for one microbatch. transfer:
        seconds that a message occupies its channel; latency: from then to its use. The result has makespan_seconds,
        barrier_bubble and chained_bubble (.share of the step that is idle), and peak_live_chunks by rank: the most
        (stage, microbatch) pairs whose activations are alive.
        """
        given = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
        for what, value in {**given, "transfer": transfer, "latency": latency}.items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{what} {value:g}: expected seconds, at least 0")
        seconds, schedule = tuple(given.values()), self._schedule
        model = Model(schedule.num_ranks, Seconds(*seconds), transfer_seconds=transfer, latency_seconds=latency)
        return simulate(lower(schedule), model.costs(schedule.num_stages))

    def draw(self, columns: int = 160) -> str:
        """Return a drawing for a terminal, a line for each rank, with F = I = W."""
        return timeline_text(self.simulate(), columns)

    def svg(self, path: str | PathLike[str] | None = None) -> str:
        """Return a drawing as SVG with a memory curve for each rank, with F = I = W. path: also write it there."""
        text = svg(self.simulate())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_svg_(self) -> str:  # how notebooks show it
        return self.svg()

    def csv(self) -> str:
        """Return one line for each rank with an action in each cell, as torch.distributed.pipelining reads them."""
        return to_csv(self._schedule)

    def __str__(self) -> str:
        return str(self._schedule)


def make_schedule(
    name: str,
    pipeline_size: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    group_size: int | None = None,
    memory_limit: float | None = None,
    slices: int = 1,
) -> PipelineSchedule:
    """Build and prove a pipeline schedule of docs/schedules.md, or of a loaded extension::

        print(make_schedule("zb-h1", 4, 8).draw())

    pipeline_size: ranks. chunks: stages of each rank; None for 1, or the number that the schedule needs.
    group_size: microbatches that run through one chunk before the next (interleaved). memory_limit: of zb-auto, in
    microbatches. slices: of each microbatch along its sequence. Raises ConfigError if the schedule cannot run this
    shape, with the nearest one that works.
    """
    family = schedule_family(name)
    chunks = family.num_chunks(1) if chunks is None else chunks
    goal = None
    if memory_limit is not None:
        if not family.is_automatic:
            raise ConfigError(f"schedule {name} has no memory limit to search for; memory_limit is for zb-auto")
        goal = AutoGoal(Model(max(1, pipeline_size), Seconds(1.0, 1.0, 1.0)).costs(max(1, pipeline_size)), memory_limit)
    return PipelineSchedule(build_schedule(name, pipeline_size, chunks, microbatches, group_size, goal, slices))

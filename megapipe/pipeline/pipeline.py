"""`Pipeline`: trains any modules as the stages of a pipeline over the ranks of a group (one rank or more)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.comm.bootstrap import shutdown, start
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.groups import Group, build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.environment import read_environment
from megapipe.errors import ConfigError
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.families import (
    SCHEDULES,
    build_forward_only,
    build_lowered,
    build_schedule,
    default_schedule,
    schedule_family,
)
from megapipe.schedule.lower import default_receive_depth
from megapipe.schedule.simulate import unhindered_send_depth
from megapipe.topology import Topology

Message = Sequence[MessageSpec]


@contextmanager
def pipeline_ranks(
    backend: str = "auto", device: str = "auto", timeout_seconds: float = 600.0
) -> Iterator[tuple[Group, torch.device]]:
    """Join all ranks that the launcher started (one without a launcher) in a pipeline; yields (pp group, this rank's
    device).

    With several ranks the process exits with code 0 at the end of the block; exceptions inside propagate.
    """
    world = start(read_environment(), backend, timeout_seconds, device)
    groups = build_process_groups(Topology(pp=world.world_size), world.global_rank, world.backend, timeout_seconds)
    yield groups.pp, world.device
    shutdown()


class Pipeline:
    """A model of `num_stages` modules, one after another, trained over the ranks of `pp`.

    make_stage: stage -> module, called for this rank's stages only. A module is called with the tensors of the message
    from the stage before (none for the first) and the microbatch.
    message: shapes and dtypes that cross every boundary, or a function of the boundary's number.
    loss: (last stage's output, microbatch) -> scalar. schedule: a family that runs plain modules, or 'auto'
    (interleaved where a rank holds several stages, else 1f1b). With data parallelism the caller averages gradients over
    replicas before the optimizer step. Raises ConfigError if the ranks do not divide the stages or the schedule cannot
    run them.
    """

    def __init__(
        self,
        num_stages: int,
        make_stage: Callable[[int], nn.Module],
        message: Message | Callable[[int], Message],
        loss: Callable[[Any, Any], Tensor],
        pp: Group,
        *,
        schedule: str = "auto",
        device: torch.device | str = "cpu",
        receive_depth: int | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        if num_stages % pp.size:
            raise ConfigError(
                f"{num_stages} stages do not divide over {pp.size} pipeline ranks; use a multiple of {pp.size} stages"
            )
        self._num_chunks = num_stages // pp.size
        self._schedule = default_schedule(self._num_chunks) if schedule == "auto" else schedule
        may_use_gpu = torch.device(device).type != "cpu"
        self._receive_depth = default_receive_depth(may_use_gpu) if receive_depth is None else receive_depth
        self._pp, self._loss, self._tracer = pp, loss, tracer
        self._message = message if callable(message) else lambda boundary: message
        family = schedule_family(self._schedule)
        if not family.is_synchronous:
            raise ConfigError(
                f"schedule {family.name} updates weights within a step, but train_step leaves that to you; use "
                f"{default_schedule(1)}, or give pipeline.engine.Engine `weights` of your own"
            )
        if not family.runs_plain_modules:
            plain = ", ".join(other.name for other in SCHEDULES.values() if other.runs_plain_modules)
            raise ConfigError(
                f"plain modules cannot run schedule {family.name}, which splits the backward of a stage or places it "
                f"on two ranks; use one of {plain}, or pipeline.engine.Engine with stages that queue weight gradients"
            )
        self._placement = build_schedule(self._schedule, pp.size, self._num_chunks, num_microbatches=1).placement
        self.modules = {stage: make_stage(stage).to(device) for stage in self._placement.stages_of(pp.rank)}
        self._runners = {stage: StageRunner(module) for stage, module in self.modules.items()}
        self._channels = Channels.build(self._placement, pp, device)
        self._engines: dict[tuple[int, bool], Engine] = {}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages."""
        for module in self.modules.values():
            yield from module.parameters()

    def train_step(self, microbatches: Sequence[Any]) -> list[Tensor]:
        """Run forward and backward of all microbatches and add the gradient of their mean loss to .grad.

        Every rank passes the same microbatches. Returns their losses on the rank of the last stage, an empty list
        elsewhere.
        """
        return self._run(microbatches, is_training=True)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> list[Tensor]:
        """Return the losses, as train_step does, without gradients."""
        return self._run(microbatches, is_training=False)

    def _run(self, microbatches: Sequence[Any], is_training: bool) -> list[Tensor]:
        count = len(microbatches)
        if (count, is_training) not in self._engines:
            depth, shape = self._receive_depth, (self._pp.size, self._num_chunks, count)
            if is_training:
                schedule = build_lowered(self._schedule, *shape, receive_depth=depth)
            else:
                schedule = build_forward_only(self._placement, count, depth)
            sends = 1 + unhindered_send_depth(schedule)
            for channel in self._channels.values():
                channel.max_in_flight = max(sends, channel.max_in_flight or 0)
            engine = Engine(schedule, self._pp.rank, self._runners, self._channels, tracer=self._tracer)
            self._engines[count, is_training] = engine

        def loss(output: Any, microbatch: Any) -> tuple[Tensor, Tensor]:
            value = self._loss(output, microbatch)
            return value / count, value.detach()

        step = Step(microbatches, lambda boundary: tuple(self._message(boundary)), loss)
        return self._engines[count, is_training].run(step)

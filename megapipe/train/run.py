"""From a plan to a finished run on this rank: join the world, build, load, train, leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megapipe.assembly.datasets import RunData, build_data
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.starts import Starts, clear_starts
from megapipe.comm.bootstrap import World, shutdown, start
from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.environment import Environment, set_for_libraries
from megapipe.gpu.kernels import choose_kernels, describe_kernels
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.tokenizer import Tokenizer, files_of
from megapipe.topology import GROUP_NAMES
from megapipe.train.gpu_setup import check_fp8, graph_words, marks_of, prepare, unused, watched_memory
from megapipe.train.guard import StopRequest, stop_requests
from megapipe.train.journal import Journal, recorded_folder
from megapipe.train.loading import Resumed, count_this_start, resume, share_starts
from megapipe.train.loop import Training
from megapipe.train.saving import Saving, prepare_save
from megapipe.train.step import ACTION_LEVEL
from megapipe.train.watch import heartbeat_of, watched

AfterTraining = Callable[[TrainingRuntime, RunData, Journal], None]


@dataclass(frozen=True)
class TrainingContext:
    """The surroundings of a run. starts: of this job so far, None without --save. config_text: see `pretrain`."""

    journal: Journal
    stop: StopRequest
    starts: Starts | None
    config_text: str


def pretrain(
    plan: RunPlan,
    environment: Environment,
    config_text: str,
    after_training: AfterTraining | None = None,
    remarks: Sequence[str] = (),
) -> int:
    """Train as planned on this rank. Ends the process if there are other ranks (comm.bootstrap.shutdown), else returns
    the exit code.

    config_text: the configuration as YAML that loads again, saved with every checkpoint. after_training: called on
    every rank after a run that reached its end. remarks: on the configuration, for the record of the run.
    """
    config = plan.config
    if config.training.deterministic_mode:
        use_deterministic_kernels()
    journal = Journal(recorded_folder(config), environment.global_rank)
    with journal.failures(), stop_requests(config.training.exit_signal_handler) as stop:
        kernels = choose_kernels(config)  # fails, if a library is missing, before ranks wait for each other
        journal.open_writers(config)
        nccl = prepare(config, environment)
        counted = count_this_start(config, environment)
        world = join(plan, environment)
        check_fp8(config, world.device)
        words = (*describe_kernels(kernels, config, world.device.type), *graph_words(plan))
        journal.start(plan, world, config_text, remarks, words)
        if environment.global_rank == 0:
            print("kernels: " + "\n         ".join(words), flush=True)
        for remark in unused(config.gpu, world):
            journal.say(remark)
        heartbeat = heartbeat_of(config)
        groups = build_process_groups(
            plan.topology,
            world.global_rank,
            world.backend,
            world.timeout_seconds,
            heartbeat=heartbeat,
            nccl=nccl.options,
        )
        starts = share_starts(counted, config, groups.world)
        with (
            watched(plan, environment, groups, recorded_folder(config), journal),
            watched_memory(plan, world.device, world.global_rank),
        ):
            _train(plan, groups, world, TrainingContext(journal, stop, starts, config_text), after_training)
    if world.world_size > 1:
        shutdown(0)
    return 0


def _train(
    plan: RunPlan,
    groups: ProcessGroups,
    world: World,
    context: TrainingContext,
    after_training: AfterTraining | None,
) -> None:
    """Build, load, train."""
    journal, starts = context.journal, context.starts
    heartbeat = groups.world.heartbeat or Heartbeat(GROUP_NAMES)
    with heartbeat.phase("starting", PATIENCE):
        marks = marks_of(plan.config.gpu, plan.config.logging, world.global_rank)
        runtime = TrainingRuntime(plan, groups, world.device, tracer=tracer_of(plan, world.device), marks=marks)
        data = build_data(plan)
    try:
        with heartbeat.phase("loading", PATIENCE):
            resumed = resume(runtime, journal, starts)
            saving = _prepare_saving(runtime, resumed, context, data.tokenizer)
        if data.train is not None and plan.config.training.train_samples:
            data.train.skip(resumed.state.account.skipped, plan.config.training.train_samples)
        training = Training(runtime, data, resumed.state, resumed.schedules, saving, journal, context.stop)
        ending = training.run()
        if after_training is not None and not ending.early:
            with heartbeat.phase("after the training", PATIENCE):
                after_training(runtime, data, journal)
        journal.end(resumed.state.step, ending.reason, ending.early)
        if starts is not None and not ending.early and groups.world.rank == 0:
            assert plan.config.checkpoint.save is not None
            clear_starts(Path(plan.config.checkpoint.save))
    finally:
        data.close()
        journal.close()


def use_deterministic_kernels() -> None:
    """Allow only kernels and an algorithm of NCCL that are bit-reproducible; torch raises where it has none."""
    set_for_libraries(CUBLAS_WORKSPACE_CONFIG=":4096:8", NCCL_ALGO="Ring")
    torch.use_deterministic_algorithms(True)


def tracer_of(plan: RunPlan, device: torch.device) -> Tracer | None:
    """Return a tracer if something uses it: the measured bubble on CPUs, --timing-log-level 2, a profile."""
    if plan.config.logging.timing_log_level >= ACTION_LEVEL:
        return Tracer(settle=partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)
    wanted = plan.config.logging.profile_pipeline or (device.type == "cpu" and plan.topology.pp > 1)
    return Tracer() if wanted else None


def join(plan: RunPlan, environment: Environment) -> World:
    """Meet the other ranks over the backend that the configuration asks for."""
    parallel = plan.config.parallel
    return start(
        environment,
        parallel.distributed_backend,
        60.0 * parallel.distributed_timeout_minutes,
        plan.config.training.device,
    )


def _prepare_saving(
    runtime: TrainingRuntime, resumed: Resumed, context: TrainingContext, tokenizer: Tokenizer | None
) -> Saving:
    """Clean up in --save after interrupted saves, and return what saves there."""
    save, say = runtime.plan.config.checkpoint.save, context.journal.say
    if save is None:
        return Saving(runtime, resumed.schedules, None, context.config_text, {}, say)
    step, rollbacks = resumed.state.step, resumed.state.account.rollbacks
    for remark in prepare_save(Path(save), step, runtime.groups.world, resumed.damaged, rollbacks):
        say(remark)
    tokenizer_files = files_of(tokenizer) if tokenizer is not None and runtime.groups.world.rank == 0 else {}
    return Saving(runtime, resumed.schedules, Path(save), context.config_text, tokenizer_files, say)

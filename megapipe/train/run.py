"""From a plan to a finished run on this rank: join the world, build, load, train, leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megapipe.assembly.datasets import RunData, build_data
from megapipe.assembly.training_runtime import TrainingRuntime
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
from megapipe.train import persistence, restart
from megapipe.train.gpu_setup import check_fp8, graph_words, marks_of, prepare, unused, watched_memory
from megapipe.train.loop import Training
from megapipe.train.persistence import Resumed
from megapipe.train.run_log import RunLog
from megapipe.train.saving import Saves
from megapipe.train.schedules import Schedules
from megapipe.train.signals import StopRequest, stop_requests
from megapipe.train.state import TrainingState
from megapipe.train.timers import ACTION_LEVEL
from megapipe.train.watch import heartbeat_of, watched
from megapipe.train.writers import Writers, build_writers, recorded_folder

Afterwards = Callable[[TrainingRuntime, RunData, Writers], None]


def pretrain(
    plan: RunPlan,
    environment: Environment,
    config_text: str,
    afterwards: Afterwards | None = None,
    remarks: Sequence[str] = (),
) -> int:
    """Train as planned on this rank. Ends the process when there are other ranks (comm.bootstrap.shutdown), else returns the exit code.

    config_text: the configuration as YAML that loads again, saved beside every checkpoint. afterwards: called on every rank after a run
    that reached its end, with the trained runtime. remarks: on the configuration, for the record of the run.
    """
    config = plan.config
    if config.training.deterministic_mode:
        be_deterministic()
    log = RunLog(recorded_folder(config), environment.global_rank)
    with log.failures(), stop_requests(config.training.exit_signal_handler) as stop:
        kernels = choose_kernels(config)  # what is missing is told before ranks wait for each other
        writers = build_writers(config, log, logs_here=environment.global_rank == 0)
        nccl = prepare(config, environment)
        counted = restart.count(config, environment)
        world = join(plan, environment)
        check_fp8(config, world.device)
        words = (*describe_kernels(kernels, config, world.device.type), *graph_words(plan))
        log.start(plan, world, config_text, remarks, words)
        if environment.global_rank == 0:
            print("kernels: " + "\n         ".join(words), flush=True)
        for remark in unused(config.gpu, world):
            writers.say(remark)
        heartbeat = heartbeat_of(config)
        groups = build_process_groups(
            plan.topology, world.global_rank, world.backend, world.timeout_seconds, heartbeat=heartbeat, nccl=nccl
        )
        starts = restart.agreed(counted, config, groups.world)
        with (
            watched(plan, environment, groups, recorded_folder(config), log),
            watched_memory(plan, world.device, world.global_rank),
        ):
            _train(plan, groups, world, config_text, Surroundings(log, writers, stop, starts), afterwards)
    if world.world_size > 1:
        shutdown(0)
    return 0


@dataclass(frozen=True)
class Surroundings:
    """What a run speaks to, and what speaks to it. starts: of this job so far, None without --save."""

    log: RunLog
    writers: Writers
    stop: StopRequest
    starts: Starts | None


def _train(
    plan: RunPlan,
    groups: ProcessGroups,
    world: World,
    config_text: str,
    around: Surroundings,
    afterwards: Afterwards | None,
) -> None:
    """Build, load, train."""
    writers = around.writers
    heartbeat = groups.world.heartbeat or Heartbeat(GROUP_NAMES)
    with heartbeat.phase("starting", PATIENCE):
        marks = marks_of(plan.config.gpu, plan.config.logging, world.global_rank)
        runtime = TrainingRuntime(plan, groups, world.device, tracer=tracer_of(plan, world.device), marks=marks)
        data = build_data(plan)
    try:
        with heartbeat.phase("loading", PATIENCE):
            resumed = resume(runtime, writers, around.starts)
            if resumed.path is not None:
                around.log.resumed(resumed.path)
            saves = saves_of(runtime, resumed, config_text, data.tokenizer, writers)
        if data.train is not None and plan.config.training.train_samples:
            data.train.skip(resumed.state.account.skipped, plan.config.training.train_samples)
        training = Training(runtime, data, resumed.state, resumed.schedules, writers, around.stop, saves)
        ending = training.run()
        if afterwards is not None and not ending.early:
            with heartbeat.phase("after the training", PATIENCE):
                afterwards(runtime, data, writers)
        writers.say(f"ended after step {resumed.state.step}: {ending.reason}")
        around.log.end(resumed.state.step, ending.reason, ending.early)
        if around.starts is not None and not ending.early and groups.world.rank == 0:
            assert plan.config.checkpoint.save is not None
            clear_starts(Path(plan.config.checkpoint.save))
    finally:
        data.close()
        writers.close()


def be_deterministic() -> None:
    """Only kernels, and of NCCL only an algorithm, that give the same bits in every run; torch raises where it has no such kernel."""
    set_for_libraries(CUBLAS_WORKSPACE_CONFIG=":4096:8", NCCL_ALGO="Ring")
    torch.use_deterministic_algorithms(True)


def tracer_of(plan: RunPlan, device: torch.device) -> Tracer | None:
    """Actions are recorded where something is made of them: the measured bubble of a pipeline on CPUs, --timing-log-level 2, a profile."""
    if plan.config.logging.timing_log_level >= ACTION_LEVEL:
        return Tracer(settle=partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)
    wanted = plan.config.logging.profile_pipeline or (device.type == "cpu" and plan.topology.pp > 1)
    return Tracer() if wanted else None


def join(plan: RunPlan, environment: Environment) -> World:
    """Meet the other ranks over the backend the configuration asks for."""
    parallel = plan.config.parallel
    return start(
        environment,
        parallel.distributed_backend,
        60.0 * parallel.distributed_timeout_minutes,
        plan.config.training.device,
    )


def resume(runtime: TrainingRuntime, writers: Writers, starts: Starts | None = None) -> Resumed:
    """What to go on from: a checkpoint where --load holds one, or of a restarted job --save; else the beginning."""
    config = runtime.plan.config
    flags, remark = restart.flags_to_load_with(config.checkpoint, starts)
    if remark:
        writers.say(remark)
    if flags.load is None:
        return Resumed(TrainingState(), None if config.optimizer.lr is None else Schedules.of(config))
    started = time.perf_counter()
    resumed = persistence.load(runtime, Path(flags.load), flags)
    for remark in resumed.remarks:
        writers.say(remark)
    if resumed.path is not None:
        state = resumed.state
        seconds = time.perf_counter() - started
        writers.say(
            f"loaded {resumed.path} in {seconds:.1f} s: going on after step {state.step}, {state.consumed_samples:,} samples"
        )
    return resumed


def saves_of(
    runtime: TrainingRuntime, resumed: Resumed, config_text: str, tokenizer: Tokenizer | None, writers: Writers
) -> Saves | None:
    """What the loop saves with; None without --save. Cleans up after interrupted saves first."""
    config = runtime.plan.config
    if config.checkpoint.save is None:
        return None
    root = Path(config.checkpoint.save)
    for remark in persistence.prepare_save(
        root, resumed.state.step, runtime.groups.world, resumed.damaged, resumed.state.account.rollbacks
    ):
        writers.say(remark)
    beside = files_of(tokenizer) if tokenizer is not None and runtime.groups.world.rank == 0 else {}
    return Saves(runtime, resumed.schedules, root, config_text, beside, writers.say)

"""From a plan to a finished run on this rank: join the world, build, load, train, leave."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from megapipe.assembly.datasets import RunData, build_data
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.lock import SaveLock
from megapipe.checkpoint.starts import Starts, clear_starts
from megapipe.comm.bootstrap import World, join
from megapipe.comm.groups import ProcessGroups, build_process_groups, world_group
from megapipe.comm.trace import Tracer
from megapipe.data.fingerprint import fingerprint
from megapipe.environment import Environment
from megapipe.errors import CheckpointError
from megapipe.gpu.device_clock import ACTION_LEVEL
from megapipe.gpu.kernels import choose_kernels
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.monitor.process import available_cores
from megapipe.plan.report import plan_text
from megapipe.plan.run_plan import RunPlan
from megapipe.topology import GROUP_NAMES
from megapipe.train.compiled_blocks import choose_blocks
from megapipe.train.facts import facts_of, notes_of
from megapipe.train.gpu_setup import (
    check_compiler,
    check_deterministic,
    check_fp8,
    deterministic_algorithms,
    marks_of,
    prepare,
    unused,
    watched_memory,
)
from megapipe.train.guard import StopRequest, stop_requests
from megapipe.train.journal import Journal, recorded_folder
from megapipe.train.loading import Weights, count_this_start, flags_of_start, resume, save_lock, share_starts
from megapipe.train.loop import Training
from megapipe.train.metrics import Observer
from megapipe.train.saving import Saving, prepare_save
from megapipe.train.state import check_loaded, extension_lines, samples_to_take
from megapipe.train.watch import watched
from megapipe.version import __version__

AfterTraining = Callable[[TrainingRuntime, RunData, Journal], None]


class Job(NamedTuple):
    """The arguments of `pretrain`.

    config_text: the configuration as YAML that loads again, saved with every checkpoint. after_training: called on
    every rank after a run that reached its end. remarks: on the configuration, for the record of the run.
    weights: those of --load, if that is not a checkpoint of a run. observer: follows the run.
    """

    plan: RunPlan
    environment: Environment
    config_text: str
    after_training: AfterTraining | None = None
    remarks: Sequence[str] = ()
    weights: Weights | None = None
    observer: Observer = Observer()


def pretrain(job: Job) -> None:
    """Train as planned on this rank. The ranks' groups are still open afterwards."""
    # the lock comes before signals are caught, so that one ends the wait for it
    with deterministic_algorithms(job.plan.config), save_lock(job.plan.config, job.environment) as lock:
        _run(job, lock)


def _run(job: Job, lock: SaveLock | CheckpointError | None) -> None:
    """Join the other ranks and train. lock: of --save, or why rank 0 does not have it; then nothing is written."""
    plan, environment, config = job.plan, job.environment, job.plan.config
    is_refused = isinstance(lock, CheckpointError)
    journal = Journal(None if is_refused else recorded_folder(config), environment.global_rank)
    with journal.failures(), stop_requests(config.training.exit_signal_handler) as stop:
        nccl, said = prepare(plan, environment)  # before a library can start CUDA
        kernels = choose_kernels(config)  # fails, if a library is missing, before ranks wait for each other
        if not is_refused:
            journal.open_writers(config)
        check_loaded(config)
        counted = count_this_start(config, environment, lock)
        notes = notes_of(lock, flags_of_start(config, counted)) if environment.global_rank == 0 else {}
        world = join(config, environment, partial(facts_of, plan, environment), notes)
        check_deterministic(config, world.device)
        check_fp8(config, world.device)
        check_compiler(config, world.device)
        words = job.observer.on_kernels(plan, kernels, world.device, world.backend)
        if environment.global_rank == 0:
            described = _description(plan, world, environment.ranks_per_gpu)
            text = {"config": job.config_text, "plan": plan_text(plan), "remarks": list(job.remarks)}
            journal.record("start", **described, **text, kernels=list(words))
            journal.progress("kernels: " + "\n         ".join(words))
        journal.say(*extension_lines(), *said, *unused(config.gpu, world))
        heartbeat = Heartbeat(GROUP_NAMES) if config.parallel.hang_timeout_seconds else None
        everyone = world_group(world.world_size, world.global_rank, world.timeout_seconds, heartbeat=heartbeat)
        starts = share_starts(counted, config, everyone)  # before the watch writes to --save, which may be refused
        is_watched = watched(plan, environment, everyone, journal)
        with is_watched, watched_memory(plan, world.device, world.global_rank):
            groups = build_process_groups(
                plan.topology,
                world.global_rank,
                world.backend,
                world.timeout_seconds,
                heartbeat=heartbeat,
                nccl=nccl.options,
            )
            disk = Disk(may_change=lock.check) if isinstance(lock, SaveLock) else Disk()
            _train(job, groups, world.device, journal, stop, starts, disk)


def _train(
    job: Job,
    groups: ProcessGroups,
    device: torch.device,
    journal: Journal,
    stop: StopRequest,
    starts: Starts | None,
    disk: Disk,
) -> None:
    """Build, load, train. starts: of this job so far, None without --save. disk: for changes to --save."""
    plan, config, rank, observer = job.plan, job.plan.config, groups.world.global_rank, job.observer
    root = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    heartbeat = groups.world.heartbeat or Heartbeat(GROUP_NAMES)
    with heartbeat.phase("starting", PATIENCE):
        tracer = None
        if config.logging.timing_log_level >= ACTION_LEVEL:
            tracer = Tracer(settle=partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)
        elif config.logging.profile_pipeline or (device.type == "cpu" and plan.topology.pp > 1):
            tracer = Tracer()  # for the profile; for the measured bubble, on CPUs
        marks = marks_of(config.gpu, config.logging, rank)
        runtime = TrainingRuntime(plan, groups, device, tracer=tracer, marks=marks)
        data = build_data(plan)
        journal.say(*data.remarks)
    try:
        is_compared = rank == 0 and data.train is not None and (root is not None or config.checkpoint.load is not None)
        read = fingerprint(data.train.dataset) if is_compared and data.train is not None else None
        with heartbeat.phase("loading", PATIENCE):
            resumed = resume(runtime, journal, starts, read, job.weights, data.made_with)
            state = resumed.state
            if root is not None:
                journal.say(*prepare_save(root, state, groups.world, resumed.damaged, disk))
            kept = data.tokenizer, journal.say, read, disk, observer.on_save, data.made_with
            saving = Saving(runtime, resumed.schedules, root, job.config_text, *kept)
        with heartbeat.phase("compiling blocks", PATIENCE):
            state.compiles_blocks = choose_blocks(runtime, state.compiles_blocks, journal.say)
        if data.train is not None and not config.training.skip_train and state.step < config.training.train_iters:
            data.train.skip(state.account.skipped, samples_to_take(plan, state))
        result = Training(runtime, data, state, resumed.schedules, saving, journal, stop, observer).run()
        if job.after_training is not None and result.is_complete:
            with heartbeat.phase("after the training", PATIENCE):
                job.after_training(runtime, data, journal)
        journal.say(f"ended after step {state.step}: {result.reason}")
        journal.record("end", step=state.step, reason=result.reason, early=not result.is_complete)
        observer.on_end(result)
        if starts is not None and root is not None and result.is_complete and rank == 0:
            with suppress(CheckpointError):  # another run owns the directory
                disk.may_change()
                clear_starts(root)
    finally:
        data.close()
        journal.close()


def _description(plan: RunPlan, world: World, ranks_per_gpu: int) -> dict[str, Any]:
    """Describe the run for the first line of run.jsonl: process, versions, machine, grid."""
    t, is_gpu = plan.topology, world.device.type == "cuda"
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "command": sys.argv,
        "versions": {
            "megapipe": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "device": torch.cuda.get_device_name(world.device) if is_gpu else "CPU",
            "cores": available_cores(),
            "threads_per_rank": torch.get_num_threads(),
            "backend": world.backend,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "grid": {
            **{name: getattr(t, name) for name in ("world_size", "tp", "cp", "pp", "dp")},
            "chunks": plan.num_chunks,
            "order": t.order,
            "ranks_per_node": t.ranks_per_node,
            "ranks_per_gpu": ranks_per_gpu,
            "schedule": plan.schedule_name,
        },
    }

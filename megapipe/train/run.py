"""From a plan to a finished run on this rank: join the world, build, load, train, leave."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from megapipe.build.datasets import build_data
from megapipe.build.machines import Machines
from megapipe.comm.bootstrap import World, shutdown, start
from megapipe.comm.groups import build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.config.yaml_file import to_yaml
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.planner.run_plan import RunPlan
from megapipe.train import persistence
from megapipe.train.loop import Training
from megapipe.train.signals import stop_requests
from megapipe.train.state import TrainingState
from megapipe.train.writers import Writers, build_writers


def pretrain(plan: RunPlan, environment: Environment) -> int:
    """Train as planned on this rank. Ends the process when there are other ranks (comm.bootstrap.shutdown), else returns the exit code."""
    config = plan.config
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    writers = build_writers(config, logs_here=environment.global_rank == 0)
    with stop_requests(config.training.exit_signal_handler) as stop:
        world = join(plan, environment)
        tracer = Tracer() if world.device.type == "cpu" and plan.topology.pp > 1 else None
        groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
        machines = Machines(plan, groups, world.device, tracer=tracer)
        data = build_data(plan)
        try:
            state = load_state(machines, writers)
            root, text = config.checkpoint.save, to_yaml(config)
            save = None if root is None else lambda now: writers.say(str(persistence.save(machines, now, Path(root), text)))
            training = Training(machines, data, state, writers, stop, save)
            ending = training.run()
            writers.say(f"ended after step {state.step}: {ending.reason}")
        finally:
            data.close()
            writers.close()
    if world.world_size > 1:
        shutdown(0)
    return 0


def join(plan: RunPlan, environment: Environment) -> World:
    """Meet the other ranks over the backend the configuration asks for."""
    parallel = plan.config.parallel
    return start(environment, parallel.distributed_backend, 60.0 * parallel.distributed_timeout_minutes, plan.config.training.device)


def load_state(machines: Machines, writers: Writers) -> TrainingState:
    """The state to go on from: a checkpoint's where --load holds one, else the beginning."""
    checkpoint = machines.plan.config.checkpoint
    if checkpoint.load is None:
        return TrainingState()
    started = time.perf_counter()
    state = persistence.load(machines, Path(checkpoint.load))
    if state is None:
        if checkpoint.exit_on_missing_checkpoint:
            raise ConfigError(f"--load {checkpoint.load} holds no complete checkpoint, and --exit-on-missing-checkpoint is set")
        writers.say(f"{checkpoint.load} holds no checkpoint yet: starting from the beginning")
        return TrainingState()
    writers.say(f"going on after step {state.step} ({state.consumed_samples:,} samples), loaded in {time.perf_counter() - started:.1f} s")
    return state

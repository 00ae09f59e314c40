"""`verify`: the request `--verify-grid`, from the plan to the exit code."""

from __future__ import annotations

import torch

from megapipe.assembly.precision import parameter_dtype
from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.config.flags import VERIFY_MODES
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.verify.batches import random_batches
from megapipe.extras.verify.parity import ParityStep, compare_with_oracle
from megapipe.extras.verify.report import found_text, plan_text
from megapipe.extras.verify.shrink import Shrunk, shrink
from megapipe.extras.verify.tolerance import tolerance_of
from megapipe.extras.verify.weights import drawn_slices
from megapipe.plan.run_plan import RunPlan
from megapipe.train.run import join
from megapipe.train.schedules import Schedules

DIFFERS = 1  # exit code


def verify(plan: RunPlan, environment: Environment, mode: str) -> int:
    """Train the plan, shrunk, on this rank's grid and in one process, and print what differs. Exit code 0 if nothing does, else 1.

    mode: 'fp64', or 'native' for the configuration's dtype. Ends the process when there are other ranks, as training does.
    Raises ConfigError for another mode.
    """
    if mode not in VERIFY_MODES:
        raise ConfigError(f"--verify-grid {mode}: use {' or '.join(VERIFY_MODES)}")
    world = join(plan, environment)
    small = shrink(plan, mode, environment.world_size, environment.local_world_size, world.device.type == "cuda")
    groups = build_process_groups(small.plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    if world.global_rank == 0:
        print(plan_text(small), flush=True)
    steps = verified_steps(small, groups, world.device)
    if world.global_rank == 0:
        print(found_text(small, steps), flush=True)
    barrier(groups.world)  # a rank that leaves with an error ends the others: first the report
    code = 0 if all(step.passes for step in steps) else DIFFERS
    if world.world_size > 1:
        shutdown(code)
    return code


def verified_steps(small: Shrunk, groups: ProcessGroups, device: torch.device) -> list[ParityStep]:
    """The comparison itself; the same result on every rank."""
    plan, config = small.plan, small.plan.config
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    batches = random_batches(config, plan.topology.dp, small.num_microbatches, config.training.seed)
    schedules, samples = Schedules.of(config), 0
    rates = []
    for batch in batches:
        rates.append(schedules.rates(samples))
        samples += len(batch) * config.training.micro_batch_size
    slices = drawn_slices(config.training.seed, parameter_dtype(config.precision.dtype))
    return compare_with_oracle(plan, groups, device, slices, batches, rates, tolerance_of(config))

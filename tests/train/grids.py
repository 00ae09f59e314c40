"""Trains a configuration on the ranks of the test harness, through the same build and step functions as pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megapipe.assembly.machines import Machines
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.comm.groups import build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.config.config import Config
from megapipe.data.batch import Batch, DocumentRules
from megapipe.plan.resolve import resolve
from megapipe.sharding.spec import ParamSpec
from megapipe.train.step import TrainStep


def local_slice(whole: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
    """This tp_rank's part of a whole tensor whose vocabulary padding may be missing."""
    if whole.shape[0] < spec.shape[0]:
        whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
    rows = torch.cat([torch.arange(i.start, i.stop) for i in spec.intervals(tp_rank, tp)])
    return whole.index_select(spec.slicing.dim or 0, rows)


def machines_of(
    config: Config,
    rank: int,
    world_size: int,
    weights: Mapping[str, Tensor] | None = None,
    tracer: Tracer | None = None,
) -> Machines:
    """This rank's machines on gloo. weights: whole tensors by name instead of drawn ones."""
    plan = resolve(config, world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", 60, tracer)
    draw: Callable[[ParamSpec, int, int], Tensor] | None = None
    if weights is not None:
        draw = lambda spec, tp_rank, tp: local_slice(weights[spec.name], spec, tp_rank, tp)  # noqa: E731
    return Machines(plan, groups, torch.device("cpu"), draw, tracer)


def step_microbatches(
    machines: Machines, rows: np.ndarray, step: int, rules: DocumentRules | None = None
) -> Microbatches:
    """The microbatches of this rank for a global batch of rows [global batch, seq + 1]."""
    training = machines.plan.config.training
    micro, dp, dp_rank = training.micro_batch_size, machines.plan.topology.dp, machines.coordinates.dp_rank

    def read(k: int) -> Batch:
        first = (k * dp + dp_rank) * micro
        return Batch.of(rows[first : first + micro], tuple(range(first, first + micro)), rules or DocumentRules())

    return Microbatches(len(rows) // (micro * dp), read, Keys(training.seed, step, dp_rank, dp), machines.device)


def trainer(machines: Machines) -> TrainStep:
    return TrainStep(machines)


def whole_parameters(machines: Machines) -> Sequence[tuple[str, Tensor]]:
    """(name, local tensor) of every parameter on this rank."""
    machines.gather.finish()
    return [(name, buffers.parameter(name)) for buffers in machines.buffers.values() for name in buffers.names]

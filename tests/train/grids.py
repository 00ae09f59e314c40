"""Helpers that train a configuration on the ranks of the test harness.

They use the same build and step functions as pretrain_gpt.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megapipe.assembly.microbatches import Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.config.config import Config
from megapipe.data.batch import Batch, DocumentRules
from megapipe.plan.resolve import resolve
from megapipe.sharding.spec import ParamSpec
from megapipe.train.step import TrainStep


def local_slice(whole: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
    """Return this tp rank's slice of a whole tensor whose vocabulary padding may be missing."""
    if whole.shape[0] < spec.shape[0]:
        whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
    rows = torch.cat([torch.arange(i.start, i.stop) for i in spec.intervals(tp_rank, tp)])
    return whole.index_select(spec.slicing.dim or 0, rows)


def runtime_of(
    config: Config,
    rank: int,
    world_size: int,
    weights: Mapping[str, Tensor] | None = None,
    tracer: Tracer | None = None,
) -> TrainingRuntime:
    """Build this rank's runtime on gloo, from `weights` (whole tensors by name) if given, else freshly initialized."""
    plan = resolve(config, world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", 60, tracer)
    draw: Callable[[ParamSpec, int, int], Tensor] | None = None
    if weights is not None:
        draw = lambda spec, tp_rank, tp: local_slice(weights[spec.name], spec, tp_rank, tp)  # noqa: E731
    return TrainingRuntime(plan, groups, torch.device("cpu"), draw, tracer)


def step_microbatches(
    runtime: TrainingRuntime, rows: np.ndarray, step: int, rules: DocumentRules | None = None
) -> Microbatches:
    """Return this rank's microbatches of a global batch of rows [global batch, seq + 1]."""
    training = runtime.plan.config.training
    micro, dp, dp_rank = training.micro_batch_size, runtime.plan.topology.dp, runtime.coordinates.dp_rank

    def read(k: int) -> Batch:
        first = (k * dp + dp_rank) * micro
        return Batch.of(rows[first : first + micro], tuple(range(first, first + micro)), rules or DocumentRules())

    return runtime.microbatches(len(rows) // (micro * dp), read, step)


def trainer(runtime: TrainingRuntime) -> TrainStep:
    return TrainStep(runtime)


def whole_parameters(runtime: TrainingRuntime) -> Sequence[tuple[str, Tensor]]:
    """Return (name, local tensor) of every parameter on this rank."""
    runtime.stores.finish_weights()
    return [(name, buffers.parameter(name)) for buffers in runtime.buffers.values() for name in buffers.names]

"""Shared by the tests of saving and resuming: tiny runs on any grid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.save import SaveReport
from megapipe.checkpoint.shard import tensor_box
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.config.yaml_file import to_yaml
from megapipe.plan.resolve import resolve
from megapipe.sharding.boxes import Piece, pieces
from megapipe.sharding.buffers import Slot
from megapipe.train.saving import Saving
from megapipe.train.state import Schedules, TrainingState
from tests.tiny import tiny_config

# dropout, so that a resumed run must draw the same masks; a vocabulary that needs padding
FOUR_LAYERS: dict[str, Any] = {
    "num_layers": 4,
    "kv_channels": None,
    "vocab_size": 29,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-2,
    "device": "auto",
    "distributed_backend": "auto",
}


def tiny(**changes: Any) -> Config:
    """Build the configuration of a four-layer model with a padded vocabulary."""
    return tiny_config(**FOUR_LAYERS | {"save": "given apart", "load": "given apart"} | changes)


def runtime_of(rank: int, world_size: int, **changes: Any) -> TrainingRuntime:
    plan = resolve(tiny(**changes), world_size)
    return TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))


def scramble(runtime: TrainingRuntime, salt: int = 0) -> None:
    """Fill masters and moments with values that depend only on the global element, as in the state of a trained run."""
    for held in runtime.optimizer.state():
        held.values.copy_(
            expected(held.key, held.piece.spec.name, held.piece.spec.shape, salt)[held.piece.box.slices].reshape(-1)
        )
    runtime.optimizer.masters_to_parameters()
    runtime.stores.finish_weights()


def expected(key: str, name: str, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Return the whole fp32 tensor that `scramble` gives to a parameter."""
    # one random stream per row: vocabulary rows are the same on every grid, padding rows differ
    seed = salt * 7919 + sum(map(ord, f"{key}/{name}"))
    rows = [
        torch.randn(shape[1:], generator=torch.Generator().manual_seed(seed * 1009 + row)) for row in range(shape[0])
    ]
    return torch.stack(rows)


def differences(runtime: TrainingRuntime, keys: tuple[str, ...], salt: int = 0) -> list[str]:
    """Return the masters, moments and parameters that differ from those of `scramble`, ignoring vocabulary padding."""
    runtime.stores.finish_weights()
    found = []
    for held in runtime.optimizer.state():
        if held.key in keys:
            whole = expected(held.key, held.piece.spec.name, held.piece.spec.shape, salt)
            found += _unequal(held.key, held.piece.spec.true_rows, held.piece.box, whole, held.values)
    for _, values, slot, piece in _parameter_pieces(runtime):
        whole = expected("master", slot.spec.name, slot.spec.shape, salt).to(values.dtype)
        found += _unequal(f"parameter {slot.spec.name}", slot.spec.true_rows, piece.box, whole, values)
    return found


def _parameter_pieces(runtime: TrainingRuntime) -> Iterator[tuple[int, Tensor, Slot, Piece]]:
    """Yield (stage, values, slot, piece) of this rank's whole parameters, gathered stage by stage where sharded."""
    for stage, buffers in runtime.buffers.items():
        with runtime.stores.whole([stage]):
            for buffer, slot in buffers.slots.values():
                for piece in pieces(slot.spec, runtime.coordinates.tp_rank, runtime.plan.topology.tp):
                    yield stage, buffer.parameters[slot.start + piece.start : slot.start + piece.stop], slot, piece


def _unequal(what: str, true_rows: int | None, box: Any, whole: Tensor, values: Tensor) -> list[str]:
    rows = box.shape[0] if true_rows is None else min(max(true_rows - box.offset[0], 0), box.shape[0])
    here, there = values.view(box.shape)[:rows], whole[box.slices][:rows]
    return [] if torch.equal(here, there) else [f"{what} {box}"]


def state_of(runtime: TrainingRuntime) -> dict[str, Tensor]:
    """Return a copy of this rank's state without vocabulary padding, which is not saved."""
    runtime.stores.finish_weights()
    found = {}
    for held in runtime.optimizer.state():
        box = tensor_box(held.key, held.piece, held.values)
        if box is not None:
            found[f"{box.name} {box.box} of stage {held.stage}"] = box.values.clone()
    for stage, values, _, piece in _parameter_pieces(runtime):
        box = tensor_box("parameter", piece, values)
        if box is not None:
            found[f"{box.name} {box.box} of stage {stage}"] = box.values.clone()
    return found


def save(runtime: TrainingRuntime, state: TrainingState, schedules: Schedules, root: Path) -> SaveReport:
    """Save a run as --save does; called by all ranks."""
    return Saving(runtime, schedules, root, to_yaml(runtime.plan.config), None, print).write(state)

"""Weights as a legacy `torch` checkpoint of Megatron-Core for any tp and pp that fit; a rank's weights are in memory at a time."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk, NewFile
from megapipe.errors import ConfigError
from megapipe.extras.convert.megatron_legacy import MODEL_FILE, TRACKER
from megapipe.extras.convert.megatron_ranks import FUSED_NORMS, HEAD, cut
from megapipe.extras.convert.megatron_settings import write_args
from megapipe.extras.convert.new_folder import new_folder
from megapipe.extras.convert.snapshot import Snapshot
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters, stage_parameters
from megapipe.plan.resolve import resolve_model
from megapipe.sharding.spec import ParamSpec

CHECKPOINT_VERSION = 3.0  # of Megatron's format, since q, k and v are interleaved by query group
EMPTY_STATE = (
    "self_attention.core_attention",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What ranks to write for. transformer_engine: names as its layers have them, instead of those of --transformer-impl local."""

    tp: int = 1
    pp: int = 1
    transformer_engine: bool = True


def write(snapshot: Snapshot, root: Path, grid: Grid) -> Path:
    """A new directory to --load --finetune in Megatron, complete or not there; returns the iteration's folder.

    Raises ConfigError for a grid that does not fit or a model that Megatron's args cannot express, CheckpointError if root is there.
    """
    config = snapshot.config
    model = resolve_model(dataclasses.replace(config.model, padded_vocab_size=None), grid.tp)
    if model.num_layers % grid.pp:
        raise ConfigError(
            f"--pipeline-model-parallel-size {grid.pp} does not divide the {model.num_layers} layers of the model"
        )
    if model.query_groups() % grid.tp:
        raise ConfigError(
            f"--tensor-model-parallel-size {grid.tp} does not divide {model.query_groups()} query groups, as Megatron needs"
        )
    assert model.padded_vocab_size is not None
    args = write_args(config, snapshot.state, model.padded_vocab_size, grid.tp, grid.pp)
    args["transformer_impl"] = "transformer_engine" if grid.transformer_engine else "local"
    folder = f"iter_{snapshot.step:07d}"
    with new_folder(root) as (disk, temporary):
        _write_ranks(disk, temporary / folder, snapshot, model_parameters(model, sequence_parallel=False), args, grid)
        disk.write_file(temporary / TRACKER, str(snapshot.step).encode())
    return root / folder


class _Stream:
    """A new file as torch.save wants one; leaving the file's `with` block flushes and syncs it."""

    def __init__(self, file: NewFile) -> None:
        self.write = file.write

    def flush(self) -> None:
        pass


def _write_ranks(
    disk: Disk, folder: Path, snapshot: Snapshot, specs: tuple[ParamSpec, ...], args: dict[str, Any], grid: Grid
) -> None:
    per_stage = args["num_layers"] // grid.pp
    for pp_rank in range(grid.pp):
        layers = range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
        held = stage_parameters(specs, layers, pp_rank == 0, pp_rank == grid.pp - 1)
        for tp_rank in range(grid.tp):
            weights = _weights(snapshot, held, layers.start, tp_rank, grid)
            content = {
                "args": argparse.Namespace(**args),
                "checkpoint_version": CHECKPOINT_VERSION,
                "iteration": snapshot.step,
                "model": weights,
            }
            name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if grid.pp > 1 else "")
            disk.make_folder(folder / name)
            with disk.create(folder / name / MODEL_FILE) as file:
                torch.save(content, cast(IO[bytes], _Stream(file)))
            del weights, content


def _weights(
    snapshot: Snapshot, specs: tuple[ParamSpec, ...], first_layer: int, tp_rank: int, grid: Grid
) -> dict[str, Tensor | None]:
    """One rank's tensors by Megatron's names, layers numbered from 0."""
    whole = snapshot.weights
    found: dict[str, Tensor | None] = {}
    has_embedding = first_layer == 0
    for spec in specs:
        name = spec.name
        if isinstance(spec.owner, int):
            name = name.replace(f"layers.{spec.owner}.", f"layers.{spec.owner - first_layer}.", 1)
            if grid.transformer_engine:
                name = _fused_norm(name)
        elif name == WORD_EMBEDDING and not has_embedding:
            name = HEAD  # the last stage's copy of a tied embedding
        found[name] = cut(spec, whole[spec.name].detach(), tp_rank, grid.tp)
    if grid.transformer_engine:
        numbers = {spec.owner - first_layer for spec in specs if isinstance(spec.owner, int)}
        found |= {
            f"decoder.layers.{number}.{module}._extra_state": None
            for number in sorted(numbers)
            for module in EMPTY_STATE
        }
    return found


def _fused_norm(name: str) -> str:
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(plain, fused)
    return name

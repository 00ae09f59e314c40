"""Weights as a legacy `torch` checkpoint of Megatron-Core for a given tp and pp, one rank's weights in memory at a
time.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from megapipe.checkpoint.disk import NewFile
from megapipe.errors import ConfigError
from megapipe.extras.convert.megatron_legacy import EXTRA_STATE, FUSED_NORMS, MODEL_FILE, TRACKER
from megapipe.extras.convert.megatron_optimizer import HEAD
from megapipe.extras.convert.megatron_settings import write_args
from megapipe.extras.convert.snapshot import Snapshot, new_folder
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters, stage_parameters
from megapipe.plan.resolve import resolve_model
from megapipe.sharding.spec import ParamSpec

CHECKPOINT_VERSION = 3.0  # of Megatron's format, since q, k and v are interleaved by query group
EXTRA_STATE_MODULES = (
    "self_attention.core_attention",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True)
class Grid:
    """The ranks to write for. transformer_engine: use its names of norms instead of those of --transformer-impl
    local.
    """

    tp: int = 1
    pp: int = 1
    transformer_engine: bool = True


def write(snapshot: Snapshot, root: Path, grid: Grid) -> Path:
    """Write a new directory atomically, to --load --finetune in Megatron. Returns the iteration's folder.

    Raises ConfigError for an unsuitable grid or a model that Megatron's args cannot express, CheckpointError if root
    exists.
    """
    model = resolve_model(dataclasses.replace(snapshot.config.model, padded_vocab_size=None), grid.tp)
    if model.num_layers % grid.pp:
        raise ConfigError(
            f"--pipeline-model-parallel-size {grid.pp} does not divide the {model.num_layers} layers of the model"
        )
    if model.query_groups() % grid.tp:
        raise ConfigError(
            f"--tensor-model-parallel-size {grid.tp} does not divide {model.query_groups()} query groups, as Megatron "
            "requires"
        )
    args = write_args(snapshot.config, snapshot.state, model.padded_vocab_size, grid.tp, grid.pp)
    args["transformer_impl"] = "transformer_engine" if grid.transformer_engine else "local"
    specs = model_parameters(model, sequence_parallel=False)
    per_stage = model.num_layers // grid.pp
    folder = f"iter_{snapshot.step:07d}"
    with new_folder(root) as (disk, temporary):
        for pp_rank in range(grid.pp):
            layers = range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
            held = stage_parameters(specs, layers, pp_rank == 0, pp_rank == grid.pp - 1)
            for tp_rank in range(grid.tp):
                content = {
                    "args": argparse.Namespace(**args),
                    "checkpoint_version": CHECKPOINT_VERSION,
                    "iteration": snapshot.step,
                    "model": _weights(snapshot, held, layers.start, tp_rank, grid),
                }
                name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if grid.pp > 1 else "")
                disk.make_folder(temporary / folder / name)
                with disk.create(temporary / folder / name / MODEL_FILE) as file:
                    torch.save(content, cast(IO[bytes], _Stream(file)))
                del content  # before the next rank's weights are read
        disk.write_file(temporary / TRACKER, str(snapshot.step).encode())
    return root / folder


class _Stream:
    """The interface that torch.save needs of a file; leaving the file's `with` block flushes and syncs it."""

    def __init__(self, file: NewFile) -> None:
        self.write = file.write

    def flush(self) -> None:
        pass


def _weights(
    snapshot: Snapshot, specs: tuple[ParamSpec, ...], first_layer: int, tp_rank: int, grid: Grid
) -> dict[str, Tensor | None]:
    """Return one rank's tensors under Megatron's names, with layers numbered from 0."""
    whole = snapshot.weights
    found: dict[str, Tensor | None] = {}
    for spec in specs:
        name = spec.name
        if isinstance(spec.owner, int):
            name = name.replace(f"layers.{spec.owner}.", f"layers.{spec.owner - first_layer}.", 1)
            if grid.transformer_engine:
                for fused, plain in FUSED_NORMS.items():
                    name = name.replace(plain, fused)
        elif name == WORD_EMBEDDING and first_layer > 0:
            name = HEAD  # the last stage's copy of a tied embedding
        found[name] = cut(spec, whole[spec.name].detach(), tp_rank, grid.tp)
    if grid.transformer_engine:
        layers = {spec.owner - first_layer for spec in specs if isinstance(spec.owner, int)}
        for layer in sorted(layers):
            for module in EXTRA_STATE_MODULES:
                found[f"decoder.layers.{layer}.{module}.{EXTRA_STATE}"] = None
    return found


def cut(spec: ParamSpec, whole: Tensor, tp_rank: int, tp: int) -> Tensor:
    """Return a tp rank's slice of a whole tensor, with vocabulary padding added as zeros."""
    if whole.shape[0] < spec.shape[0]:
        whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
    dim = spec.slicing.dim or 0
    return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)

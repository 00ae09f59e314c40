"""Megatron's legacy `torch` checkpoints, iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt, of any tp, pp and virtual pp."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.extras.convert.megatron_optimizer import MASTER, MOMENTS, OptimizerState, read_distributed, read_plain
from megapipe.extras.convert.megatron_ranks import NOT_WEIGHTS, WEIGHTS, Chunk, Ranks
from megapipe.extras.convert.megatron_run import run_snapshot
from megapipe.extras.convert.megatron_settings import read_config
from megapipe.extras.convert.pickled import load_pickled
from megapipe.extras.convert.snapshot import Snapshot

TRACKER, MODEL_FILE, OPTIMIZER_FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt", "distrib_optim.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")


def iteration_folder(root: Path, step: int | None) -> Path:
    """The folder of an iteration: root itself, the one asked for, or the one that the tracker file names. Raises CheckpointError."""
    if step is None and not (root / TRACKER).exists():
        return root
    if step is None:
        text = (root / TRACKER).read_text().strip()
        folder = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    else:
        folder = root / f"iter_{step:07d}"
    if not folder.is_dir():
        raise CheckpointError(f"{root} has no {folder.name}")
    return folder


def looks_legacy(root: Path) -> bool:
    """Some rank's folder is there."""
    return any(root.glob(f"mp_rank_*/{MODEL_FILE}")) or any(root.glob(f"*/mp_rank_*/{MODEL_FILE}"))


def read(root: Path, step: int | None = None, vocab_size: int | None = None, weights_only: bool = False) -> Snapshot:
    """A run of Megatron as a Snapshot: with optimizer state where there is some, unless weights_only.

    Raises ConfigError, CheckpointError.
    """
    folders = _rank_folders(iteration_folder(root, step))
    contents = {place: load_pickled(path / MODEL_FILE) for place, path in folders.items()}
    first = contents[0, 0]
    if "args" not in first:
        raise CheckpointError(f"{folders[0, 0] / MODEL_FILE} holds no args, so that nothing says what the model is")
    args = vars(first["args"])
    models = {place: _models(folders[place], content) for place, content in contents.items()}
    states: dict[tuple[int, int], OptimizerState] = {}
    if not weights_only and "optimizer" in first:
        states = {place: _optimizer(folders[place], content, models[place]) for place, content in contents.items()}
    ranks = Ranks(_stages(folders, models, states))
    keys = {MASTER: MASTER if MASTER in ranks.chunks[0][0].tensors else WEIGHTS}
    keys |= {key: key for key in MOMENTS} if states else {}
    config = read_config(args, vocab_size)
    tensors = ranks.whole(config.model, int(args["padded_vocab_size"]), keys)
    return run_snapshot(config, tensors, args, first, states.get((0, 0)))


def _stages(
    folders: Mapping[tuple[int, int], Path],
    models: Mapping[tuple[int, int], list[dict[str, Tensor]]],
    states: Mapping[tuple[int, int], OptimizerState],
) -> list[list[Chunk]]:
    """The chunks of all ranks by stage and tp_rank."""
    tp, pp = 1 + max(tp for _, tp in folders), 1 + max(pp for pp, _ in folders)
    num_chunks = len(models[0, 0])
    stages: list[list[Chunk]] = [[] for _ in range(pp * num_chunks)]
    for place in sorted(folders):
        for number, weights in enumerate(models[place][:num_chunks]):
            tensors: dict[str, Mapping[str, Tensor]] = {WEIGHTS: weights}
            tensors |= states[place].tensors[number] if place in states else {}
            stages[number * pp + place[0]].append(Chunk(folders[place] / MODEL_FILE, tensors))
    if any(len(members) != tp for members in stages):
        counts = [len(members) for members in stages]
        raise CheckpointError(
            f"{folders[0, 0].parent} holds {counts} tensor-parallel ranks of its stages, not {tp} of each"
        )
    return stages


def _rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """(pp_rank, tp_rank) -> folder."""
    found: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        match = RANK.fullmatch(path.name)
        if match and (path / MODEL_FILE).exists():
            if match[3]:
                raise CheckpointError(f"{path}: a mixture of experts (a third number in the name) cannot be expressed")
            found[int(match[2] or 0), int(match[1])] = path
    if (0, 0) not in found:
        raise CheckpointError(f"{folder} holds no mp_rank_00[_000]/{MODEL_FILE}")
    return found


def _models(path: Path, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Weights of each chunk by name, in the model's order."""
    if "model" in content:
        models = [content["model"]]
    else:
        models = [
            content[name]
            for name in sorted(
                (key for key in content if re.fullmatch(r"model\d+", str(key))), key=lambda n: int(n[5:])
            )
        ]
    if not models:
        raise CheckpointError(f"{path / MODEL_FILE} holds no model")
    if any("language_model" in model for model in models):
        raise CheckpointError(
            f"{path / MODEL_FILE} was written by a model older than Megatron-Core; load and save it with --use-mcore-models"
        )
    return [{name: tensor for name, tensor in model.items() if not name.endswith(NOT_WEIGHTS)} for model in models]


def _optimizer(path: Path, content: Mapping[str, Any], models: list[dict[str, Tensor]]) -> OptimizerState:
    optimizer = content.get("optimizer")
    if not isinstance(optimizer, dict):
        raise CheckpointError(
            f"{path / MODEL_FILE}: the optimizer is a chain of several, which cannot be converted; convert with --weights-only"
        )
    if (path / OPTIMIZER_FILE).exists():
        return read_distributed(path / OPTIMIZER_FILE, optimizer, load_pickled(path / OPTIMIZER_FILE), models)
    if "param_groups" not in optimizer and "state" not in optimizer.get("optimizer", {}):
        raise CheckpointError(
            f"{path} holds the groups of a distributed optimizer without its {OPTIMIZER_FILE}; convert with --weights-only"
        )
    return read_plain(path / MODEL_FILE, optimizer, models)

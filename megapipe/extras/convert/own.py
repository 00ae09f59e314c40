"""megapipe's checkpoints as Snapshots: read from any grid, written by one process."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megapipe.checkpoint.configuration import saved_config
from megapipe.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder, find_checkpoint, folder_name, open_folder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.manifest import MANIFEST_NAME, SavedTensor
from megapipe.checkpoint.rollbacks import account_of, read_rollbacks
from megapipe.checkpoint.save import Extras, SaveReport, save_checkpoint
from megapipe.checkpoint.shard import DTYPES
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.comm.groups import Group
from megapipe.config.config import Config
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.extras.convert.inert_settings import INERT
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot
from megapipe.sharding.boxes import Box

HUGGING_FACE_CONFIG = "config.json"  # among the tokenizer's files: settings that came with the model
# tokenizer files -> (--tokenizer-type, the file --tokenizer-model names, '' for the folder)
TOKENIZERS = {
    ("tokenizer.json",): ("HuggingFaceTokenizer", ""),
    ("tokenizer.model",): ("Llama2Tokenizer", "tokenizer.model"),
    ("vocab.json", "merges.txt"): ("GPT2BPETokenizer", ""),
}


def open_checkpoint(path: Path, step: int | None = None) -> CheckpointFolder:
    """path: a directory given to --save, or the folder of one step. Raises CheckpointError."""
    if step is None and (path / MANIFEST_NAME).exists():
        return open_folder(path)
    found = find_checkpoint(path, step)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint of megapipe")
    return found


def read(path: Path, step: int | None = None) -> Snapshot:
    """The newest complete checkpoint, or that of a step. Raises CheckpointError."""
    folder = open_checkpoint(path, step)
    keys = {"weights": "master"}  # weights saved without an optimizer are the best masters there are
    tensors = {}
    for name, saved in folder.manifest.tensors.items():
        key, parameter = name.split("/", 1)
        tensors[f"{keys.get(key, key)}/{parameter}"] = LazyTensor(
            saved.shape, DTYPES[saved.dtype], partial(_read, folder, name, saved)
        )
    config, state = saved_config(folder), folder.manifest.state
    account = account_of(state, read_rollbacks(folder.path.parent))
    if account is not None:
        state = state | {"account": account}
    tokenizer = folder.path / TOKENIZER_NAME
    return Snapshot(
        config, tensors, state, files_in(tokenizer), extra_settings(tokenizer / HUGGING_FACE_CONFIG), folder.remarks
    )


def write(snapshot: Snapshot, root: Path) -> SaveReport:
    """A checkpoint that any grid loads; `--load root`. Raises CheckpointError."""
    if find_step(root, snapshot.step):
        raise CheckpointError(f"{root / folder_name(snapshot.step)} is there already; converting never overwrites")
    boxes = [
        TensorBox(name, tensor.shape, Box((0,) * len(tensor.shape), tensor.shape), cast(Tensor, tensor))
        for name, tensor in snapshot.tensors.items()
    ]
    state = json.loads(json.dumps(snapshot.state))
    tokenizer = {path.name: path.read_bytes() for path in snapshot.files}
    config = _with_tokenizer(
        snapshot.config, set(tokenizer), root.resolve() / folder_name(snapshot.step) / TOKENIZER_NAME
    )
    return save_checkpoint(root, snapshot.step, boxes, Extras(state, to_yaml(config), tokenizer), Group.alone("world"))


def find_step(root: Path, step: int) -> bool:
    return (root / folder_name(step)).exists()


def _with_tokenizer(config: Config, names: set[str], folder: Path) -> Config:
    for needed, (kind, file) in TOKENIZERS.items():
        if names.issuperset(needed):
            data = dataclasses.replace(config.data, tokenizer_type=kind, tokenizer_model=str(folder / file))
            return dataclasses.replace(config, data=data)
    return config


def _read(folder: CheckpointFolder, name: str, saved: SavedTensor) -> Tensor:
    values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
    load_tensors(
        folder,
        [TensorBox(name, saved.shape, Box((0,) * len(saved.shape), saved.shape), values.view(-1))],
        Group.alone("world"),
    )
    return values


def files_in(folder: Path) -> tuple[Path, ...]:
    """The files of a folder by name; none if there is no such folder."""
    return tuple(sorted(path for path in folder.iterdir() if path.is_file())) if folder.is_dir() else ()


def extra_settings(path: Path) -> dict[str, Any]:
    """What a config.json among the tokenizer's files says that means nothing to the model; nothing if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in content.items() if key in INERT} if isinstance(content, dict) else {}

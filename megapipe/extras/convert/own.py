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
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.extras.convert.settings import INERT
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot
from megapipe.sharding.boxes import Box

HUGGING_FACE_CONFIG = "config.json"  # among the tokenizer's files: settings that came with the model
# tokenizer files -> (--tokenizer-type, the file for --tokenizer-model, '' for the folder)
TOKENIZERS = {
    ("tokenizer.json",): ("HuggingFaceTokenizer", ""),
    ("tokenizer.model",): ("Llama2Tokenizer", "tokenizer.model"),
    ("vocab.json", "merges.txt"): ("GPT2BPETokenizer", ""),
}


def read(path: Path, step: int | None = None) -> Snapshot:
    """Read a checkpoint: of a step, or the newest complete one. Raises CheckpointError.

    path: a directory given to --save, or the folder of one step.
    """
    if step is None and (path / MANIFEST_NAME).exists():
        folder = open_folder(path)
    else:
        found = find_checkpoint(path, step)
        if found is None:
            raise CheckpointError(f"{path} holds no megapipe checkpoint")
        folder = found
    tensors = {}
    for name, saved in folder.manifest.tensors.items():
        key, parameter = name.split("/", 1)
        key = "master" if key == "weights" else key  # weights saved without masters are the best masters available
        reader = partial(_read_tensor, folder, name, saved)
        tensors[f"{key}/{parameter}"] = LazyTensor(saved.shape, DTYPES[saved.dtype], reader)
    state = folder.manifest.state
    account = account_of(state, read_rollbacks(folder.path.parent))
    if account is not None:
        state = state | {"account": account}
    files, settings = tokenizer_files(folder.path)
    return Snapshot(saved_config(folder), tensors, state, files, settings, folder.remarks)


def _read_tensor(folder: CheckpointFolder, name: str, saved: SavedTensor) -> Tensor:
    values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
    box = Box((0,) * len(saved.shape), saved.shape)
    load_tensors(folder, [TensorBox(name, saved.shape, box, values.view(-1))], Group.alone("world"))
    return values


def tokenizer_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, Any]]:
    """Return the tokenizer files of a checkpoint and the inert settings of a config.json among them, if it is valid."""
    tokenizer = folder / TOKENIZER_NAME
    files = tuple(sorted(path for path in tokenizer.iterdir() if path.is_file())) if tokenizer.is_dir() else ()
    try:
        content = json.loads((tokenizer / HUGGING_FACE_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return files, {}
    is_object = isinstance(content, dict)
    return files, {key: value for key, value in content.items() if key in INERT} if is_object else {}


def write(snapshot: Snapshot, root: Path) -> SaveReport:
    """Write a checkpoint for `--load root` with any grid. Raises CheckpointError."""
    folder = root / folder_name(snapshot.step)
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; converting never overwrites")
    boxes = [
        TensorBox(name, tensor.shape, Box((0,) * len(tensor.shape), tensor.shape), cast(Tensor, tensor))
        for name, tensor in snapshot.tensors.items()
    ]
    state = json.loads(json.dumps(snapshot.state))
    tokenizer = {path.name: path.read_bytes() for path in snapshot.files}
    config = snapshot.config
    for needed, (kind, file) in TOKENIZERS.items():
        if tokenizer.keys() >= set(needed):
            model = str(root.resolve() / folder.name / TOKENIZER_NAME / file)
            data = dataclasses.replace(config.data, tokenizer_type=kind, tokenizer_model=model)
            config = dataclasses.replace(config, data=data)
            break
    return save_checkpoint(root, snapshot.step, boxes, Extras(state, to_yaml(config), tokenizer), Group.alone("world"))

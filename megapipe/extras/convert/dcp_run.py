"""Runs saved by torch.distributed.checkpoint: the state dict {model, optimizer, train_state}, sharded by any ranks.

Weights are `model.<parameter>`, Adam's state `optimizer.state.<parameter>.{exp_avg, exp_avg_sq, step}`, as in
torch.distributed.checkpoint.state_dict; the position is `train_state.*`. Parameter groups are not written: megapipe
sets learning rate and weight decay of every step from its schedules, which are in `train_state.schedules`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.folder import CONFIG_NAME, TOKENIZER_NAME, read_config
from megapipe.config.config import Config
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.megatron import COMMON, HEAD
from megapipe.extras.convert.pickled import METADATA, StoredValue, read_folder
from megapipe.extras.convert.snapshot import (
    LazyTensor,
    Snapshot,
    check_nothing_left,
    check_tied,
    fresh_state,
    new_folder,
    one_step,
    tokenizer_files,
)
from megapipe.extras.convert.tables import unpadded
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.trace.parameters import model_parameters

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}  # our key -> torch.optim's
STEP = "step"  # of torch's Adam, one tensor per parameter
MODEL, STATE, TRAIN = "model.", "optimizer.state.", "train_state."
# entries of other programs that are not read, since flags of the resumed run replace them
NOT_READ = ("optimizer.param_groups", "lr_scheduler", "dataloader")
# sections of a manifest's state that are stored under train_state
SECTIONS = ("optimizer", "random", "schedules", "account", "spikes", "global_batch_size")
STEP_FOLDER = re.compile(r"step[-_]?(\d+)")


def find(root: Path, step: int | None = None) -> Path | None:
    """Return root or its newest `step-N`, whichever torch.distributed.checkpoint wrote (not Megatron's), or None."""
    if (root / METADATA).exists():
        return None if (root / COMMON).exists() else root
    matches = ((STEP_FOLDER.fullmatch(path.parent.name), path.parent) for path in root.glob(f"*/{METADATA}"))
    found = {int(match[1]): folder for match, folder in matches if match and not (folder / COMMON).exists()}
    return found.get(max(found, default=0) if step is None else step)


def write(snapshot: Snapshot, folder: Path) -> Path:
    """Write a new folder atomically, with config.yaml and the tokenizer's files. Raises CheckpointError."""
    from megapipe.extras.convert.dcp_files import save_state_dict  # its import takes as long as all others together

    with new_folder(folder) as (disk, temporary):
        save_state_dict(state_dict(snapshot), temporary)
        disk.write_file(temporary / CONFIG_NAME, to_yaml(snapshot.config).encode())
        if snapshot.files:
            disk.make_folder(temporary / TOKENIZER_NAME)
            for path in snapshot.files:
                disk.write_file(temporary / TOKENIZER_NAME / path.name, path.read_bytes())
            disk.sync_folder(temporary / TOKENIZER_NAME)
    return folder


def state_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Return the nested state dict with unread tensors."""
    state = snapshot.state
    train_state = dict(state["training"])
    train_state |= {section: state[section] for section in SECTIONS if state.get(section) is not None}
    content: dict[str, Any] = {"model": snapshot.weights, "train_state": train_state}
    moments: dict[str, dict[str, Any]] = {}
    for name, tensor in snapshot.tensors.items():
        key, parameter = name.split("/", 1)
        if key in MOMENTS:
            moments.setdefault(parameter, {})[MOMENTS[key]] = tensor
    for values in moments.values():
        if "exp_avg" in values:
            values[STEP] = torch.tensor(float(state["optimizer"]["num_steps"]))
    if moments:
        content["optimizer"] = {"state": moments}
    return content


def read(root: Path, step: int | None = None, config_file: Path | None = None, weights_only: bool = False) -> Snapshot:
    """Read a folder saved by any number of ranks, whose model has our parameter names.

    config_file: replaces a config.yaml in the folder. Raises ConfigError if the model's configuration is unknown,
    CheckpointError naming a tensor that is missing, unexpected or unreadable.
    """
    folder = find(root, step)
    if folder is None:
        of_step = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{root} holds no checkpoint of torch.distributed.checkpoint{of_step}")
    entries, values = read_folder(folder)
    stored = {name: LazyTensor(entry.shape, entry.dtype, entry.read) for name, entry in entries.items()}
    prefix = MODEL if any(name.startswith(MODEL) for name in stored) else ""
    config = _config(folder, config_file, stored, prefix)
    parameters = model_parameters(unpadded(config.model), sequence_parallel=False)
    state_names = [name for name in stored if name.startswith(STATE)]
    kinds = set() if weights_only else {name.rpartition(".")[2] for name in state_names}
    moments = {ours: theirs for ours, theirs in MOMENTS.items() if theirs in kinds}
    tensors: dict[str, LazyTensor] = {}
    used = {name for name in state_names if name.endswith(f".{STEP}")}
    for spec in parameters:
        names = {"master": prefix + spec.name}
        names |= {ours: f"{STATE}{spec.name}.{theirs}" for ours, theirs in moments.items()}
        for key, name in names.items():
            if name not in stored:
                raise CheckpointError(f"{folder} lacks the tensor {name}, which its configuration requires")
            shape, needed = list(stored[name].shape), list(spec.shape)
            if shape != needed:
                raise CheckpointError(f"{folder}: {name} has shape {shape}, its configuration requires {needed}")
            tensors[f"{key}/{spec.name}"] = stored[name]
            used.add(name)
    head = prefix + HEAD
    if not config.model.untie_embeddings_and_output_weights and head in stored:
        check_tied(folder, head, stored[head], tensors[f"master/{WORD_EMBEDDING}"])
        used.add(head)
    skipped = (TRAIN, *NOT_READ, *((STATE,) if weights_only else ()))
    left = sorted(name for name in stored.keys() - used if not name.startswith(skipped))
    check_nothing_left(folder, left, "the model that its configuration describes")
    state = fresh_state(config.precision.dtype)
    remarks: tuple[str, ...] = ()
    if not weights_only:
        optimized = [spec.name for spec in parameters] if moments else []
        remarks = _fill_state(folder, state, stored, values, config, optimized)
    files, settings = tokenizer_files(folder)
    return Snapshot(config, tensors, state, files, settings, remarks)


def _config(folder: Path, given: Path | None, stored: Mapping[str, LazyTensor], prefix: str) -> Config:
    path = folder / CONFIG_NAME if given is None else given
    if given is None and not path.exists():
        raise ConfigError(
            f"{folder} has no {CONFIG_NAME}, so the model is unknown: give --config FILE, YAML as for training "
            "(--print-config prints that of any checkpoint)"
        )
    config = read_config(path)
    embedding = prefix + WORD_EMBEDDING
    if embedding not in stored:
        raise CheckpointError(f"{folder} lacks the tensor {embedding}: its parameters are not named like megapipe's")
    rows = config.model.vocab_size or stored[embedding].shape[0]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows, padded_vocab_size=None))


def _fill_state(
    folder: Path,
    state: dict[str, Any],
    stored: Mapping[str, LazyTensor],
    values: Mapping[str, StoredValue],
    config: Config,
    optimized: list[str],
) -> tuple[str, ...]:
    """Set the state other than tensors. optimized: parameters with moments. Returns remarks for the user."""
    remarks: list[str] = []
    for name, value in values.items():  # sections of a manifest's state, if megapipe wrote the folder
        section, *words = name.removeprefix(TRAIN).split(".")
        if name.startswith(TRAIN) and section in SECTIONS:
            inner, key = state, section
            for word in words:
                inner[key] = inner.get(key) or {}
                inner, key = inner[key], word
            inner[key] = value.read()

    position = state["training"]
    for key in position:  # stored as a value or as a tensor of one element
        name, number = TRAIN + key, None
        if name in stored:
            number = stored[name].detach().item()
        elif name in values:
            number = values[name].read()
        position[key] = None if number is None else int(number)
    # fill in the counts that another program does not store
    steps = {f"{STATE}{name}.{STEP}" for name in optimized} & stored.keys()
    updates = one_step(folder, {int(stored[name].detach().item()) for name in steps}) if steps else None
    if position["step"] is None:
        position["step"] = updates or 0
    if position["skipped_steps"] is None:
        position["skipped_steps"] = 0 if updates is None else max(0, position["step"] - updates)
    if position["consumed_samples"] is None:
        position["consumed_samples"] = 0
        if position["step"]:
            remarks.append(f"there is no {TRAIN}consumed_samples: data and schedules start from their beginning")
    if position["consumed_tokens"] is None:
        position["consumed_tokens"] = position["consumed_samples"] * config.model.seq_length

    saved = state["optimizer"] or {}
    if optimized:
        state["optimizer"] = {
            "num_steps": position["step"] - position["skipped_steps"] if updates is None else updates,
            "loss_scaler": saved.get("loss_scaler", {"scale": 1.0, "good_steps": 0, "overflows_left": 1}),
            "rule": saved.get("rule", "sgd" if updates is None else "adam"),
        }
    elif saved.get("rule") == "adam":
        state["optimizer"] = None  # its moments are missing
    unread = [name for name in NOT_READ if any(found.startswith(name) for found in (*stored, *values))]
    if unread:
        remarks.append(f"not read, set by flags of the resumed run: {', '.join(unread)}")
    return tuple(remarks)

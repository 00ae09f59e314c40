"""Runs written for torch.distributed.checkpoint: the state dict {model, optimizer, train_state}, for any ranks.

Weights are `model.<parameter>`, Adam's state `optimizer.state.<parameter>.{exp_avg, exp_avg_sq, step}`, as in
torch.distributed.checkpoint.state_dict; the position is `train_state.*`. Parameter groups are not written: megapipe
sets learning rate and weight decay of every step from its schedules, which are in `train_state.schedules`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.folder import CONFIG_NAME, TOKENIZER_NAME
from megapipe.config.yaml_file import to_yaml
from megapipe.extras.convert.snapshot import Snapshot, new_folder

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}  # our key -> torch.optim's
# sections of a manifest's state that are stored under train_state
SECTIONS = ("optimizer", "random", "schedules", "account", "spikes", "global_batch_size")


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
            values["step"] = torch.tensor(float(state["optimizer"]["num_steps"]))
    if moments:
        content["optimizer"] = {"state": moments}
    return content

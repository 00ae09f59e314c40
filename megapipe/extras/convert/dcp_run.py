"""Runs as torch.distributed.checkpoint keeps them: the state dict {model, optimizer, train_state} of a program, sharded by any ranks.

Weights are `model.<parameter>`, Adam's state `optimizer.state.<parameter>.{exp_avg, exp_avg_sq, step}`, as
torch.distributed.checkpoint.state_dict names them; the position is `train_state.*`. Parameter groups are not written: megapipe sets
learning rate and weight decay of every step from its schedules, which are in `train_state.schedules`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.folder import CONFIG_NAME, TOKENIZER_NAME
from megapipe.config.config import Config
from megapipe.config.load import from_yaml
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert import own
from megapipe.extras.convert.dcp_folder import METADATA, StoredTensor, StoredValue, read_folder
from megapipe.extras.convert.megatron_dist import COMMON
from megapipe.extras.convert.megatron_optimizer import HEAD, one_step
from megapipe.extras.convert.new_folder import new_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, fresh_state, unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}  # our key -> torch.optim's
STEP = "step"  # of torch's Adam, a tensor per parameter
MODEL, STATE, TRAIN = "model.", "optimizer.state.", "train_state."
THEIRS = (
    "optimizer.param_groups",
    "lr_scheduler",
    "dataloader",
)  # a program's own, that flags of the run that goes on say anew
SECTIONS = (
    "optimizer",
    "random",
    "schedules",
    "account",
    "spikes",
    "global_batch_size",
)  # of a manifest's state, under train_state
STEP_FOLDER = re.compile(r"step[-_]?(\d+)")


def find(root: Path, step: int | None = None) -> Path | None:
    """root itself, or the newest `step-N` in it; None if neither is a folder of torch.distributed.checkpoint (Megatron's is not meant)."""
    if (root / METADATA).exists():
        return None if (root / COMMON).exists() else root
    matches = ((STEP_FOLDER.fullmatch(path.parent.name), path.parent) for path in root.glob(f"*/{METADATA}"))
    found = {int(match[1]): folder for match, folder in matches if match and not (folder / COMMON).exists()}
    return found.get(max(found, default=0) if step is None else step)


# ------------------------------------------------------------------------------------------------------------------------- writing


def write(snapshot: Snapshot, folder: Path) -> Path:
    """A new folder that torch.distributed.checkpoint.load reads, complete or not there; beside it config.yaml and the tokenizer's files.

    Raises CheckpointError if folder is there already or cannot be written.
    """
    from megapipe.comm.torch_checkpoint import save_state_dict  # takes as long to import as all the rest

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
    """Nested, tensors unread."""
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
    return content | ({"optimizer": {"state": moments}} if moments else {})


# ------------------------------------------------------------------------------------------------------------------------- reading


def read(root: Path, step: int | None = None, config_file: Path | None = None, weights_only: bool = False) -> Snapshot:
    """A folder that ranks of any number saved, whose model has our parameter names. config_file: instead of a config.yaml in the folder.

    Raises ConfigError where nothing says what the model is, CheckpointError naming the tensor without a place, missing or unreadable.
    """
    folder = find(root, step)
    if folder is None:
        raise CheckpointError(
            f"{root} holds no checkpoint of torch.distributed.checkpoint" + ("" if step is None else f" of step {step}")
        )
    stored, values = read_folder(folder)
    prefix = MODEL if any(name.startswith(MODEL) for name in stored) else ""
    config = _config(folder, config_file, stored, prefix)
    specs = model_parameters(unpadded(config.model), sequence_parallel=False)
    keys = {} if weights_only else {ours: theirs for ours, theirs in MOMENTS.items() if _has_moment(stored, theirs)}
    tensors: dict[str, LazyTensor] = {}
    placed: set[str] = set()
    for key, parameter, name, spec in _places(specs, prefix, keys):
        tensors[f"{key}/{parameter}"] = _lazy(folder, stored, name, spec)
        placed.add(name)
    if not config.model.untie_embeddings_and_output_weights and prefix + HEAD in stored:
        _check_tied(folder, stored[prefix + HEAD], tensors[f"master/{WORD_EMBEDDING}"])
        placed.add(prefix + HEAD)
    _check_left(folder, stored.keys() - placed, (STATE,) if weights_only else ())
    state = fresh_state(config.precision.dtype)
    remarks: tuple[str, ...] = ()
    if not weights_only:
        remarks = _fill_state(folder, state, stored, values, config, [spec.name for spec in specs] if keys else [])
    tokenizer = folder / TOKENIZER_NAME
    return Snapshot(
        config,
        tensors,
        state,
        own.files_in(tokenizer),
        own.extra_settings(tokenizer / own.HUGGING_FACE_CONFIG),
        remarks,
    )


def _config(folder: Path, given: Path | None, stored: Mapping[str, StoredTensor], prefix: str) -> Config:
    path = folder / CONFIG_NAME if given is None else given
    if given is None and not path.exists():
        raise ConfigError(
            f"{folder} has no {CONFIG_NAME}, so that nothing says what the model is: give --config FILE, YAML as training takes it "
            "(--print-config prints that of any checkpoint)"
        )
    try:
        config = from_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    embedding = prefix + WORD_EMBEDDING
    if embedding not in stored:
        raise CheckpointError(f"{folder} lacks the tensor {embedding}: its parameters have other names than megapipe's")
    rows = config.model.vocab_size or stored[embedding].shape[0]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows, padded_vocab_size=None))


def _has_moment(stored: Mapping[str, StoredTensor], theirs: str) -> bool:
    return any(name.startswith(STATE) and name.endswith(f".{theirs}") for name in stored)


def _places(
    specs: tuple[ParamSpec, ...], prefix: str, keys: Mapping[str, str]
) -> Iterator[tuple[str, str, str, ParamSpec]]:
    """(our key, parameter, their name, its spec) of all tensors."""
    for spec in specs:
        yield "master", spec.name, prefix + spec.name, spec
        for ours, theirs in keys.items():
            yield ours, spec.name, f"{STATE}{spec.name}.{theirs}", spec


def _lazy(folder: Path, stored: Mapping[str, StoredTensor], name: str, spec: ParamSpec) -> LazyTensor:
    if name not in stored:
        raise CheckpointError(f"{folder} lacks the tensor {name}, which its configuration asks for")
    entry = stored[name]
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"{folder}: {name} has shape {list(entry.shape)}, its configuration asks for {list(spec.shape)}"
        )
    return LazyTensor(spec.shape, entry.dtype, partial(entry.read, Box((0,) * len(spec.shape), spec.shape)))


def _check_tied(folder: Path, head: StoredTensor, embedding: LazyTensor) -> None:
    if head.shape != embedding.shape or not torch.equal(head.read(Box((0, 0), embedding.shape)), embedding.detach()):
        raise CheckpointError(f"{folder}: {head.name} differs from the word embedding, but its configuration ties them")


def _check_left(folder: Path, names: Set[str], passed_over: tuple[str, ...]) -> None:
    passed_over += (TRAIN, *THEIRS)
    left = sorted(
        name
        for name in names
        if not name.startswith(passed_over) and not (name.startswith(STATE) and name.endswith(f".{STEP}"))
    )
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise CheckpointError(
            f"{folder}: the tensor {left[0]}{more} has no place in the model that its configuration describes"
        )


def _fill_state(
    folder: Path,
    state: dict[str, Any],
    stored: Mapping[str, StoredTensor],
    values: Mapping[str, StoredValue],
    config: Config,
    optimized: list[str],
) -> tuple[str, ...]:
    """Set what is no tensor of ours; optimized: parameters with moments. Returns what a person should know."""
    state |= _sections(values)
    steps = {f"{STATE}{name}.{STEP}" for name in optimized} & stored.keys()
    updates = one_step(folder, {int(stored[name].read(Box((), ())).item()) for name in steps}) if steps else None
    state["training"] = {name: _number(f"{TRAIN}{name}", stored, values) for name in state["training"]}
    remarks = _complete(state["training"], updates, config)
    saved = state["optimizer"] or {}
    if optimized:
        state["optimizer"] = {
            "num_steps": state["training"]["step"] - state["training"]["skipped_steps"] if updates is None else updates,
            "loss_scaler": saved.get("loss_scaler", {"scale": 1.0, "good_steps": 0, "overflows_left": 1}),
            "rule": saved.get("rule", "sgd" if updates is None else "adam"),
        }
    elif saved.get("rule") == "adam":
        state["optimizer"] = None  # its moments are not there
    unread = [name for name in THEIRS if any(found.startswith(name) for found in (*stored, *values))]
    return remarks + ((f"not read, flags of the run that goes on say it anew: {', '.join(unread)}",) if unread else ())


def _sections(values: Mapping[str, StoredValue]) -> dict[str, Any]:
    """Those parts of a manifest's state that an export of ours put under train_state."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        words = name.removeprefix(TRAIN).split(".")
        if name.startswith(TRAIN) and words[0] in SECTIONS:
            inner = sections
            for word in words[:-1]:
                inner = inner.setdefault(word, {})
            inner[words[-1]] = value.read()
    return sections


def _number(name: str, stored: Mapping[str, StoredTensor], values: Mapping[str, StoredValue]) -> Any:
    """A number, kept as such or as a tensor of one element; None if it is not there."""
    if name in stored:
        entry = stored[name]
        return int(entry.read(Box((0,) * len(entry.shape), entry.shape)).item())
    return int(values[name].read()) if name in values else None


def _complete(position: dict[str, Any], updates: int | None, config: Config) -> tuple[str, ...]:
    """Fill in what a foreign program has no name for; returns what to say of it."""
    remarks: tuple[str, ...] = ()
    if position["step"] is None:
        position["step"] = updates or 0
    if position["skipped_steps"] is None:
        position["skipped_steps"] = 0 if updates is None else max(0, position["step"] - updates)
    if position["consumed_samples"] is None:
        position["consumed_samples"] = 0
        remarks = (
            (f"there is no {TRAIN}consumed_samples: data and schedules start from their beginning",)
            if position["step"]
            else ()
        )
    if position["consumed_tokens"] is None:
        position["consumed_tokens"] = position["consumed_samples"] * config.model.seq_length
    return remarks

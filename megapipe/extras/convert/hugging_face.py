"""A Hugging Face folder: config.json, one or more safetensors files with their index, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.config.config import Config
from megapipe.config.precision import PrecisionConfig
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.families import Family, choose_family, family_of
from megapipe.extras.convert.inert_settings import INERT
from megapipe.extras.convert.layouts import Layout
from megapipe.extras.convert.names import Placed, place
from megapipe.extras.convert.new_folder import new_folder
from megapipe.extras.convert.safetensors_file import cut_into_files, file_names, read_tensors, write_tensors
from megapipe.extras.convert.snapshot import DTYPE_NAMES, LazyTensor, Snapshot, fresh_state, unpadded

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPE_WORDS = {getattr(torch, dtype.torch_name): dtype.torch_name for dtype in TENSOR_DTYPES.values()}
# besides the weights, what a folder may hold that is worth carrying along
COMPANIONS = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
]
HEAD, EMBEDDING = "lm_head.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _Parts:
    """The lazily read parts of one of our tensors."""

    layout: Layout
    parts: tuple[LazyTensor, ...]

    def read(self) -> Tensor:
        return self.layout.join([part.detach() for part in self.parts])


def read(folder: Path, ignored: frozenset[str] = frozenset()) -> Snapshot:
    """A folder as a Snapshot. ignored: keys of config.json that the caller vouches for.

    Raises ConfigError naming the key, CheckpointError naming the tensor or file, that cannot be converted.
    """
    config = _json(folder / CONFIG)
    try:
        family = family_of(config)
        model = family.read(config, ignored)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from None
    placed = place(family.rows, unpadded(model), family.architecture)
    found = _with_prefix(_tensors(folder), family, placed)
    tied = not model.untie_embeddings_and_output_weights
    _check_complete(folder, family, placed, found, tied)
    tensors = {f"master/{entry.spec.name}": _join(folder, entry, found) for entry in placed}
    if tied and HEAD in found:
        _check_tied(folder, found[HEAD], tensors[f"master/{EMBEDDING}"])
    precision = DTYPE_NAMES[tensors[f"master/{EMBEDDING}"].dtype]
    files = tuple(folder / name for name in COMPANIONS if (folder / name).is_file())
    extra = {key: value for key, value in config.items() if key in INERT | ignored}
    ours = Config(model=model, precision=PrecisionConfig(dtype=precision))
    return Snapshot(ours, tensors, fresh_state(precision), files, extra)


def write(snapshot: Snapshot, folder: Path, architecture: str | None = None, most_bytes: int = 5 * 10**9) -> str:
    """A new folder, complete or not there; returns the architecture. most_bytes: of one weight file.

    Raises ConfigError naming what no architecture can express, CheckpointError if the folder is there already or cannot be written.
    """
    before = snapshot.extra_settings.get("architectures") or [None]
    family, config = choose_family(snapshot.config.model, architecture, before[0])
    weights = snapshot.weights
    tensors: dict[str, LazyTensor] = {}
    for entry in place(family.rows, unpadded(snapshot.config.model), family.architecture):
        tensors |= _split(entry, weights[entry.spec.name])
    inert = {key: value for key, value in snapshot.extra_settings.items() if key not in config}
    dtype = DTYPE_WORDS[weights[EMBEDDING].dtype]
    config = inert | config | {"dtype" if "dtype" in inert else "torch_dtype": dtype}
    with new_folder(folder) as (disk, temporary):
        _write_files(disk, temporary, tensors, config, snapshot.files, most_bytes)
    return family.architecture


def _write_files(
    disk: Disk,
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    files: Iterable[Path],
    most_bytes: int,
) -> None:
    groups = cut_into_files(tensors, most_bytes)
    names = file_names(len(groups))
    for name, group in zip(names, groups, strict=True):
        write_tensors(disk, folder / name, group)
    if len(groups) > 1:
        total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        disk.write_file(folder / INDEX, _text({"metadata": {"total_size": total}, "weight_map": weight_map}))
    disk.write_file(folder / CONFIG, _text(config))
    for path in files:
        if path.name != CONFIG:
            disk.write_file(folder / path.name, path.read_bytes())


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file, so this is no Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _tensors(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of all weight files, each named by one file."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX).get("weight_map", {})
        files = {name: read_tensors(folder / name) for name in sorted(set(index.values()))}
        for tensor, name in index.items():
            if tensor not in files[name]:
                raise CheckpointError(f"{folder / name} lacks the tensor {tensor} that {INDEX} says it holds")
        return {tensor: files[name][tensor] for tensor, name in index.items()}
    if (folder / SINGLE).is_file():
        return read_tensors(folder / SINGLE)
    other = next((path.name for path in sorted(folder.glob("*.bin"))), None)
    hint = f"; {other} is pickled: save it as safetensors with transformers (save_pretrained)" if other else ""
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")


def _with_prefix(found: dict[str, LazyTensor], family: Family, placed: tuple[Placed, ...]) -> dict[str, LazyTensor]:
    """The tensors under the names of the model with its head: a base model saved alone has none with the prefix."""
    if any(name.startswith(family.prefix) for name in found):
        return found
    whole = {name for entry in placed for name in entry.theirs}
    return {name if name in whole or name == HEAD else family.prefix + name: tensor for name, tensor in found.items()}


def _check_complete(
    folder: Path, family: Family, placed: tuple[Placed, ...], found: Mapping[str, LazyTensor], tied: bool
) -> None:
    wanted = {name for entry in placed for name in entry.theirs}
    missing = sorted(wanted - found.keys())
    if missing:
        raise CheckpointError(f"{folder} lacks the tensor {missing[0]}{_more(missing)}, which its {CONFIG} asks for")
    passed_over = {HEAD} if tied else set()
    foreign = sorted(
        name for name in found.keys() - wanted - passed_over if not name.endswith(family.buffers or ("\0",))
    )
    if foreign:
        raise CheckpointError(
            f"{folder}: the tensor {foreign[0]}{_more(foreign)} has no place in {family.architecture} as {CONFIG} describes it"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tied(folder: Path, head: LazyTensor, embedding: LazyTensor) -> None:
    if head.shape != embedding.shape or not torch.equal(head.detach(), embedding.detach()):
        raise CheckpointError(
            f"{folder}: {HEAD} differs from the word embedding, but {CONFIG} says tie_word_embeddings"
        )


def _join(folder: Path, entry: Placed, found: Mapping[str, LazyTensor]) -> LazyTensor:
    parts = tuple(found[name] for name in entry.theirs)
    for name, part, shape in zip(entry.theirs, parts, entry.layout.shapes(entry.spec.shape), strict=True):
        if part.shape != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(part.shape)}, {CONFIG} asks for {list(shape)}")
        if part.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{folder}: {name} is quantized or of an integer dtype; convert the unquantized weights"
            )
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{folder}: {', '.join(entry.theirs)} become one tensor, {entry.spec.name}, but have several dtypes"
        )
    return LazyTensor(entry.spec.shape, dtypes.pop(), _Parts(entry.layout, parts).read)


def _split(entry: Placed, whole: LazyTensor) -> dict[str, LazyTensor]:
    def part(index: int) -> Tensor:
        return entry.layout.split(whole.detach())[index]

    shapes = entry.layout.shapes(entry.spec.shape)
    return {
        name: LazyTensor(shape, whole.dtype, partial(part, n))
        for n, (name, shape) in enumerate(zip(entry.theirs, shapes, strict=True))
    }


def with_settings_of(snapshot: Snapshot, folder: Path) -> Snapshot:
    """The snapshot with tokenizer files and settings without meaning for the model from another folder of Hugging Face."""
    config = _json(folder / CONFIG)
    files = tuple(folder / name for name in COMPANIONS if (folder / name).is_file())
    return replace(snapshot, files=files, extra_settings={key: value for key, value in config.items() if key in INERT})

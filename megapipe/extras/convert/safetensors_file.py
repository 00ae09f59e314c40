"""safetensors files: tensors read one by one when needed, and written one after the other without holding more than one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.shard import BLOCK_BYTES, DTYPE_NAMES, DTYPES
from megapipe.checkpoint.tensor_box import byte_blocks
from megapipe.errors import CheckpointError
from megapipe.extras.convert.snapshot import LazyTensor


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """All tensors of a file, unread. Raises CheckpointError naming the file, and the tensor of a dtype that no weights have."""
    found: dict[str, LazyTensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                found[name] = _lazy(path, name, tuple(part.get_shape()), part.get_dtype())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file, or damaged: {error}") from None
    return found


def _lazy(path: Path, name: str, shape: tuple[int, ...], dtype_name: str) -> LazyTensor:
    def read() -> torch.Tensor:
        try:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
        except KeyError:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {dtype_name}, not one of {', '.join(DTYPES)}"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None

    return LazyTensor(
        shape, DTYPES.get(dtype_name, torch.uint8), read
    )  # uint8: no weights; refused by whoever wants it as such


def cut_into_files(tensors: Mapping[str, LazyTensor], most_bytes: int) -> list[dict[str, LazyTensor]]:
    """Tensors in order, each group below most_bytes, a larger tensor alone."""
    groups: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        if groups[-1] and size + num_bytes > most_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += num_bytes
    return groups


def write_tensors(disk: Disk, path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """A new synced file that says it is PyTorch's, as transformers expects. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        stop = position + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with disk.create(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for block in byte_blocks(tensor.detach(), BLOCK_BYTES):
                file.write(block)


def file_names(count: int) -> Sequence[str]:
    """The names that transformers gives to one file, or to a number of them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

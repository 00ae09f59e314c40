"""Every checksum of a checkpoint computed again, without loading anything. Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.manifest import ITEM_BYTES


def damage(folder: CheckpointFolder) -> Iterator[str]:
    """One line for each damaged file part, naming file and tensor; none if all is as it was written. Raises OSError."""
    manifest = folder.manifest
    first_box: dict[str, int] = {}
    for name, tensor in manifest.tensors.items():
        for saved in tensor.boxes:
            first_box[saved.file] = min(first_box.get(saved.file, saved.start), saved.start)
            size = saved.box.num_elements * ITEM_BYTES[tensor.dtype]
            with open(folder.path / saved.file, "rb") as file:
                file.seek(saved.start)
                for number, expected in enumerate(saved.crc32):
                    block = file.read(min(manifest.block_bytes, size - number * manifest.block_bytes))
                    if zlib.crc32(block) != expected:
                        at = saved.start + number * manifest.block_bytes
                        yield f"{folder.path / saved.file}: tensor {name} at {list(saved.box.offset)} is damaged from byte {at} on"
    for name, entry in manifest.files.items():
        with open(folder.path / name, "rb") as file:
            content = file.read(first_box.get(name, entry.num_bytes))
        if zlib.crc32(content) != entry.crc32:
            yield f"{folder.path / name}: {'the header' if name in first_box else 'the content'} is damaged"

"""Fingerprints of training data, kept in checkpoints: resuming on other data is noticed.

A fingerprint is plain JSON: {"kind": "generated", "files" or "chats", "seq_length": tokens, ...}; of files
and chats, "members" with share of the blend, prefix, range of sequences, bytes of both files and checksums of the index
and of blocks of the tokens.
Of large files a fixed number of blocks is read. The number of samples, the prefix and the index cache may change.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from megapipe.data.blend import BlendedDataset
from megapipe.data.chat_dataset import ChatDataset
from megapipe.data.dataset import SyntheticDataset, TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import bin_path, idx_path
from megapipe.data.registered import RegisteredDataset
from megapipe.errors import DataError

INDEX_BLOCKS = (1024, 1 << 16)  # number and bytes of the blocks that are read of an .idx: all of up to 64 MiB
TOKEN_BLOCKS = (256, 1 << 12)  # of a .bin: all of up to 1 MiB
ORDER_SAMPLES = 4096

Fingerprint = dict[str, Any]


def fingerprint(dataset: TokenDataset) -> Fingerprint | None:
    """Return the fingerprint of a dataset, None for one of another kind. Raises DataError if a file is unreadable."""
    if isinstance(dataset, RegisteredDataset):
        return dataset.fingerprint()
    if isinstance(dataset, SyntheticDataset):
        return {"kind": "generated", "seq_length": dataset.seq_length, "tokens": len(dataset.cycle)}
    members: list[TokenDataset] = [dataset]
    shares = [1.0]
    if isinstance(dataset, BlendedDataset):
        members, shares = list(dataset.members), list(dataset.weights)
    chats = [member for member in members if isinstance(member, ChatDataset)]
    if len(chats) == len(members):
        found = [member.fingerprint(share) for member, share in zip(chats, shares, strict=True)]
        return {"kind": "chats", "seq_length": chats[0].seq_length, "members": found}
    files = [member for member in members if isinstance(member, GPTDataset)]
    if len(files) != len(members):
        return None
    found = [_member(member, share) for member, share in zip(files, shares, strict=True)]
    return {"kind": "files", "seq_length": files[0].seq_length, "members": found}


def differences(saved: Fingerprint, own: Fingerprint) -> list[str]:
    """Return a line with both sides for each thing in which two fingerprints differ."""
    if saved["kind"] != own["kind"]:
        return [f"{_kind(saved)} in the checkpoint, {_kind(own)} here"]
    lines = [
        f"{name}: {saved[key]} in the checkpoint, {own[key]} here"
        for key, name in (("seq_length", "--seq-length"), ("tokens", "different tokens"))
        if saved.get(key) != own.get(key)
    ]
    there, here = saved.get("members", []), own.get("members", [])
    if len(there) != len(here):
        return [*lines, f"{len(there)} files in the checkpoint, {len(here)} here: {_kind(saved)}; {_kind(own)}"]
    for before, now in zip(there, here, strict=True):
        if _content(before) != _content(now):
            lines.append(f"{_text(before)} in the checkpoint, {_text(now)} here")
    return lines


def has_another_order(saved: Fingerprint, own: Fingerprint) -> bool:
    """Return True if the same data come in another order."""
    both = zip(saved.get("members", []), own.get("members", []), strict=True)
    return any(before["order"] != now["order"] for before, now in both)


def sampled_checksum(path: Path, count: int, block_bytes: int) -> int:
    """Return the CRC-32 of `count` blocks, evenly spaced with the first and the last, or of a whole smaller file.

    Raises DataError if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size, found = os.fstat(file.fileno()).st_size, 0
            steps = min(count, -(-size // block_bytes))
            for step in range(steps):
                start = step * block_bytes if steps < count else step * (size - block_bytes) // max(1, count - 1)
                file.seek(start)
                found = zlib.crc32(file.read(block_bytes), found)
            return found
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}") from None


def _member(dataset: GPTDataset, share: float) -> dict[str, Any]:
    prefix, index = dataset.file.prefix, dataset.index
    order = zlib.crc32(index.documents[:ORDER_SAMPLES].astype("<i8").tobytes())
    return {
        "share": round(share, 12),
        "prefix": prefix,
        "sequences": list(dataset.sequences),
        "bytes": [path.stat().st_size for path in (bin_path(prefix), idx_path(prefix))],
        "index": sampled_checksum(idx_path(prefix), *INDEX_BLOCKS),
        "tokens": sampled_checksum(bin_path(prefix), *TOKEN_BLOCKS),
        "order": zlib.crc32(index.shuffle[:ORDER_SAMPLES].astype("<i8").tobytes(), order),
    }


def _content(member: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in member.items() if key not in ("prefix", "order")}


def _kind(found: Fingerprint) -> str:
    if found["kind"] == "generated":
        return "generated tokens (--mock-data)"
    if found["kind"] == "extension":
        return str(found["tokens"])
    prefixes = [member["prefix"] for member in found["members"]]
    return ", ".join(prefixes[:4]) + (f" and {len(prefixes) - 4} others" if len(prefixes) > 4 else "")


def _text(member: dict[str, Any]) -> str:
    first, past = member["sequences"]
    tokens, index = member["bytes"]
    share = "" if member["share"] == 1 else f"{100 * member['share']:.4g} % of "
    sizes = f"{tokens:,} and {index:,} bytes, checksums {member['tokens']:08x} and {member['index']:08x}"
    return f"{share}{member['prefix']} (sequences {first:,} to {past - 1:,}; {sizes})"

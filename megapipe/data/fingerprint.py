"""Contents of data and tokenizer files, equal for equal files, whatever their paths.

Fingerprints of training data are kept in checkpoints: resuming on other data is noticed. Ranks compare contents as
short texts when a run starts, and `SourceFiles` compares the token files that it reads with what they were then.

A fingerprint is plain JSON: {"kind": "generated", "files" or "chats", "seq_length": tokens, ...}; of files
and chats, "members" with share of the blend, prefix, range of sequences, bytes of both files and checksums of the index
and of blocks of the tokens.
Of large files a fixed number of blocks is read. The number of samples, the prefix and the index cache may change.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.config.files import parse_blend
from megapipe.data.blend import BlendedDataset
from megapipe.data.chat_dataset import ChatDataset
from megapipe.data.dataset import SyntheticDataset, TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import bin_path, idx_path, sampled_checksum
from megapipe.data.registered import RegisteredDataset
from megapipe.errors import DataError
from megapipe.input_files import regular

INDEX_BLOCKS = (1024, 1 << 16)  # number and bytes of the blocks that are read of an .idx: all of up to 64 MiB
TOKEN_BLOCKS = (256, 1 << 12)  # of a .bin, for checkpoints: all of up to 1 MiB
COMPARED_BLOCKS = (64, 1 << 12)  # of a .bin, when a run starts and while it reads: all of up to 256 KiB
LEAST_BLOCKS = 4  # of a file in a large blend
BLOCKS_OF_A_BLEND = 1024  # of all its files together, so that a start stays short
ORDER_SAMPLES = 4096
# of a tokenizer's folder, which may hold a whole model
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".bpe")
WEIGHT_INDEX = ".index.json"
CACHED = ".npy"  # of the index cache
MOST_LOOKS = 256  # files of a large blend whose size and time are looked at in one call, in turn

Fingerprint = dict[str, Any]
Stamp = tuple[int, int, int, int]


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


# --------------------------------------------------------------------- contents of the files that a run reads


def blend_content(words: Sequence[str], flag: str, of_chats: bool) -> tuple[str, str]:
    """Return a blend with the contents of its files: as shown in messages, and without their paths, to be compared.

    of_chats: the paths are files of conversations, else prefixes of .bin and .idx. Raises ConfigError.
    """
    paths, weights = parse_blend(words, flag)
    most = max(LEAST_BLOCKS, BLOCKS_OF_A_BLEND // len(paths))
    shown, compared = [], []
    for index, path in enumerate(paths):
        weight = "" if weights is None else f"{weights[index]:g} "
        if of_chats:
            content = sampled_content(Path(path), most)
        else:
            tokens, entries = sampled_content(bin_path(path), most), sampled_content(idx_path(path), most, INDEX_BLOCKS)
            content = f".bin of {tokens}, .idx of {entries}"
        shown.append(f"{weight}{path} ({content})")
        compared.append(weight + content)
    return "; ".join(shown), "; ".join(compared)


def sampled_content(path: Path, most: int, blocks: tuple[int, int] = COMPARED_BLOCKS) -> str:
    """Return size and checksum of a file, read in evenly spaced blocks, or why it cannot be read."""
    try:
        count, block_bytes = blocks
        return f"{path.stat().st_size:,} bytes, checksum {sampled_checksum(path, min(count, most), block_bytes):08x}"
    except (OSError, DataError) as error:
        return f"which cannot be read ({getattr(error, 'strerror', None) or error})"


def whole_content(path: Path) -> str:
    """Return a digest of a file, or of those in a folder that belong to a tokenizer, or why it cannot be read."""
    files = [path]
    if path.is_dir():
        files = [one for one in sorted(path.iterdir()) if one.suffix in TOKENIZER_SUFFIXES and one.is_file()]
        files = [one for one in files if not one.name.endswith(WEIGHT_INDEX)]
    whole = hashlib.sha256()
    try:
        for one in files:
            content = regular(one).read_bytes()
            named = one.name if path.is_dir() else ""
            whole.update(f"{named} {len(content)}\n".encode() + content)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"sha256 {whole.hexdigest()[:16]}"


class SourceFiles:
    """Files with their state at the start: size, times and inode, and size and checksum of sampled blocks.

    A file whose times or inode alone have changed is accepted if the sampled blocks are the same. Raises DataError if
    one cannot be read.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self.paths = tuple(dict.fromkeys(paths))
        self._most = max(LEAST_BLOCKS, BLOCKS_OF_A_BLEND // max(1, len(self.paths)))
        self._stamps = {path: _stamp(path) for path in self.paths}
        self._contents = {path: sampled_content(path, self._most) for path in self.paths}
        self._turn = cycle(self.paths)

    def look(self) -> tuple[str, ...]:
        """Compare sizes, times and inodes, of at most MOST_LOOKS files. Returns and raises as `compare`."""
        turn = islice(self._turn, min(MOST_LOOKS, len(self.paths)))
        return self._accept([path for path in turn if self._is_changed(path)])

    def _is_changed(self, path: Path) -> bool:
        try:
            return _stamp(path) != self._stamps[path]
        except DataError:
            return path.suffix != CACHED  # what is mapped stays when its name is removed

    def compare(self) -> tuple[str, ...]:
        """Compare the sampled blocks of all token files, whatever their times, and of changed files of the index cache.

        Returns a remark on each file that was written to or replaced without a change that is seen. Raises DataError,
        with the name and what has changed, for any other.
        """
        return self._accept([path for path in self.paths if path.suffix != CACHED or self._is_changed(path)])

    def _accept(self, paths: Iterable[Path]) -> tuple[str, ...]:
        remarks = []
        for path in paths:
            content = sampled_content(path, self._most)
            if content != self._contents[path]:
                raise DataError(
                    f"{_noun(path)} {path} has changed since the run began: {self._contents[path]} then, {content} "
                    "now. Steps since the last check may have read other tokens; what was saved before is not "
                    "affected: restore the file (a start builds an index again) and start from the newest checkpoint"
                )
            if (stamp := _stamp(path)) != self._stamps[path]:
                what = "replaced" if stamp[1] != self._stamps[path][1] else "written to or touched"
                remarks.append(
                    f"{_noun(path)} {path} was {what} during the run; its size and the sampled blocks are the same, so "
                    "the run goes on"
                )
                self._stamps[path] = stamp
        return tuple(remarks)


def files_in_use(datasets: Iterable[TokenDataset | None]) -> tuple[Path, ...]:
    """Return the files that datasets read while they are in use: token files, and what is mapped of the index cache."""
    members = [*filter(None, datasets)]
    members += [member for dataset in members if isinstance(dataset, BlendedDataset) for member in dataset.members]
    prefixes = [member.file.prefix for member in members if isinstance(member, GPTDataset)]
    holders = [
        part for one in members for part in (one, getattr(one, "index", None), getattr(one, "file", None)) if part
    ]
    arrays = [array for holder in holders for array in vars(holder).values() if isinstance(array, np.memmap)]
    cached = [Path(str(array.filename)) for array in arrays]
    return (*(path(prefix) for prefix in prefixes for path in (bin_path, idx_path)), *cached)


def _noun(path: Path) -> str:
    return "index" if path.suffix == CACHED else "token file"


def _stamp(path: Path) -> Stamp:
    """Return size, inode and times of a file; the last one cannot be set. Raises DataError if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}") from None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

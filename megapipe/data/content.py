"""Contents of data and tokenizer files as short texts: equal for equal files, whatever their paths.

`SourceFiles` compares the token files that a run reads with what they were at its start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path

from megapipe.config.files import parse_blend
from megapipe.data.blend import BlendedDataset
from megapipe.data.dataset import TokenDataset
from megapipe.data.fingerprint import INDEX_BLOCKS, sampled_checksum
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import bin_path, idx_path
from megapipe.errors import DataError

TOKEN_BLOCKS = (64, 1 << 12)  # number and bytes of the blocks that are read of a .bin: all of up to 256 KiB
LEAST_BLOCKS = 4  # of a file in a large blend
BLOCKS_OF_A_BLEND = 1024  # of all its files together, so that a start stays short
# of a tokenizer's folder, which may hold a whole model
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".bpe")
WEIGHT_INDEX = ".index.json"
MOST_LOOKS = 256  # files of a large blend whose size and time are looked at in one call, in turn
Stamp = tuple[int, int, int]


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


def sampled_content(path: Path, most: int, blocks: tuple[int, int] = TOKEN_BLOCKS) -> str:
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
            content = one.read_bytes()
            named = one.name if path.is_dir() else ""
            whole.update(f"{named} {len(content)}\n".encode() + content)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"sha256 {whole.hexdigest()[:16]}"


class SourceFiles:
    """Files with their state at the start: size, time and inode, and size and checksum of sampled blocks.

    A file whose time or inode alone has changed is accepted if the sampled blocks are the same. Raises DataError if
    one cannot be read.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self.paths = tuple(dict.fromkeys(paths))
        self._most = max(LEAST_BLOCKS, BLOCKS_OF_A_BLEND // max(1, len(self.paths)))
        try:
            self._stamps = {path: _stamp(path) for path in self.paths}
        except OSError as error:
            raise DataError(f"cannot read token file {error.filename}: {error.strerror}") from None
        self._contents = {path: sampled_content(path, self._most) for path in self.paths}
        self._turn = cycle(self.paths)

    def look(self) -> tuple[str, ...]:
        """Compare sizes, times and inodes, of at most MOST_LOOKS files. Returns and raises as `compare`."""
        found = []
        for path in islice(self._turn, min(MOST_LOOKS, len(self.paths))):
            try:
                changed = _stamp(path) != self._stamps[path]
            except OSError:
                changed = True
            if changed:
                found.append(path)
        return self._accept(found)

    def compare(self) -> tuple[str, ...]:
        """Compare the sampled blocks of all files, whatever their times.

        Returns a remark on each file that was written to or replaced without a change that is seen. Raises DataError,
        with the name and what has changed, for any other.
        """
        return self._accept(self.paths)

    def _accept(self, paths: Iterable[Path]) -> tuple[str, ...]:
        remarks = []
        for path in paths:
            content = sampled_content(path, self._most)
            if content != self._contents[path]:
                raise DataError(
                    f"token file {path} has changed since the run began: {self._contents[path]} then, {content} now. "
                    "Steps since the last check may have read other tokens; what was saved before is not affected: "
                    "restore the file and start again from the newest checkpoint"
                )
            try:
                stamp = _stamp(path)
            except OSError as error:
                raise DataError(f"cannot read token file {path}: {error.strerror}") from None
            if stamp != self._stamps[path]:
                what = "replaced" if stamp[2] != self._stamps[path][2] else "written to or touched"
                remarks.append(
                    f"token file {path} was {what} during the run; its size and the sampled blocks are the same, so "
                    "the run goes on"
                )
                self._stamps[path] = stamp
        return tuple(remarks)


def files_in_use(datasets: Iterable[TokenDataset | None]) -> tuple[Path, ...]:
    """Return the files that datasets read while they are in use; conversations are kept from the start."""
    members: list[TokenDataset] = []
    for dataset in filter(None, datasets):
        members += dataset.members if isinstance(dataset, BlendedDataset) else [dataset]
    prefixes = [member.file.prefix for member in members if isinstance(member, GPTDataset)]
    return tuple(path(prefix) for prefix in prefixes for path in (bin_path, idx_path))


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino

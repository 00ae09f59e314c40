"""`SourceFiles`: the token files that a run reads, compared during the run with what they were at its start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

from megapipe.data.blend import BlendedDataset
from megapipe.data.content import BLOCKS_OF_A_BLEND, LEAST_BLOCKS, sampled_content
from megapipe.data.dataset import TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import bin_path, idx_path
from megapipe.errors import DataError

MOST_LOOKS = 256  # files of a large blend whose size and time are looked at in one call, in turn
Stamp = tuple[int, int, int]


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

#!/usr/bin/env python3
"""What a checkpoint holds: step, grid, position, files and tensors; with --verify every checksum is computed again.

python tools/inspect_checkpoint.py checkpoints
python tools/inspect_checkpoint.py checkpoints --step 100 --tensors --verify
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe.checkpoint.folder import CheckpointFolder, find_checkpoint, open_folder
from megapipe.checkpoint.verify import damage
from megapipe.errors import CheckpointError, MegapipeError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("path", type=Path, help="directory given to --save, or the folder of one step")
    parser.add_argument("--step", type=int, help="step to look at (default: the newest complete one)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--verify", action="store_true", help="read all files and check all checksums")
    return parser


def chosen(path: Path, step: int | None) -> CheckpointFolder:
    if step is None and (path / "manifest.json").exists():
        return open_folder(path)
    found = find_checkpoint(path, step)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    return found


def summary(folder: CheckpointFolder) -> Iterator[str]:
    manifest = folder.manifest
    yield from folder.remarks
    size = f"{len(manifest.tensors)} tensors, {manifest.num_bytes:,} bytes"
    yield f"{folder.path}: step {manifest.step}, {size}, written by {manifest.world_size} ranks"
    for key, value in manifest.state.items():
        yield f"  {key}: {value}"
    for name, file in manifest.files.items():
        yield f"  {name}: {file.num_bytes:,} bytes"


def tensor_lines(folder: CheckpointFolder) -> Iterator[str]:
    for name, tensor in folder.manifest.tensors.items():
        yield f"  {name}  {tensor.dtype} {list(tensor.shape)}  {tensor.num_bytes:,} bytes in {len(tensor.boxes)} boxes"


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        folder = chosen(arguments.path, arguments.step)
        for line in summary(folder):
            print(line)
        for line in tensor_lines(folder) if arguments.tensors else ():
            print(line)
        if not arguments.verify:
            return 0
        found = list(damage(folder))
    except MegapipeError as error:
        print(f"inspect_checkpoint: {error}", file=sys.stderr)
        return error.exit_code
    for line in found:
        print(line, file=sys.stderr)
    print("damaged" if found else "all checksums hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Show what a checkpoint holds: step, grid, position, files and tensors; verify its checksums; compare it with another.

python tools/inspect_checkpoint.py checkpoints
python tools/inspect_checkpoint.py checkpoints --step 100 --tensors --verify
python tools/inspect_checkpoint.py checkpoints/step_00000100 --diff other/step_00000100

Exit code: 0; 1 if --verify finds damage or --diff finds a tensor that differs (other differences are shown and do not
count); 2 if a checkpoint cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.checkpoint.folder import CheckpointFolder, find_checkpoint, open_folder
from megapipe.checkpoint.verify import damage
from megapipe.errors import CheckpointError, MegapipeError

if TYPE_CHECKING:
    from megapipe.checkpoint.compare import TensorComparison


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("path", type=Path, help="directory given to --save, or the folder of one step")
    parser.add_argument("--step", type=int, help="step to look at (default: the newest complete one)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor; with --diff also the equal ones")
    parser.add_argument("--verify", action="store_true", help="read all files and check all checksums")
    parser.add_argument("--diff", type=Path, metavar="OTHER", help="compare all tensors with those of this checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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


def content(folder: CheckpointFolder, with_tensors: bool) -> dict[str, Any]:
    """Return the same for --json."""
    manifest = folder.manifest
    found: dict[str, Any] = {
        "path": str(folder.path),
        "remarks": list(folder.remarks),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "bytes": manifest.num_bytes,
        "state": manifest.state,
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
    }
    if with_tensors:
        found["tensors"] = {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.num_bytes,
                "boxes": len(tensor.boxes),
            }
            for name, tensor in manifest.tensors.items()
        }
    return found


def difference_line(found: TensorComparison) -> str:
    if None in found.shapes:
        side = 0 if found.shapes[1] is None else 1
        return (
            f"  {found.name}: only in the {('first', 'second')[side]}, {found.dtypes[side]} "
            f"{list(found.shapes[side] or ())}"
        )
    if found.shapes[0] != found.shapes[1]:
        return (
            f"  {found.name}: shape {list(found.shapes[0] or ())} in the first, {list(found.shapes[1] or ())} in the "
            "second"
        )
    dtype = (
        ""
        if found.dtypes[0] == found.dtypes[1]
        else f"{found.dtypes[0]} in the first, {found.dtypes[1]} in the second; "
    )
    if found.num_equal == found.num_elements:
        return f"  {found.name}: {dtype}all {found.num_elements:,} elements bit-equal"
    shown = f"{found.num_equal:,} of {found.num_elements:,} elements bit-equal, largest difference {found.max_abs:.3e}"
    return f"  {found.name}: {dtype}{shown}, relative {found.max_rel:.3e}"


def state_differences(first: CheckpointFolder, second: CheckpointFolder) -> dict[str, tuple[Any, Any]]:
    here, there = first.manifest.state, second.manifest.state
    return {
        key: (here.get(key), there.get(key)) for key in here.keys() | there.keys() if here.get(key) != there.get(key)
    }


def as_values(found: TensorComparison) -> dict[str, Any]:
    """Replace infinities, which JSON does not have, by strings."""
    values = asdict(found) | {"num_elements": found.num_elements}
    return {key: "infinite" if value == math.inf else value for key, value in values.items()}


def show_difference(first: CheckpointFolder, second: CheckpointFolder, with_equal: bool, as_json: bool) -> bool:
    """Print how two checkpoints differ, and return True if a tensor does."""
    # imports torch, which takes seconds; listing and verifying do without
    from megapipe.checkpoint.compare import compare

    states, num_equal, differing = state_differences(first, second), 0, []
    if not as_json:
        print(f"first   {first.path}\nsecond  {second.path}")
        for key, (here, there) in sorted(states.items()):
            print(f"  {key}: {here} in the first, {there} in the second")
    for found in compare(first, second):
        num_equal += found.is_equal
        if not found.is_equal:
            differing.append(found)
        if not as_json and (with_equal or not found.is_equal):
            print(difference_line(found), flush=True)
    if as_json:
        content = {"first": str(first.path), "second": str(second.path), "state": states, "num_equal": num_equal}
        print(json.dumps(content | {"different": [as_values(found) for found in differing]}))
    else:
        print(f"{num_equal} tensors bitwise equal, {len(differing)} not")
    return bool(differing)


def show(folder: CheckpointFolder, arguments: argparse.Namespace) -> bool:
    """Print what the checkpoint holds, and return True if it is damaged."""
    found = list(damage(folder)) if arguments.verify else []
    if arguments.json:
        print(json.dumps(content(folder, arguments.tensors) | ({"damage": found} if arguments.verify else {})))
        return bool(found)
    for line in (*summary(folder), *(tensor_lines(folder) if arguments.tensors else ())):
        print(line)
    for line in found:
        print(line, file=sys.stderr)
    if arguments.verify:
        print("damaged" if found else "all checksums hold")
    return bool(found)


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        folder = chosen(arguments.path, arguments.step)
        if arguments.diff is not None:
            return int(show_difference(folder, chosen(arguments.diff, None), arguments.tensors, arguments.json))
        return int(show(folder, arguments))
    except MegapipeError as error:
        print(f"inspect_checkpoint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

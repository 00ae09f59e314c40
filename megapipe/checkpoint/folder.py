"""The folders of a checkpoint root: their names, which of them are complete, what an interrupted save left behind. Imports no torch."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import Manifest, read_manifest
from megapipe.checkpoint.rollbacks import ROLLBACKS_NAME, abandoned_by, read_rollbacks, rollbacks_before
from megapipe.errors import CheckpointError

LATEST_NAME = "latest"
CONFIG_NAME = "config.yaml"
TOKENIZER_NAME = "tokenizer"
STEP_FOLDER = re.compile(r"step_(\d{8,})")
TORN = re.compile(r"\.(step_\d{8,}|latest|starts\.json|rollbacks\.json)\.(tmp|removed)-[0-9a-f]+")


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of_folder(path: Path) -> int:
    """The step that a checkpoint's name says."""
    match = STEP_FOLDER.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def temporary_name(name: str, token: str) -> str:
    """What a folder or file is called while it is written."""
    return f".{name}.tmp-{token}"


def doomed_name(name: str, token: str) -> str:
    """What a checkpoint is called while it is removed, so that half of one never looks like one."""
    return f".{name}.removed-{token}"


@dataclass(frozen=True)
class CheckpointFolder:
    """A complete checkpoint. remarks: what was passed over to come to it, for the person who started the run."""

    path: Path
    step: int
    manifest: Manifest
    remarks: tuple[str, ...] = ()


def steps_in(root: Path) -> list[int]:
    """Steps that have a folder, complete or not, ascending."""
    if not root.is_dir():
        return []
    return sorted(
        int(match[1]) for entry in root.iterdir() if (match := STEP_FOLDER.fullmatch(entry.name)) and entry.is_dir()
    )


def open_folder(path: Path) -> CheckpointFolder:
    """The checkpoint in a folder; looks at manifest and file sizes, not at contents.

    Raises CheckpointError naming the file that is missing, truncated or damaged.
    """
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is incomplete: {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from None
        if found != file.num_bytes:
            raise CheckpointError(f"{path} is damaged: {name} has {found} bytes, it was written with {file.num_bytes}")
    return CheckpointFolder(path, manifest.step, manifest)


def find_checkpoint(root: Path, step: int | None = None, below: int | None = None) -> CheckpointFolder | None:
    """The checkpoint of this step, or the newest complete one, or the newest complete one before step `below`; None if there is no
    checkpoint at all.

    Without a step, damaged ones are passed over, each with a remark. Raises CheckpointError if the step asked for is missing or damaged,
    or if all that is there is damaged.
    """
    there = [found for found in steps_in(root) if below is None or found < below]
    if step is not None:
        if step not in there:
            raise CheckpointError(f"--ckpt-step {step}: {root} has no {folder_name(step)}; it holds {_listed(there)}")
        return open_folder(root / folder_name(step))
    remarks: list[str] = []
    rollbacks = read_rollbacks(root)
    for candidate in reversed(there):
        try:
            found = open_folder(root / folder_name(candidate))
        except CheckpointError as error:
            remarks.append(f"passed over: {error}")
            continue
        if abandoned_by(rollbacks, found.step, rollbacks_before(found.manifest.state)) is not None:
            remarks.append(f"passed over: {found.path}, saved on a way that was given up ({ROLLBACKS_NAME})")
            continue
        named = read_latest(root)
        if named is not None and named != found.path.name:
            remarks.append(f"{root / LATEST_NAME} names {named}; the newest complete checkpoint is {found.path.name}")
        return CheckpointFolder(found.path, found.step, found.manifest, tuple(remarks))
    if remarks:
        raise CheckpointError(f"{root} holds no complete checkpoint:\n  " + "\n  ".join(remarks))
    return None


def read_latest(root: Path) -> str | None:
    """The folder that `latest` names; None if there is no such file or it makes no sense."""
    try:
        text = (root / LATEST_NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if STEP_FOLDER.fullmatch(text) else None


def clean_torn(root: Path) -> tuple[str, ...]:
    """Remove what interrupted saves and removals left in the root and say what it was; to be called when no save is under way there.

    Raises CheckpointError if something cannot be removed.
    """
    torn = sorted(entry for entry in root.iterdir() if TORN.fullmatch(entry.name)) if root.is_dir() else []
    for entry in torn:
        try:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except OSError as error:
            raise CheckpointError(
                f"{entry}, left by an interrupted save, cannot be removed: {error.strerror}"
            ) from None
    return tuple(
        f"removed {entry}, left by an interrupted {'removal' if '.removed-' in entry.name else 'save'}"
        for entry in torn
    )


def prepare_root(root: Path, step: int, damaged: Sequence[int] = ()) -> tuple[str, ...]:
    """Make the root ready for a run that starts at `step` and will save there; says what was done. No save may be under way there.

    damaged: steps whose checkpoints proved damaged when they were read; they are set aside under another name. Raises CheckpointError if
    the root cannot be written to, holds complete checkpoints of later steps, which the run would run into and a restart would load, or
    only damaged ones while the run starts from zero.
    """
    try:
        Disk().make_parents(root / "probe")
        probe = root / temporary_name(LATEST_NAME, "0")
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written to: {error.strerror} (errno {error.errno})") from None
    remarks = (*clean_torn(root), *(set_aside(root, other) for other in damaged))
    later = [other for other in steps_in(root) if other > step and is_complete(root / folder_name(other))]
    if later:
        raise CheckpointError(
            f"--save {root} already holds {_listed(later)}, later than step {step} where this run starts: saving never overwrites, and the "
            "next start would load them. Give --load to go on from the newest, another --save, or move them away"
        )
    if step == 0 and any(steps_in(root)):
        raise CheckpointError(
            f"--save {root} holds {_listed(steps_in(root))}, damaged, and this run starts at step 0: give another --save, or move them away"
        )
    return remarks


def set_aside(root: Path, step: int) -> str:
    """Take a damaged checkpoint's good name, so that nothing loads it or believes that it is saved; says so. Raises CheckpointError."""
    path = root / folder_name(step)
    damaged = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
    try:
        Disk().rename(path, damaged)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged and cannot be renamed: {error.strerror}; move it away") from None
    return f"{path}, damaged, is now called {damaged.name}"


def is_complete(path: Path) -> bool:
    """The folder holds a checkpoint with all its files in full length."""
    try:
        open_folder(path)
    except CheckpointError:
        return False
    return True


def _listed(steps: list[int]) -> str:
    names = [folder_name(step) for step in steps]
    shown = names if len(names) <= 6 else [*names[:2], "...", *names[-3:]]
    return ", ".join(shown) if shown else "no checkpoint"

"""A run's directory of checkpoints: which are complete, which are kept, which a rollback abandoned. Imports no torch.

`rollbacks.json` next to the checkpoints holds the rollbacks of the run. An entry takes effect when the file is renamed
into place, whatever happens to the process afterwards. It also identifies the checkpoints that the rollback abandoned:
their step is later than the one rolled back to, and their own state counts fewer rollbacks.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megapipe.checkpoint.disk import Disk, read_regular, reason, require_regular, temporary_name
from megapipe.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from megapipe.config.config import Config
from megapipe.config.files import DataConfig
from megapipe.config.load import from_yaml
from megapipe.errors import CheckpointError, ConfigError, DamageError, MegapipeError, NewerVersionError, RemovedError
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.registry import EXTENSIONS

T = TypeVar("T")
Folder = TypeVar("Folder", bound="CheckpointFolder | None")
LATEST_NAME = "latest"
CONFIG_NAME = "config.yaml"
TOKENIZER_NAME = "tokenizer"
ROLLBACKS_NAME = "rollbacks.json"
STEP_FOLDER = re.compile(r"step_(\d{8,})")
READ_ATTEMPTS = 20  # of a reader beside a run that removes old checkpoints
# files and folders of interrupted saves and removals
LEFTOVER = re.compile(r"\.(step_\d{8,}|latest|starts\.json|rollbacks\.json)\.(tmp|removed)-[0-9a-f]+")


@dataclass(frozen=True)
class CheckpointFolder:
    """A complete checkpoint. remarks: for the user, for example about damaged checkpoints that were skipped."""

    path: Path
    step: int
    manifest: Manifest
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Retention:
    """The rule for which checkpoints are kept: the newest `last`, and every one whose step is a multiple of `every`.

    Without `last` and `every` all are kept; with `every` alone the newest one is kept too.
    """

    last: int | None = None
    every: int | None = None

    def to_remove(self, complete: Sequence[int], just_saved: int) -> tuple[int, ...]:
        """Return which of the complete checkpoints' steps to remove, ascending; never the one just saved."""
        if self.last is None and self.every is None:
            return ()
        older = sorted(complete)[: max(0, len(complete) - (self.last or 1))]
        return tuple(step for step in older if step != just_saved and (self.every is None or step % self.every))


KEEP_ALL = Retention()


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of_folder(path: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step_"))


def steps_in(root: Path) -> list[int]:
    """Return the steps that have a folder, complete or not, ascending. Raises CheckpointError."""
    try:
        entries = list(root.iterdir()) if root.is_dir() else []
        return sorted(step_of_folder(path) for path in entries if STEP_FOLDER.fullmatch(path.name) and path.is_dir())
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {reason(error)}") from None


def has_saved(root: Path) -> bool:
    """Return True if a run has saved in the root, even if all checkpoints are gone. Raises CheckpointError."""
    return bool(steps_in(root)) or read_latest(root) is not None


@dataclass(frozen=True)
class Rollback:
    """One rollback."""

    number: int  # counted from 1
    from_step: int  # last step of the abandoned part of the run
    to_step: int  # step that the run resumed from
    first_sample: int  # the samples [first_sample, past_sample) of the data set are skipped from then on
    past_sample: int
    reason: str
    time: float  # Unix seconds
    account: dict[str, Any]  # of the run after the rollback (train.state.Account)


ROLLBACK_COUNTS = ("number", "from_step", "to_step", "first_sample", "past_sample")


def read_rollbacks(root: Path) -> tuple[Rollback, ...]:
    """Return all rollbacks, oldest first, or none if there is no file. Raises CheckpointError for a damaged file."""
    path = root / ROLLBACKS_NAME
    try:
        entries = tuple(Rollback(**entry) for entry in json.loads(read_regular(path)))
        for entry in entries:
            if (
                not all(type(getattr(entry, name)) is int for name in ROLLBACK_COUNTS)
                or type(entry.account) is not dict
            ):
                raise TypeError("an entry has values of wrong types")
        return entries
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, RecursionError) as error:  # ignoring it would load abandoned weights
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def write_rollback(root: Path, rollback: Rollback, disk: Disk) -> None:
    """Append a rollback. Raises OSError, CheckpointError."""
    entries = [asdict(entry) for entry in (*read_rollbacks(root), rollback)]
    disk.replace_file(root / ROLLBACKS_NAME, (json.dumps(entries, indent=1) + "\n").encode())


def abandoned_by(rollbacks: Sequence[Rollback], step: int, num_rollbacks: int) -> Rollback | None:
    """Return the rollback that abandoned step `step` of a run that had made `num_rollbacks`, or None."""
    return next((entry for entry in rollbacks if entry.number > num_rollbacks and step > entry.to_step), None)


def rollbacks_before(state: dict[str, Any]) -> int:
    """Return the number of rollbacks that a checkpoint's state counts. Raises CheckpointError for anything else."""
    try:
        return int((state.get("account") or {}).get("rollbacks", 0))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of a checkpoint has an account that cannot be understood: {error}") from None


def account_of(state: dict[str, Any], rollbacks: Sequence[Rollback]) -> dict[str, Any] | None:
    """Return the account with which a run resumes from a checkpoint's state.

    That of the last rollback if it came after the checkpoint, else the checkpoint's own; None if an older version wrote
    the checkpoint without one.
    """
    before = rollbacks_before(state)
    is_newer = bool(rollbacks) and rollbacks[-1].number > before
    if is_newer and abandoned_by(rollbacks, int(state["training"]["step"]), before) is None:
        return rollbacks[-1].account
    return state.get("account")


def open_folder(path: Path) -> CheckpointFolder:
    """Open the checkpoint in a folder, checking manifest and file sizes, not contents.

    Raises CheckpointError naming the file that is missing, truncated or damaged.
    """
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        try:
            found = (path / name).stat()
            require_regular(found.st_mode)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is incomplete: {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from None
        if found.st_size != file.num_bytes:
            raise CheckpointError(f"{path} is damaged: {name} has {found.st_size} bytes, expected {file.num_bytes}")
    if STEP_FOLDER.fullmatch(path.name) and step_of_folder(path) != manifest.step:
        raise CheckpointError(f"{path} is damaged or was renamed: its {MANIFEST_NAME} is of step {manifest.step}")
    return CheckpointFolder(path, manifest.step, manifest)


def complete_steps(root: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending. Raises NewerVersionError if one cannot be judged."""
    found = []
    for step in steps_in(root):
        try:
            found.append(open_folder(root / folder_name(step)).step)
        except NewerVersionError:
            raise
        except CheckpointError:
            continue
    return found


def find_checkpoint(root: Path, step: int | None = None, below: int | None = None) -> CheckpointFolder | None:
    """Return the checkpoint of `step`, or the newest complete one (before step `below`), or None.

    Without `step`, damaged checkpoints are skipped, each with a remark, and one that is removed meanwhile has the
    search begin again. Raises CheckpointError if the given step is missing or damaged, if all checkpoints are damaged,
    if `latest` exists but no checkpoint, if a newer version of megapipe wrote one that would have to be passed over, or
    if root is not a folder of checkpoints but one of them, or holds such folders.
    """
    candidates = [found for found in steps_in(root) if below is None or found < below]
    if step is not None:
        if step not in candidates:
            held = _listed(candidates)
            raise CheckpointError(f"--ckpt-step {step}: {root} has no {folder_name(step)}; it holds {held}")
        return open_folder(root / folder_name(step))
    remarks: list[str] = []
    if not candidates and below is None:
        check_is_root(root)
        latest = read_latest(root)
        if latest is not None:
            if steps_in(root):
                return find_checkpoint(root, step, below)
            raise CheckpointError(
                f"{root / LATEST_NAME} names {latest}, but the folders of all checkpoints are gone from {root}; put "
                f"them back, or remove {root / LATEST_NAME} to start from step 0"
            )
    rollbacks = read_rollbacks(root)
    for candidate in reversed(candidates):
        path = root / folder_name(candidate)
        try:
            found = open_folder(path)
        except NewerVersionError:
            raise
        except CheckpointError as error:
            if not path.exists():
                return find_checkpoint(root, step, below)
            remarks.append(f"skipped: {error}")
            continue
        if abandoned_by(rollbacks, found.step, rollbacks_before(found.manifest.state)) is not None:
            remarks.append(f"skipped: {found.path} was abandoned by a rollback ({ROLLBACKS_NAME})")
            continue
        latest = read_latest(root)
        if latest is not None and latest != found.path.name:
            remarks.append(f"{root / LATEST_NAME} names {latest}; the newest complete checkpoint is {found.path.name}")
        return replace(found, remarks=tuple(remarks))
    if remarks:
        raise CheckpointError(f"{root} holds no complete checkpoint:\n  " + "\n  ".join(remarks))
    return None


def read_newest(find: Callable[[], Folder], read: Callable[[Folder], T]) -> T:
    """Return what `read` makes of the checkpoint that `find` returns. Both are called again, up to READ_ATTEMPTS times
    in all, if the checkpoint was removed meanwhile, as by a run with --keep-last; errors are raised otherwise.
    """
    for _ in range(READ_ATTEMPTS - 1):
        found = find()
        try:
            return read(found)
        except RemovedError:
            continue  # raised by all ranks alike
        except MegapipeError:
            if found is None or found.path.exists():
                raise
    return read(find())


def check_is_root(root: Path) -> None:
    """Raise CheckpointError if a folder without checkpoints is one itself, or holds folders with checkpoints."""
    if (root / MANIFEST_NAME).exists() or STEP_FOLDER.fullmatch(root.name):
        step = f" and --ckpt-step {step_of_folder(root)}" if STEP_FOLDER.fullmatch(root.name) else ""
        raise CheckpointError(f"{root} is a single checkpoint, not a folder of them; give {root.parent}{step}")
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is not a folder; give the folder that --save wrote checkpoints to")
    roots = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(CheckpointError):  # one without permission to read it, such as lost+found
            if not path.name.startswith("abandoned-") and steps_in(path):
                roots.append(path)
    if roots:
        others = f" (or one of {len(roots) - 1} others there)" if len(roots) > 1 else ""
        raise CheckpointError(f"{root} holds no checkpoint, but {roots[-1]} does{others}; give that folder")


def read_latest(root: Path) -> str | None:
    """Return the folder that `latest` names, or None if the file is missing or invalid."""
    try:
        text = read_regular(root / LATEST_NAME).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if STEP_FOLDER.fullmatch(text) else None


def checkpoint_config(root: Path, step: int | None = None) -> tuple[Config, Path]:
    """Return the saved configuration and the checkpoint's folder.

    Raises CheckpointError if there is no checkpoint or its configuration cannot be read.
    """
    found = find_checkpoint(root, step)
    if found is None:
        if not root.exists():
            raise CheckpointError(f"{root} does not exist: give the folder of a run or of a Hugging Face model")
        raise CheckpointError(f"{root} holds no checkpoint to take the model from; give --num-layers and so on")
    return listed_config(found), found.path


def saved_config(folder: CheckpointFolder) -> Config:
    """Return a checkpoint's configuration with vocab_size set to the rows of its embedding. Raises CheckpointError.

    These are the rows that were trained, whether the run had them from --vocab-size or from its tokenizer.
    """
    config = listed_config(folder)
    return replace(config, model=replace(config.model, vocab_size=vocabulary_of(folder), padded_vocab_size=None))


def listed_config(folder: CheckpointFolder) -> Config:
    """Return a checkpoint's configuration. Raises ConfigError if it cannot be read, with the extensions it needs."""
    text = read_listed(folder, CONFIG_NAME)
    try:
        return from_yaml(text, str(folder.path / CONFIG_NAME))
    except ConfigError as error:
        raise ConfigError(f"{error}{missing_extensions(folder)}") from None


def saved_tokenizer(path: Path, data: DataConfig) -> dict[str, Any]:
    """Return the fields of the data section that name a checkpoint's tokenizer: its copy there, else the run's own
    files. data: of the run.
    """
    if (path / TOKENIZER_NAME).exists():
        return {"tokenizer_type": data.tokenizer_type, "tokenizer_model": str(path / TOKENIZER_NAME)}
    files = {"tokenizer_model": data.tokenizer_model, "vocab_file": data.vocab_file, "merge_file": data.merge_file}
    return {"tokenizer_type": data.tokenizer_type, **files}


def missing_extensions(folder: CheckpointFolder) -> str:
    """Return the end of a message that names the extensions that a checkpoint was saved with and that are missing."""
    loaded = {row for one in EXTENSIONS.loaded.values() for row in one.provides}
    saved = [one for one in folder.manifest.state.get("extensions", []) if not loaded.issuperset(one["provides"])]
    words = [f"--extension {one['name']} ({', '.join(one['provides'])})" for one in saved]
    return f"; {folder.path} was saved with {' and '.join(words)}: give it here too" if words else ""


def vocabulary_of(folder: CheckpointFolder) -> int:
    """Return the rows of a checkpoint's embedding. Raises CheckpointError."""
    for name, saved in folder.manifest.tensors.items():
        if name.endswith(f"/{WORD_EMBEDDING}"):
            return saved.shape[0]
    raise CheckpointError(f"{folder.path} holds no tensor {WORD_EMBEDDING}")


def read_listed(folder: CheckpointFolder, name: str) -> str:
    """Return the text of a file that the manifest lists, compared with its checksum. Raises CheckpointError."""
    path, listed = folder.path / name, folder.manifest.files.get(name)
    if listed is None:
        raise CheckpointError(f"{folder.path} is damaged: its {MANIFEST_NAME} does not list {name}")
    try:
        content = read_regular(path)
        found = zlib.crc32(content)
        if found != listed.crc32:
            changed = f"its checksum is {found:08x}, expected {listed.crc32:08x}"
            raise DamageError(f"{path} is damaged or was changed: {changed}")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DamageError(f"{path} cannot be read: {error}") from None


def prepare_root(root: Path, step: int, damaged: Sequence[int] = (), disk: Disk | None = None) -> tuple[str, ...]:
    """Prepare the root for a run that starts at `step` and saves there. Returns what was done, for the user.

    Must not be called while a save is in progress. damaged: steps whose checkpoints proved damaged when they were
    read; they are renamed, so that nothing loads them or counts on them. Raises CheckpointError if the root cannot be
    written, if it holds complete checkpoints of later steps (a restart would load them), or only damaged ones while
    the run starts at 0.
    """
    disk = disk or Disk()
    try:
        disk.make_parents(root / "probe")
        probe = root / temporary_name(LATEST_NAME)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written: {reason(error)}") from None
    if root.is_dir() and not steps_in(root) and (root / MANIFEST_NAME).exists():
        check_is_root(root)
    complete = complete_steps(root)  # before anything is changed, since it may be refused
    disk.may_change()
    remarks = [*remove_leftovers(root)]
    for other in damaged:
        path = root / folder_name(other)
        renamed = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
        try:
            disk.rename(path, renamed)
        except OSError as error:
            raise CheckpointError(f"{path} is damaged and cannot be renamed: {error.strerror}; move it away") from None
        remarks.append(f"renamed {path}, which is damaged, to {renamed.name}")
    later = [other for other in complete if other > step and other not in damaged]
    if later:
        raise CheckpointError(
            f"--save {root} already holds {_listed(later)}, later than step {step} where this run starts. Saving never "
            "overwrites, and the next start would load them; use --load to resume from the newest, choose another "
            "--save, or move them away"
        )
    if step == 0 and any(steps_in(root)):
        raise CheckpointError(
            f"--save {root} holds only damaged checkpoints ({_listed(steps_in(root))}), and this run starts at step 0; "
            "choose another --save, or move them away"
        )
    return tuple(remarks)


def remove_leftovers(root: Path) -> tuple[str, ...]:
    """Remove what interrupted saves and removals left in the root. Must not be called while a save is in progress.

    Returns a line for each. Raises CheckpointError if something cannot be removed.
    """
    leftovers = sorted(entry for entry in root.iterdir() if LEFTOVER.fullmatch(entry.name)) if root.is_dir() else []
    remarks = []
    for entry in leftovers:
        try:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except OSError as error:
            left = f"{entry}, left by an interrupted save,"
            raise CheckpointError(f"{left} cannot be removed: {error.strerror}") from None
        remarks.append(f"removed {entry}, left by an interrupted {'removal' if '.removed-' in entry.name else 'save'}")
    return tuple(remarks)


def remove_old(disk: Disk, root: Path, keep: Retention, just_saved: int) -> tuple[Path, ...]:
    """Remove the complete checkpoints that `keep` does not keep; damaged ones stay. Raises OSError, NewerVersionError.

    Each is renamed first, so that a crash during the removal leaves no partial checkpoint under a valid name.
    """
    if keep == KEEP_ALL:
        return ()
    removed = []
    for step in keep.to_remove(complete_steps(root), just_saved):
        path = root / folder_name(step)
        renamed = root / f".{path.name}.removed-{secrets.token_hex(8)}"
        disk.rename(path, renamed)
        disk.remove(renamed)
        removed.append(path)
    return tuple(removed)


def move_abandoned(root: Path, disk: Disk | None = None) -> tuple[str, ...]:
    """Move checkpoints abandoned by rollback number N to `root/abandoned-N`. Returns a line for each.

    `root/abandoned-N` is a root itself: --load takes it, and nothing removes checkpoints there. After a crash at any
    point the function can be called again. Raises CheckpointError.
    """
    rollbacks, disk = read_rollbacks(root), disk or Disk()
    if not rollbacks:
        return ()
    kept, remarks = [], []
    try:
        steps = complete_steps(root)  # nothing loads damaged ones
        made = [rollbacks_before(open_folder(root / folder_name(step)).manifest.state) for step in steps]
        for step, before in zip(steps, made, strict=True):
            path = root / folder_name(step)
            rollback = abandoned_by(rollbacks, step, before)
            if rollback is None:
                kept.append(path.name)
                continue
            target = root / f"abandoned-{rollback.number}" / path.name
            disk.make_parents(target)
            disk.may_change()
            path.rename(target)
            disk.sync_folder(target.parent)
            disk.sync_folder(root)
            remarks.append(f"moved to {target}: this checkpoint was abandoned by a rollback")
        if kept and read_latest(root) not in (None, kept[-1]):
            disk.replace_file(root / LATEST_NAME, f"{kept[-1]}\n".encode())
    except OSError as error:
        raise CheckpointError(f"abandoned checkpoints in {root} cannot be moved: {error}") from None
    return tuple(remarks)


def _listed(steps: list[int]) -> str:
    names = [folder_name(step) for step in steps]
    shown = names if len(names) <= 6 else [*names[:2], "...", *names[-3:]]
    return ", ".join(shown) if shown else "no checkpoint"

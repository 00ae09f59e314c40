"""`SaveLock`: one run at a time saves in a directory. Files `lock.N.json` in it, the highest N is the owner's.

It needs exclusive creation and atomic renames only, which NFS and Lustre have. The owner replaces its file every
BEAT_SECONDS, in a separate thread. A file that has not changed for DEAD_SECONDS, on the clock of the process that
watches it, is dead: the watcher creates the file N + 1, which only one process can do, and then removes lower ones. A
file that is released, or whose process is known to be gone, is taken over at once. N never falls, so an owner that was
paused finds a higher file when it wakes. It looks for one before every change that it makes (see `Disk`). Imports no
torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megapipe.checkpoint.disk import read_regular, reason, temporary_name
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, SaveRefusedError
from megapipe.monitor.process import host, process_space, process_state, start_ticks

LOCK_FILE = re.compile(r"lock\.(\d{1,15})\.json")
BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0
POLL_SECONDS = 0.5
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """The content of a lock file. beat: counts its replacements."""

    token: str
    host: str
    space: str  # of process ids
    pid: int
    ticks: int | None  # start of the process, unique together with pid
    job: str | None  # of SLURM, which ends all processes of a job before it starts the job again
    restarts: int
    started: float  # Unix seconds
    beat: int = 0
    released: bool = False

    @classmethod
    def here(cls, environment: Environment) -> Owner:
        """Return the owner that this process would be."""
        job = f"slurm {environment.run_id}" if environment.launcher == "slurm" and environment.run_id else None
        pid = os.getpid()
        ticks, restarts = start_ticks(pid), environment.restart_count
        return cls(secrets.token_hex(8), host(), process_space(), pid, ticks, job, restarts, time.time())

    def is_gone(self, own: Owner) -> bool:
        """Return True if it is known not to write any more."""
        if self.released or (self.job is not None and self.job == own.job and self.restarts < own.restarts):
            return True
        return own.space != "" and self.space == own.space and process_state(self.pid, self.ticks).has_ended

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host}, started {since}" + (f", job {self.job}" if self.job else "")


@dataclass(frozen=True)
class LockFile:
    """The newest lock file. owner: None if it cannot be read. mark: changes with every beat."""

    number: int
    owner: Owner | None
    mark: tuple[object, ...]


class SaveLock:
    """The lock as its owner holds it, until `release`. Any thread may `check`."""

    def __init__(self, root: Path, number: int, owner: Owner) -> None:
        self._root, self._number = root, number
        self._owner, self._beats = owner, 0
        self._inode = root.stat().st_ino
        self._writing = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._keep, name="save lock", daemon=True).start()

    @property
    def mark(self) -> str:
        """The lock's number and token, for `has_lock` on other ranks."""
        return f"{self._number} {self._owner.token}"

    def check(self) -> None:
        """Return if this process is still the owner. Raises SaveRefusedError, CheckpointError."""
        self._beat()  # a change of the folder, after which a client of NFS reads the folder again
        try:
            found = newest_lock(self._root)
        except OSError as error:
            raise CheckpointError(f"the lock of --save {self._root} cannot be read: {reason(error)}") from None
        if self._ended.is_set() or found is None or found.number != self._number or not self._is_own(found):
            self._ended.set()
            if found is None or found.number <= self._number:
                raise SaveRefusedError(
                    f"--save {self._root} was moved or removed while this run saved there; this run ends without "
                    "writing to a folder of that name. To continue, --load the folder where it is now"
                )
            by = "another run" if found.owner is None else f"the run of {found.owner}"
            raise SaveRefusedError(
                f"{by} has taken over --save {self._root}, since this one gave no sign of life for "
                f"{DEAD_SECONDS:.0f} s; this run ends without writing there"
            )

    def release(self) -> None:
        """Give the lock up; the next run need not wait."""
        if not self._ended.is_set():
            self._ended.set()
            self._beat(released=True)

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                found = newest_lock(self._root)
                if found is not None and found.number > self._number:
                    self._ended.set()
                    return
            self._beat()

    def _is_own(self, found: LockFile | None) -> bool:
        """Return True if the newest lock file is this run's, or if the locked folder has none."""
        if found is None:
            return self._root.is_dir() and self._root.stat().st_ino == self._inode
        return found.owner is None or found.owner.token == self._owner.token

    def _beat(self, released: bool = False) -> None:
        path = lock_path(self._root, self._number)
        with self._writing:
            if self._ended.is_set() and not released:
                return
            self._beats += 1
            content = asdict(self._owner) | {"beat": self._beats, "released": released}
            temporary = path.with_name(temporary_name("lock"))
            try:
                temporary.write_text(json.dumps(content))
                if self._is_own(newest_lock(self._root)):
                    os.replace(temporary, path)
                else:
                    temporary.unlink()
            except OSError:  # a full disk: the time of the file is a sign of life, too
                with suppress(OSError):
                    os.utime(path)
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)


def acquire(
    root: Path,
    own: Owner,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SaveLock:
    """Become the owner of a directory, which is created. say: prints a line if that takes long.

    Raises SaveRefusedError if another run holds it and lives, or CheckpointError if it cannot be written.
    """
    watched: LockFile | None = None
    since, number = 0.0, 1
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            found = newest_lock(root)
            number = 1 if found is None else found.number + 1
            if found is None or (found.owner is not None and found.owner.is_gone(own)):
                if take(root, number, own):
                    break
            elif watched is None:
                watched, since = found, clock()
                file, by = lock_path(root, found.number).name, found.owner or "an unknown run"
                waiting = f"waiting for a sign of life, at most {DEAD_SECONDS:.0f} s"
                say(f"--save {root} is locked by {by} ({file}); {waiting}")
            elif found.mark != watched.mark:
                raise SaveRefusedError(
                    f"--save {root} is in use by another run: {found.owner or 'unknown'}; end it first, or choose "
                    "another --save"
                )
            elif clock() - since < DEAD_SECONDS:
                sleep(POLL_SECONDS)
            elif take(root, number, own):
                say(f"took over --save {root}: no sign of life of {found.owner or 'its run'} for {DEAD_SECONDS:.0f} s")
                break
    except (NotADirectoryError, FileExistsError, PermissionError) as error:  # a restart would not help
        raise SaveRefusedError(f"--save {root} cannot be written: {reason(error)}; choose another --save") from None
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written: {reason(error)}") from None
    for path in [*root.glob(".lock.tmp-*"), *(lock_path(root, one) for one in numbers_in(root) if one < number)]:
        with suppress(OSError):
            path.unlink()
    return SaveLock(root, number, own)


def take(root: Path, number: int, own: Owner) -> bool:
    """Create a lock file unless it exists already. Atomic: of several processes, one succeeds. Raises OSError."""
    path, temporary = lock_path(root, number), root / temporary_name("lock")
    content = json.dumps(asdict(own))
    temporary.write_text(content)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in NO_LINKS:
            with suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                file.write(content)
        elif not isinstance(error, FileExistsError | FileNotFoundError):
            raise
    finally:
        with suppress(OSError):
            temporary.unlink()
    found = newest_lock(root)  # over NFS an answer that was lost makes a link fail that was made
    return found is not None and found.number == number and found.owner is not None and found.owner.token == own.token


def has_lock(root: Path, mark: str) -> bool:
    """Return True if a directory holds the lock with a mark: it is the owner's directory, by whatever path."""
    number, _, token = mark.partition(" ")
    try:
        return bool(json.loads(read_regular(lock_path(root, int(number))))["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def newest_lock(root: Path) -> LockFile | None:
    """Return the newest lock file of a directory, None without one. Raises OSError."""
    while numbers := numbers_in(root):
        path = lock_path(root, max(numbers))
        try:
            content, stat = read_regular(path), path.stat()
        except FileNotFoundError:  # replaced by a newer one meanwhile
            continue
        owner = None
        with suppress(ValueError, TypeError, RecursionError):
            owner = Owner(**json.loads(content))
        return LockFile(max(numbers), owner, (max(numbers), content, stat.st_mtime_ns))
    return None


def numbers_in(root: Path) -> list[int]:
    """Return the numbers of the lock files in a directory."""
    names = os.listdir(root) if root.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := LOCK_FILE.fullmatch(name)))


def lock_path(root: Path, number: int) -> Path:
    return root / f"lock.{number}.json"

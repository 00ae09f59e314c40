"""Registries: schedules, norms, optimizers, tokenizers, ... by name, and the extensions that add rows to them.

An extension is Python code that runs in the process: a file or module that `--extension` names, or an installed package
with an entry point in the group `megapipe.extensions`. Entry points are imported when a name is asked for that no
registry knows, so that a broken package does not disturb runs that do not use it. Code that a checkpoint names is
never run. Registries are filled at import or by extensions before a configuration is read, and do not change after
that. Users import `megapipe.extend`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, Generic, TypeVar

from megapipe.errors import ConfigError, MegapipeError

GROUP = "megapipe.extensions"  # of entry points
BUILT_IN = "megapipe"  # the origin of the rows that megapipe brings
PYTHON_CODE = "Python code"  # the origin of rows that were added without --extension

Row = TypeVar("Row")


class Registry(Mapping[str, Row], Generic[Row]):
    """The rows of one kind by name: those of megapipe first, then those of extensions.

    kind: in messages ("norm"). flag: the option that takes the names. Looking up a name that is missing imports the
    entry points of installed packages first; iteration does not.
    """

    every: ClassVar[list[Registry[Any]]] = []

    def __init__(self, kind: str, flag: str, rows: Mapping[str, Row]) -> None:
        self.kind, self.flag = kind, flag
        self._rows = dict(rows)
        self._origins = dict.fromkeys(rows, BUILT_IN)
        self.every.append(self)

    def add(self, name: str, row: Row) -> None:
        """Add a row for the extension that is being loaded. Raises ConfigError if the name is taken or unusable."""
        origin = EXTENSIONS.loading or PYTHON_CODE
        is_word = isinstance(name, str) and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        if not is_word or not name.isascii() or name.lower() in ("auto", "none", "null"):
            raise ConfigError(f"{self.kind} {name!r}: a name has letters, digits, - _ and . and is not auto or none")
        before = self._origins.get(name)
        is_redone = before == origin == PYTHON_CODE and hasattr(sys, "ps1")  # a cell of a notebook that runs again
        if before is not None and not is_redone:
            others = "is built in" if before == BUILT_IN else f"was registered by {before}"
            raise ConfigError(f"{self.kind} {name!r} of {origin} {others}; choose another name")
        self._rows[name], self._origins[name] = row, origin

    def origin(self, name: str) -> str:
        """Return the extension that a name comes from, or 'megapipe'."""
        return self._origins[name]

    def names_of(self, origin: str) -> list[str]:
        """Return the names that an extension has added."""
        return [name for name, its in self._origins.items() if its == origin]

    def forget(self, origin: str) -> None:
        """Remove the rows of an extension."""
        for name in self.names_of(origin):
            del self._rows[name], self._origins[name]

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            EXTENSIONS.load_installed()
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self)})"


@dataclass(frozen=True)
class Extension:
    """A loaded extension. name: as `--extension` has it, or 'MODULE of PACKAGE VERSION' for an installed one."""

    name: str
    path: str  # of its file
    sha256: str  # of the content of the file
    provides: tuple[str, ...]  # 'norm center_norm', ...


class Extensions:
    """The extensions of this process. loading: the name of the one that is being loaded."""

    def __init__(self) -> None:
        self.loading: str | None = None
        self.loaded: dict[str, Extension] = {}
        self.failures: list[str] = []  # of installed extensions that could not be imported
        self._has_installed = False

    def load(self, name: str) -> Extension:
        """Run a FILE.py or import a MODULE that registers something, once; a file that has changed is run again.

        Raises ConfigError, in one line with the place in the file.
        """
        if not name.endswith(".py") and "/" not in name:
            return self.loaded.get(name) or self._run(name, lambda: _imported(name))
        path = Path(name)
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise ConfigError(f"--extension {name}: it is not a regular file; give a FILE.py or the name of a module")
        try:
            source = path.read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--extension {name}: cannot be read: {getattr(error, 'strerror', error)}") from None
        before = self.loaded.get(name)
        if before is not None and before.sha256 == hashlib.sha256(source).hexdigest():
            return before
        self.unload(name)
        return self._run(name, lambda: _run_file(path, source))

    def unload(self, name: str) -> None:
        """Remove what an extension has registered."""
        self.loaded.pop(name, None)
        for registry in Registry.every:
            registry.forget(name)

    def load_installed(self) -> None:
        """Import the entry points of installed packages, once. What fails is kept in `failures`."""
        if self._has_installed or self.loading is not None:
            return
        self._has_installed = True
        for entry in importlib.metadata.entry_points(group=GROUP):
            package = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
            name = f"{entry.value}{package}"
            if entry.value in self.loaded:  # --extension has named it too
                continue
            try:
                self._run(name, entry.load)
            except ConfigError as error:
                self.failures.append(str(error).removeprefix("--extension "))

    @property
    def hint(self) -> str:
        """The end of a message about an unknown name: which installed extensions could not be imported."""
        if not self.failures:
            return ""
        return f"; installed extensions that could not be loaded: {'; '.join(self.failures)}"

    def _run(self, name: str, run: Any) -> Extension:
        before, self.loading = self.loading, name
        try:
            module = run()
        except Exception as error:
            self.unload(name)
            raise ConfigError(f"--extension {name}{_place_and_reason(error)}") from None
        finally:
            self.loading = before
        path = str(getattr(module, "__file__", None) or "")
        provides = [f"{registry.kind} {row}" for registry in Registry.every for row in registry.names_of(name)]
        if not provides:
            functions = "register_schedule, register_norm, ... of megapipe.extend"
            raise ConfigError(f"--extension {name} registers nothing: call {functions} at its top level")
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
        self.loaded[name] = Extension(name, path, digest, tuple(provides))
        return self.loaded[name]


EXTENSIONS = Extensions()


class _Source(importlib.machinery.SourceFileLoader):
    """Compiles the bytes that were read, and whose checksum is kept, not the file or a cache of it."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)  # type: ignore[no-any-return]


def _run_file(path: Path, source: bytes) -> Any:
    name = f"megapipe_extension_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    loader = _Source(name, str(path), source)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    loader.exec_module(module)
    return module


def _imported(name: str) -> Any:
    if not all(word.isidentifier() for word in name.split(".")):
        raise ConfigError("expected a FILE.py or the name of a module")
    return importlib.import_module(name)


def _place_and_reason(error: Exception) -> str:
    """Return ', line N: REASON: SOURCE LINE' for an error raised while an extension ran.

    The line is the extension's own: not one of megapipe, which it called, nor of Python's import system.
    """
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
    python, mine = Path(traceback.__file__).parent, str(Path(__file__).parent)
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((mine, "<frozen", f"{python}/importlib/"))
        and Path(frame.filename).parent != python
    ]
    reason = str(error) if isinstance(error, MegapipeError) else f"{type(error).__name__}: {error}"
    if not own:
        return f": {reason}"
    line = "" if isinstance(error, MegapipeError) else f": {own[-1].line}"
    return f", line {own[-1].lineno}: {reason}{line}"

"""The extensions of a run: named in checkpoints, compared when a run resumes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.registry import EXTENSIONS


def check_loaded(config: Config) -> None:
    """Raise ConfigError if the configuration, made in Python, names an extension that is not loaded."""
    for name in config.training.extension:
        if name not in EXTENSIONS.loaded:
            raise ConfigError(
                f"training.extension names {name}, which is not loaded: call EXTENSIONS.load({name!r}) first"
            )


def extension_lines() -> Iterator[str]:
    """Yield a line for each loaded extension, for the log."""
    for one in EXTENSIONS.loaded.values():
        yield f"extension {one.name} ({_short(one.sha256)}): {', '.join(one.provides)}"


def extensions_to_save() -> list[dict[str, Any]]:
    """Return the extensions as JSON, for a checkpoint."""
    return [
        {"name": one.name, "sha256": one.sha256, "provides": list(one.provides)} for one in EXTENSIONS.loaded.values()
    ]


def changed_extensions(saved: list[dict[str, Any]], where: str) -> tuple[str, ...]:
    """Return a line for each extension that is not the one with which a checkpoint was saved. where: the checkpoint."""
    lines = []
    for one, now in product(saved, EXTENSIONS.loaded.values()):
        rows = [row for row in one["provides"] if row in now.provides]
        if rows and now.sha256 != one["sha256"]:
            before = f"{one['name']} ({_short(one['sha256'])}) of {where}"
            what = f"{', '.join(rows)} may be something else"
            lines.append(f"extension {now.name} ({_short(now.sha256)}) is not the {before}: {what}")
    return tuple(lines)


def _short(sha256: str) -> str:
    return f"sha256 {sha256[:12]}"

"""`megapipe configs`: the configurations that come with megapipe."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from megapipe.config.yaml_file import SUPPLIED
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option


@command(
    "megapipe configs",
    (option("--copy", "copy them to this folder, which is created; existing files stay", metavar="DIR", type=Path),),
    needs_words=False,
)
def main(own: argparse.Namespace) -> int:
    """List the configurations that come with megapipe, or copy them to a folder.

    megapipe configs
    megapipe plan --world-size 8 --config llama3_8b
    megapipe configs --copy configs
    """
    files = sorted(SUPPLIED.glob("*.yaml"))
    if own.copy is None:
        width = max(len(file.name) for file in files)
        print("\n".join(f"{file.name.ljust(width)}  {_summary(file)}" for file in files))
        return 0
    own.copy.mkdir(parents=True, exist_ok=True)
    existing = [file.name for file in files if (own.copy / file.name).exists()]
    if existing:
        raise ConfigError(f"{own.copy} already holds {', '.join(existing)}: choose another folder, or remove them")
    for file in files:
        shutil.copy(file, own.copy)
    print(f"{len(files)} files copied to {own.copy}")
    return 0


def _summary(file: Path) -> str:
    """Return the first sentence of the comment at the head of a file."""
    head: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        head.append(line[1:].strip())
    return re.split(r"(?<! al)\.(?= |$)", " ".join(head))[0]

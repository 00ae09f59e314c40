"""`megapipe explain`: explain a flag, and its cost in memory and time; `configs`: the supplied configurations."""

from __future__ import annotations

import argparse
import re
import shutil
from itertools import takewhile
from pathlib import Path

from megapipe.config.yaml_file import SUPPLIED
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import PREDICTION_OPTIONS, command, hardware_given, option
from megapipe.extras.report.explanation import explained


@command("megapipe explain", PREDICTION_OPTIONS, takes_config=True)
def main(own: argparse.Namespace) -> None:
    """Explain a flag: megapipe explain FLAG [--gpu NAME | --hardware FILE] [--config FILE.yaml] [flags of
    pretrain_gpt.py]

      megapipe explain --sequence-parallel --config configs/llama3_70b.yaml --world-size 64

    What the flag does, what Megatron means by it, who reads it and the paper; with a configuration also its cost:
    memory of the fullest pipeline rank, predicted step time and expected bubble with the flag's other values, or why
    they are refused. Default: --gpu h100, and the least world that the configuration runs on.
    """
    if not own.flags:
        raise ConfigError("no flag to explain; give one, such as --sequence-parallel")
    print(explained(own.flags[0], own.flags[1:], hardware_given(own)))


@command(
    "megapipe configs",
    (option("--copy", "copy them to this folder, which is created; existing files stay", metavar="DIR", type=Path),),
    needs_words=False,
)
def configs(own: argparse.Namespace) -> None:
    """List the configurations that come with megapipe, or copy them to a folder.

    megapipe configs
    megapipe plan --world-size 8 --config llama3_8b
    megapipe configs --copy configs
    """
    files = sorted(SUPPLIED.glob("*.yaml"))
    if own.copy is None:
        width = max(len(file.name) for file in files)
        for file in files:
            head = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
            comment = " ".join(line[1:].strip() for line in head)
            first_sentence = re.split(r"(?<! al)\.(?= |$)", comment)[0]
            print(f"{file.name.ljust(width)}  {first_sentence}")
        return
    own.copy.mkdir(parents=True, exist_ok=True)
    existing = [file.name for file in files if (own.copy / file.name).exists()]
    if existing:
        raise ConfigError(f"{own.copy} already holds {', '.join(existing)}: choose another folder, or remove them")
    for file in files:
        shutil.copy(file, own.copy)
    print(f"{len(files)} files copied to {own.copy}")

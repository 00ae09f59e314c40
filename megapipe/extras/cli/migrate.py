"""`megapipe migrate`: what every flag of a Megatron-LM launch script does here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option, switch, write_file
from megapipe.extras.migrate.judge import json_report, text_report, written
from megapipe.extras.migrate.script_report import migration_of

OPTIONS = (
    option("--set", "a variable of the script's environment", metavar="NAME=VALUE", action="append", default=[]),
    option("--write", "write the configuration here as YAML, with every decision as a comment", type=Path),
    switch("--json", "print everything as JSON"),
)


@command("megapipe migrate", OPTIONS, takes_config=True)
def main(own: argparse.Namespace) -> int:
    """Show what every flag of a Megatron-LM launch script does here; the script is parsed, never executed.

      megapipe migrate train_llama3.sh
      megapipe migrate train_gpt3.sh --set TP=8 --set PP=4 ARGUMENTS OF THE SCRIPT
      megapipe migrate -- --num-layers 32 --hidden-size 4096 ...
      megapipe migrate DeepSeek-V3.yaml --set TP=1 --set PP=16
      cat common.sh train.sh | megapipe migrate -

    Variables, arrays, arithmetic and conditions of the script are followed. What only a run shows ($(hostname), a
    variable that nothing sets) stays as it is and is named. Exit code 0: the script runs as it is, but perhaps for
    files that are not here; 1: something has to be changed; 2: no call of pretrain_gpt.py could be read. `megapipe plan
    --config` of the file of --write says what a rank needs, and whether it fits on a GPU.
    """
    if not own.flags:
        raise ConfigError("no script; give a file, - for standard input, or -- and the arguments of pretrain_gpt.py")
    given = []
    for text in own.set:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set {text}: expected NAME=VALUE, a variable of the script")
        given.append((name, value))
    migration = migration_of(own.flags, given)
    if own.write is not None:
        write_file(own.write, written(migration), "--write")
    print(json.dumps(json_report(migration), indent=2) if own.json else "\n".join(text_report(migration)))
    return 0 if migration.runs else 1

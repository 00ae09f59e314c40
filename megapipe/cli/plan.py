"""`megapipe plan`: what a configuration will do on any number of ranks, told on a laptop in tenths of a second, without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megapipe.cli.pretrain import with_vocabulary
from megapipe.config.load import load_config
from megapipe.errors import ConfigError, MegapipeError
from megapipe.planner.report import plan_text
from megapipe.planner.resolve import resolve
from megapipe.planner.run_plan import RunPlan

HELP = """\
usage: megapipe plan --ranks N [--ranks-per-node M] [--config FILE.yaml] [flags of pretrain_gpt.py]

  megapipe plan --ranks 16384 --ranks-per-node 8 --config configs/llama3_405b.yaml

Shows the grid with its nodes, the layers and parameters of each stage and their sum, batch, FLOPs and the expected bubble; or why it cannot
run. Data, length and learning rate may be left out. --ranks-per-node: all ranks on one node unless given.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    try:
        num_ranks, words = _take_number(words, "--ranks")
        ranks_per_node, words = _take_number(words, "--ranks-per-node")
        if num_ranks is None:
            raise ConfigError("megapipe plan needs --ranks N, the number of ranks to plan for")
        print(plan_text(plan_for(words, num_ranks, ranks_per_node)))
    except MegapipeError as error:
        print(f"this cannot run: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def plan_for(arguments: Sequence[str], num_ranks: int, ranks_per_node: int | None = None) -> RunPlan:
    """The plan of flags and YAML files on so many ranks. Raises ConfigError."""
    loaded = load_config(arguments, is_job=False)
    return resolve(with_vocabulary(loaded.config), num_ranks, ranks_per_node)


def _take_number(words: list[str], flag: str) -> tuple[int | None, list[str]]:
    """The whole number after a flag, and the words without the two; None where the flag is not there."""
    for position, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        after = position + 1 if equals else position + 2
        if not equals:
            text = words[position + 1] if position + 1 < len(words) else ""
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{flag} {text}: expected a whole number of at least 1")
        return int(text), words[:position] + words[after:]
    return None, words

"""The facts that the ranks of a command compare before they start: its options and the files that they name, versions,
devices. The ranks of a run compare `train.facts.facts_of`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from megapipe.comm.meeting import Fact, Facts
from megapipe.config.fields import value_text
from megapipe.environment import Environment
from megapipe.extras.cli.frame import Option
from megapipe.train.facts import extensions_fact, file_fact, process_facts, software_facts

# option -> why ranks may differ in it
MAY_DIFFER: Mapping[str, str] = {
    **dict.fromkeys(("--output", "--force", "--json", "--name"), "the output of rank 0"),
}
FILES = ("--prompts-file", "--tokenizer-model", "--hardware")  # compared by content


def command_facts(own: argparse.Namespace, environment: Environment, backend: str, device: str) -> Facts:
    """Return the facts of a command. backend, device: see `start`."""
    processes = process_facts(environment, backend, device)
    return {**option_facts(own), **software_facts(with_text=True), **processes}


def option_facts(own: argparse.Namespace) -> Facts:
    """Return the options of a command by their names. own: as `Command.parse` has returned it."""
    facts = {"command": Fact(own.command.name), "--extension": extensions_fact()}
    for name in (one.names[-1] for one in own.command.options if isinstance(one, Option)):
        value = getattr(own, name.lstrip("-").replace("-", "_"))
        text = value_text(tuple(value) if isinstance(value, list) else value)
        if name not in MAY_DIFFER:
            facts[name] = file_fact(str(value)) if name in FILES and value is not None else Fact(text)
    return facts

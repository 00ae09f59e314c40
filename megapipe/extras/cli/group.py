"""Commands under one word, each in a module that is imported only when the command is run. Imports nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandGroup:
    """Commands under one word. Called with the words after its name, it runs one and returns the exit code.

    commands: word -> module of this package, its function from the words after that word to the exit code, help.
    more: returns the text of --help after the list of commands.
    """

    name: str
    commands: Mapping[str, tuple[str, str, str]]
    more: Callable[[], str] = str

    def __call__(self, words: Sequence[str]) -> int:
        code = self.refused(words)
        return self.load(words[0])(words[1:]) if code is None else code

    def refused(self, words: Sequence[str]) -> int | None:
        """Print help, or that a command is unknown, and return the exit code; None if there is a command to run."""
        if not words or words[0] in ("-h", "--help", "help"):
            width = max(map(len, self.commands)) + 2
            lines = [f"  {word.ljust(width)}{text}\n" for word, (_, _, text) in self.commands.items()]
            usage = f"usage: {self.name} SUBCOMMAND [arguments]      (each has --help)"
            print(f"{usage}\n\n{''.join(lines)}{self.more()}", end="")
            return 0 if words else 2
        if words[0] in self.commands:
            return None
        from megapipe.config.fields import nearest

        guess = nearest(words[0], list(self.commands))
        print(f"{self.name} {words[0]}: unknown subcommand{guess} ({self.name} --help lists all)", file=sys.stderr)
        return 2

    def load(self, word: str) -> Callable[[Sequence[str]], int]:
        """Import a command."""
        from megapipe.monitor.signals import ended_by_signals  # here: only Unix has it

        module, function, _ = self.commands[word]
        with ended_by_signals():  # KeyboardInterrupt inside an import leaves a traceback
            found: Callable[[Sequence[str]], int] = getattr(
                importlib.import_module(f"megapipe.extras.cli.{module}"), function
            )
        return found

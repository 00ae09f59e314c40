"""The `megapipe` command: subcommands, each a door of its own. Nothing heavy is imported before it is known which one is meant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """module: holds `main(arguments) -> int`. prefix: arguments put before the user's."""

    help: str
    module: str
    prefix: tuple[str, ...] = ()


SUBCOMMANDS: dict[str, Subcommand] = {
    "quickstart": Subcommand(
        "from text on this machine to a small trained GPT, in minutes", "megapipe.extras.cli.quickstart"
    ),
    "pretrain": Subcommand("pretrain a GPT on this rank; the same as pretrain_gpt.py", "megapipe.extras.cli.pretrain"),
    "launch": Subcommand(
        "start a script on several ranks: torchrun without its tracebacks", "megapipe.extras.cli.launch"
    ),
    "plan": Subcommand(
        "show what a configuration will do on a number of ranks, without starting any", "megapipe.extras.cli.plan"
    ),
    "explain": Subcommand(
        "what a flag does, and what it costs a configuration in memory and time", "megapipe.extras.cli.explain"
    ),
    "profile-layers": Subcommand(
        "times of embedding, layers and head on this machine, for the cut", "megapipe.extras.cli.profile_layers"
    ),
    "calibrate": Subcommand(
        "what this machine and its links reach, as a hardware file for plan", "megapipe.extras.cli.calibrate"
    ),
    "schedule": Subcommand("draw, compare, check and simulate pipeline schedules", "megapipe.extras.cli.schedule"),
    "doctor": Subcommand(
        "is this machine, or a whole allocation, fit: versions, interfaces, every group's links",
        "megapipe.extras.cli.doctor",
    ),
    "status": Subcommand("what every rank of a run does now, and what it waits for", "megapipe.extras.cli.status"),
    "progress": Subcommand("how far a run is: what job scripts ask", "megapipe.extras.cli.progress"),
    "report": Subcommand("one HTML page that tells a run", "megapipe.extras.cli.report"),
    "verify": Subcommand(
        "compare the grid with one plain process: pretrain --verify-grid",
        "megapipe.extras.cli.pretrain",
        ("--verify-grid",),
    ),
    "generate": Subcommand("texts from a trained model", "megapipe.extras.cli.generate"),
    "evaluate": Subcommand(
        "loss and perplexity of a trained model on a text or token file", "megapipe.extras.cli.evaluate"
    ),
    "preprocess": Subcommand("text to token files", "megapipe.extras.cli.preprocess"),
    "train-tokenizer": Subcommand("train a SentencePiece tokenizer on text", "megapipe.extras.cli.train_tokenizer"),
    "merge": Subcommand("several token files as one", "megapipe.extras.cli.merge"),
    "convert": Subcommand("checkpoints from and to Hugging Face and Megatron", "megapipe.extras.cli.convert"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from megapipe import __version__

        print(f"megapipe {__version__}")
        return 0
    chosen = SUBCOMMANDS.get(words[0])
    if chosen is None:
        from megapipe.config.fields import nearest

        print(
            f"megapipe {words[0]}: there is no such subcommand{nearest(words[0], list(SUBCOMMANDS))}; see megapipe --help",
            file=sys.stderr,
        )
        return 2
    code: int = importlib.import_module(chosen.module).main([*chosen.prefix, *words[1:]])
    return code


def help_text() -> str:
    """What `megapipe --help` prints."""
    width = max(map(len, SUBCOMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{subcommand.help}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: megapipe SUBCOMMAND [arguments]      (each has --help)",
            "",
            *lines,
            "",
            "pretraining on several ranks: megapipe launch --nproc-per-node N pretrain_gpt.py --config FILE.yaml [flags]",
            "",
        ]
    )

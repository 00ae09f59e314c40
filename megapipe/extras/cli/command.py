"""The `megapipe` command and its subcommands. The module of a subcommand is imported only when it is run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """A subcommand. module: has `main(arguments) -> int`. prefix: arguments put before the user's."""

    help: str
    module: str
    prefix: tuple[str, ...] = ()


SUBCOMMANDS: dict[str, Subcommand] = {
    "quickstart": Subcommand("train a small GPT on text of this machine, in minutes", "megapipe.extras.cli.quickstart"),
    "pretrain": Subcommand("pretrain a GPT on this rank; the same as pretrain_gpt.py", "megapipe.extras.cli.pretrain"),
    "launch": Subcommand(
        "start a script on several ranks: torchrun without its tracebacks", "megapipe.extras.cli.launch"
    ),
    "plan": Subcommand(
        "show what a configuration will do on a number of ranks, without starting any", "megapipe.extras.cli.plan"
    ),
    "explain": Subcommand(
        "explain a flag, and its cost in memory and time for a configuration", "megapipe.extras.cli.explain"
    ),
    "profile-layers": Subcommand(
        "measure embedding, layers and head on this machine, to balance the pipeline stages",
        "megapipe.extras.cli.profile_layers",
    ),
    "calibrate": Subcommand(
        "measure this machine and its links, and write a hardware file for plan", "megapipe.extras.cli.calibrate"
    ),
    "schedule": Subcommand("draw, compare, check and simulate pipeline schedules", "megapipe.extras.cli.schedule"),
    "doctor": Subcommand(
        "check this machine, or a whole allocation: versions, interfaces, the links of every group",
        "megapipe.extras.cli.doctor",
    ),
    "status": Subcommand(
        "show what every rank of a run does now, and which ranks it waits for", "megapipe.extras.cli.status"
    ),
    "progress": Subcommand("print the step that a run has reached, for job scripts", "megapipe.extras.cli.progress"),
    "report": Subcommand("write an HTML report of a run", "megapipe.extras.cli.report"),
    "verify": Subcommand(
        "compare the grid with a single plain process: pretrain --verify-grid",
        "megapipe.extras.cli.pretrain",
        ("--verify-grid",),
    ),
    "generate": Subcommand("generate texts with a trained model", "megapipe.extras.cli.generate"),
    "evaluate": Subcommand(
        "compute loss and perplexity of a trained model on a text or token file", "megapipe.extras.cli.evaluate"
    ),
    "preprocess": Subcommand("tokenize text into token files", "megapipe.extras.cli.preprocess"),
    "train-tokenizer": Subcommand("train a SentencePiece tokenizer on text", "megapipe.extras.cli.train_tokenizer"),
    "merge": Subcommand("merge several token files into one", "megapipe.extras.cli.merge"),
    "convert": Subcommand("convert checkpoints from and to Hugging Face and Megatron", "megapipe.extras.cli.convert"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code."""
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
            f"megapipe {words[0]}: unknown subcommand{nearest(words[0], list(SUBCOMMANDS))}; see megapipe --help",
            file=sys.stderr,
        )
        return 2
    code: int = importlib.import_module(chosen.module).main([*chosen.prefix, *words[1:]])
    return code


def help_text() -> str:
    """Return the text of `megapipe --help`."""
    width = max(map(len, SUBCOMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{subcommand.help}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: megapipe SUBCOMMAND [arguments]      (each has --help)",
            "",
            *lines,
            "",
            (
                "pretraining on several ranks: megapipe launch --nproc-per-node N pretrain_gpt.py --config FILE.yaml "
                "[flags]"
            ),
            "",
        ]
    )

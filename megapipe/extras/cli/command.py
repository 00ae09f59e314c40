"""The `megapipe` command and its subcommands. The module of a subcommand is imported only when it is run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megapipe.extras.cli.group import CommandGroup

SUBCOMMANDS = {
    "quickstart": ("quickstart", "main", "train a small GPT on text of this machine, in minutes"),
    "pretrain": ("pretrain", "main", "pretrain a GPT on this rank; the same as pretrain_gpt.py"),
    "launch": ("launch", "main", "start a script on several ranks: torchrun without its tracebacks"),
    "plan": ("plan", "main", "show what a configuration will do on a number of ranks, without starting any"),
    "explain": ("explain", "main", "explain a flag, and its cost in memory and time for a configuration"),
    "profile-layers": ("calibrate", "profile_layers", "measure embedding, layers, head, to balance stages"),
    "calibrate": ("calibrate", "calibrate", "measure this machine and its links: a hardware file for plan"),
    "schedule": ("schedule", "main", "draw, compare, check and simulate pipeline schedules"),
    "doctor": ("calibrate", "doctor", "check this machine or allocation: versions, interfaces, links of groups"),
    "status": ("report", "status", "show what every rank of a run does now, and which ranks it waits for"),
    "configs": ("explain", "configs", "list or copy the configurations that come with megapipe"),
    "progress": ("plan", "progress", "print the step that a run has reached, for job scripts"),
    "report": ("report", "main", "write an HTML report of a run"),
    "compare": ("report", "compare", "compare runs: settings that differ, results, an HTML page of curves"),
    "verify": ("verify", "main", "compare the grid with one process; with --streams look for CUDA races"),
    "generate": ("inference", "generate", "generate texts with a trained model"),
    "chat": ("chat", "chat", "talk to a trained model in the terminal"),
    "evaluate": ("inference", "evaluate", "compute a model's loss and perplexity on a text or token file"),
    "preprocess": ("data", "preprocess", "tokenize text into token files"),
    "train-tokenizer": ("data", "train_tokenizer", "train a tokenizer on text"),
    "merge": ("data", "merge", "merge several token files into one"),
    "inspect": ("inspect", "main", "show what a checkpoint holds, or which documents a step was trained on"),
    "convert": ("convert", "main", "convert checkpoints from and to Hugging Face and Megatron"),
    "migrate": ("migrate", "main", "show what each flag of a Megatron-LM launch script does here"),
}
MORE = "\npretraining on several ranks: megapipe launch --nproc-per-node N pretrain --config FILE.yaml [flags]\n"
MEGAPIPE = CommandGroup("megapipe", SUBCOMMANDS, lambda: MORE)
# words of commands that only print: `| head` ends them like any other tool
PRINTING = frozenset("-h --help help plan explain schedule status progress configs migrate compare".split())


def main(arguments: Sequence[str] | None = None, first: Sequence[str] = ()) -> int:
    """Run a subcommand and return the exit code; 1 with one line if standard output cannot be written to.

    arguments: None for the words of the command line, which this process is for, after `first`.
    """
    try:
        code = run(arguments, first)
        sys.stdout.flush()
    except OSError as error:  # a full disk; those of files have been reported by the subcommand
        print(f"error: standard output cannot be written to: {error.strerror}", file=sys.stderr)
        if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
            # what is left in its buffer would be an error at exit again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return 1
    return code


def run(arguments: Sequence[str] | None = None, first: Sequence[str] = ()) -> int:
    """Run a subcommand and return the exit code."""
    words = [*first, *(sys.argv[1:] if arguments is None else arguments)]
    if sys.platform == "win32":  # before any import of what only Unix has
        print("error: megapipe does not run on native Windows; install it in WSL2 (wsl --install)", file=sys.stderr)
        return 2
    if arguments is None and PRINTING.intersection(words or ["help"]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if words[:1] == ["--version"]:
        print(version_text())
        return 0
    if (refused := MEGAPIPE.refused(words)) is not None:
        return refused
    from megapipe.environment import read_environment
    from megapipe.errors import ConfigError
    from megapipe.monitor.signals import REPEATED, ThisProcess
    from megapipe.monitor.start_marks import leave_mark

    ThisProcess.is_command = arguments is None
    with suppress(ConfigError):  # reported by the subcommand
        leave_mark(read_environment())
    code = int(MEGAPIPE.load(words[0])(words[1:]))
    # a run has saved and ended, which its exit code says: further requests to do so are ignored, but not in a program
    # that runs commands itself and keeps its handlers
    for number in REPEATED if ThisProcess.is_command else ():
        signal.signal(number, signal.SIG_IGN)
    return code


def version_text() -> str:
    """Return the versions of megapipe, with the commit of a clone, and of torch with its CUDA."""
    import torch

    from megapipe.version import __version__

    folder = Path(__file__).resolve().parents[3]
    ask = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    commit = ""
    if (folder / ".git").exists() and shutil.which("git"):
        commit = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"megapipe {__version__}{commit and f' (commit {commit})'}, torch {torch.__version__} ({cuda})"

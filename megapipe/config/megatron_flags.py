"""Every flag of Megatron-LM at Megatron-Core 0.16.1, each in one class; no flag of a launch script is ignored.

The names, with the number of their values and Megatron's defaults, are in megatron_flags.csv. Sources: the
configuration dataclasses of the megatron-core 0.16.1 wheel, from which Megatron derives 176 flags, and
megatron/training/arguments.py from a copy of the repository of that time. Classes and notes are ours.

supported         sets a field of ours (the note is the field)
already so here   accepted: megapipe always does what it asks for; the note says why
refused           an error with the note: what to do instead. Accepted if its value is Megatron's default.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megapipe.config.fields import number_in
from megapipe.errors import ConfigError

SUPPORTED = "supported"
ALREADY_SO = "already so here"
REFUSED = "refused"
CLASSES = (SUPPORTED, ALREADY_SO, REFUSED)


@dataclass(frozen=True)
class MegatronFlag:
    """One row of the table."""

    name: str  # --with-dashes
    values: str  # "": none follows; "1": one; "+": one or more
    default: str  # Megatron's, as text; "" if none
    kind: str  # one of CLASSES
    accepts: tuple[str, ...]  # already so here: the accepted values; () any
    note: str

    def judge(self, given: list[str]) -> str:
        """Return the line to print for this flag with these values. Raises ConfigError if it is refused."""
        shown = " ".join([self.name, *given])
        if self.values == "" and given:
            raise ConfigError(f"{self.name} takes no value, but {given[0]} follows it")
        if self.values != "" and not given:
            raise ConfigError(f"{self.name} needs a value; {self.note}")
        if self.kind == ALREADY_SO and (not self.accepts or given[0] in self.accepts):
            return f"{shown}: already so here: {self.note}"
        if self.default and len(given) == 1:
            number = number_in(given[0])
            is_same_number = number is not None and number == number_in(self.default)
            if is_same_number or given[0].lower() == self.default.lower():
                return f"{shown}: Megatron's default, accepted"
        way = f"use {' or '.join(self.accepts)}; {self.note}" if self.accepts else self.note
        raise ConfigError(f"{shown} is a flag of Megatron that megapipe does not support: {way}")


@cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """Return flag name, with dashes -> row of the table."""
    with Path(__file__).with_name("megatron_flags.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {
        name: MegatronFlag(name, values, default, kind, tuple(accepts.split("|")) if accepts else (), note)
        for name, values, default, kind, accepts, note in rows
    }


@dataclass(frozen=True)
class Difference:
    """A flag that deliberately has another default or meaning than in Megatron."""

    flag: str
    megatron: str
    here: str
    reason: str


DELIBERATE_DIFFERENCES = (
    Difference("--distributed-backend", "nccl", "auto", "gloo without a GPU, so that the same script runs anywhere"),
    Difference("--exit-signal-handler", "off", "on", "a job that is asked to exit saves first"),
    Difference("--eval-interval", "none", "1000", "the model is evaluated during training unless --eval-iters is 0"),
    Difference(
        "--num-query-groups",
        "1, unused without --group-query-attention",
        "acts alone",
        "a given number is never ignored",
    ),
    Difference("--high-priority-stream-groups", "none", "pp", "a pipeline waits for its messages"),
    Difference("--profile-ranks", "none", "0", "--profile alone writes a trace"),
    Difference("--transformer-impl", "transformer_engine", "local", "an optional library, which runs only on GPUs"),
    Difference(
        "--recompute-modules", "unset, meaning core_attn", "core_attn", "written out; activation exists only here"
    ),
    Difference(
        "--window-size",
        "LEFT,RIGHT, the token itself not included",
        "one number, the token itself included",
        "LEFT,0 is accepted and means the same",
    ),
)


def differences_line() -> str:
    """Return the deliberate differences in one line, for the start of a run."""
    flags = ", ".join(f"{difference.flag} {difference.here}" for difference in DELIBERATE_DIFFERENCES)
    return f"defaults that differ from Megatron's: {flags} (see docs/flags.md)"

"""Nasty values of single flags and sets of plausible flags: accepted, or refused with a message and code 1 or 2."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from megapipe.config.config import all_fields
from megapipe.config.flags import REQUESTS
from megapipe.config.megatron_flags import megatron_flags
from megapipe.config.options import ConfigField
from megapipe.extras.cli.pretrain import main
from tests.config.examples import JOB
from tests.fuzz.outcome import drawn, fault, said

NASTY = (
    *("", " ", "-", "--", "---", "=", ",", ",,", ";", ":", "-1", "0", "-0", "+1", "1", "2", "3", "7", "1000003"),
    *("1.0", "1.", ".5", "1e3", "1e400", "-1e400", "1e-400", "5e-324", "1.7976931348623157e308", "nan", "NaN", "inf"),
    *("-inf", "infinity", "0x10", "1_000", "\u0661\u0662", "\u00bd", "\u00b2", "1,2", "1,,2", "0,1,0", "0,0,0", "-1,2"),
    *("1 2", "1:2", "1/0", "1-2", "2,2,2,2,2", "none", "None", "null", "true", "False", "yes", "auto", "~", "*", "%s"),
    *("{}", "[]", "{a: 1}", "[[[[", "!!python/object:os.system", "'99,1,0'", "'", '"', "\\", "\n", "a\nb", "\t", "#"),
    *(
        "\u00e9",
        "\udcff",
        "\U0001f600",
        "..",
        "/",
        "/dev/null",
        "/dev/full",
        "../../etc/passwd",
        "--lr",
        "--lr=1",
        "@x",
    ),
    *(str(2**31 - 1), str(2**31), str(2**32), str(2**53 + 1), str(2**63 - 1), str(2**63), str(2**64), str(-(2**63))),
    *("9" * 5000, "1" * 400, "1." + "0" * 5000, "a" * 20_000, "[" * 20_000, "{a: " * 2000, ",".join("1" * 5000)),
)
NOT_TRIED = ("--help", "--version")
NUM_BATCHES = 10


def flags() -> list[str]:
    own = [field.main_flag for field in all_fields()]
    return sorted({*own, *REQUESTS, *megatron_flags()} - set(NOT_TRIED))


def check(cases: list[list[str]]) -> None:
    faults = []
    for words in cases:
        if wrong := fault(said(main, words)):
            shown = " ".join(word if len(word) < 60 else f"{word[:20]}...({len(word)})" for word in words[len(JOB) :])
            faults.append(f"{shown!r}: {wrong}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_nasty_values_of_single_flags(batch: int) -> None:
    generator = drawn(f"single values {batch}")
    cases = []
    for flag in generator.choices(flags(), k=400 // NUM_BATCHES):
        value = generator.choice(NASTY) if generator.random() < 0.9 else noise(generator)
        words = [f"{flag}={value}"] if generator.random() < 0.7 else [flag, value]
        cases.append([*JOB, *words, "--plan"])
    check(cases)


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_sets_of_plausible_flags(batch: int) -> None:
    generator = drawn(f"sets {batch}")
    fields = [field for field in all_fields() if field.section != "checkpoint" and field.kind.scalar is not str]
    fields += [field for field in all_fields() if field.option.choices]
    cases = []
    for _ in range(300 // NUM_BATCHES):
        words = [*JOB, "--plan", "--world-size", generator.choice("1 2 4 8 16 6".split())]
        for field in generator.sample(fields, generator.randint(1, 6)):
            words += plausible(field, generator)
        cases.append(words)
    check(cases)


def noise(generator: random.Random) -> str:
    return "".join(generator.choices(string.printable, k=generator.randint(1, 40)))


def plausible(field: ConfigField, generator: random.Random) -> list[str]:
    """Return words that set a field to a value of its type, mostly within its range."""
    values: dict[type, list[Any]] = {
        int: [1, 1, 2, 2, 3, 4, 4, 8, 16, 32, 64, 100, 128, 0],
        float: [0.0, 1e-8, 1e-5, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.95, 1.0, 2.0, 65536.0],
        str: list(field.option.choices),
        bool: ["true", "false"],
    }
    one = list(field.option.choices) or values[field.kind.scalar]
    if field.kind.scalar is bool:
        return [field.main_flag] if generator.random() < 0.7 else [f"{field.main_flag}=false"]
    count = (field.kind.length or generator.randint(1, 3)) if field.kind.many else 1
    return [field.main_flag, *(str(generator.choice(one)) for _ in range(count))]

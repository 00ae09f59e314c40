"""The ledger: all pairs of features, recipes and drawn sets of features, in 20 parts, and the record of what passed.

tests/test_ledger.py examines them. `launch/test.sh --all` runs the part of the commit: the number of commits modulo 20,
so that 20 commits in a row run all. `--ledger-part 3` runs a part, `--ledger-part all` every one. With
`--ledger-record` what passes is written to tests/ledger.tsv. Cases that were never recorded, or changed since:

    python -m tests.ledger
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.features import FEATURES, RECIPES, Feature

REPOSITORY = Path(__file__).resolve().parent.parent
RECORD = REPOSITORY / "tests" / "ledger.tsv"
PARTS = 20
NUM_SETS, SEED = 200, 1
# names of features that are gone, so that sets without them are drawn as before
RETIRED = ("p2p fp8", "post validation")
NOT_DRAWN = ("frozen", "2bw", "replays ahead")  # features added since the sets were drawn, which stay as they were
MIN_FEATURES, MAX_FEATURES = 4, 7
MAX_WORLD = 8
MICROBATCHES = 4  # a dp rank

BASE = (
    "--num-layers 8 --num-attention-heads 4 --micro-batch-size 2 --train-iters 3 --lr 1e-3 --mock-data --bf16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 8"
)
SIZES = "--hidden-size 128 --ffn-hidden-size 384 --seq-length 128 --vocab-size 1000"
# with a larger epsilon Adam does not divide rounding errors by rounding errors
SMALL_SIZES = "--hidden-size 64 --ffn-hidden-size 192 --seq-length 64 --vocab-size 256 --adam-eps 3e-2"

# what a recipe has besides features is one more row
BY_NAME = {row.name: row for row in (*FEATURES, *(Feature(recipe.name, recipe.flags) for recipe in RECIPES))}
AXES = tuple(f"--{axis}-size" for axis in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel"))
# what every run of the tests examines: sharded weights in fp8, experts beside context parallelism, drawn features, a
# refusal
EVERYDAY = ("slices2 with cp2 p2p with moe ep2 with mtp", "zero3 with fp8 local", "set 119", "mla with sinks")
# sets of features that share much code, beside the drawn ones
SETS = (
    ("moe ep2", "mla", "mtp", "fp8 local"),
    ("slices2", "cp2 p2p", "moe ep2", "mtp"),
    ("slices2", "cp2 ag", "sinks", "window", "act offload"),
    ("slices2", "zb-h1", "mla", "moe grouped", "recompute full"),
    ("dualpipe-v", "cp2 p2p", "mla", "moe ep2"),
)
CRASH, MEMORY, REFUSED, EQUAL = "crash", "memory", "refused", "equal"
# refused pair -> (verdict without its row of the table, words of what happens). REFUSED: nothing could order it; EQUAL:
# three steps show nothing, since one of the two has no effect, or what is wrong comes later
ENDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("2bw", "slices2"): (REFUSED, "has no order for 2 slices"),
    ("2bw", "zero2"): (CRASH, "cannot be sharded"),
    ("2bw", "zero3"): (CRASH, "cannot be sharded"),
    ("2bw", "hsdp"): (CRASH, "cannot be sharded"),
    # what is compared drains after every step
    ("2bw", "cuda graphs"): (EQUAL, ""),
    ("2bw", "act offload"): (CRASH, "cannot be split"),
    ("act offload", "moe overlap"): (EQUAL, ""),  # nothing moves
    ("dualpipe-v", "slices2"): (REFUSED, "has no order for 2 slices"),
    ("slices2", "moe overlap"): (REFUSED, "has no order for 2 slices"),
    ("mla", "sinks"): (CRASH, "softmax_offset"),
    ("recompute full", "moe overlap"): (MEMORY, "planned"),
    ("recompute budget", "moe overlap"): (CRASH, "KeyError: 'dispatch'"),
    ("muon", "precision-aware"): (MEMORY, "planned"),
    ("2bw", "replays ahead"): (CRASH, "no messages, no updates"),
    ("replays ahead", "moe overlap"): (CRASH, "was already done"),
    ("replays ahead", "recompute budget"): (EQUAL, ""),
    ("recompute sel", "recompute budget"): (EQUAL, ""),
    ("recompute full", "recompute budget"): (EQUAL, ""),
}


@dataclass(frozen=True)
class Combination:
    """Some features together."""

    features: tuple[str, ...]

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """Flag -> values; raises ValueError if features give one flag two values."""
        return options_of(self.features)

    @property
    def world_size(self) -> int:
        """Two data-parallel ranks, four for two instances of sharding, as far as MAX_WORLD goes."""
        instances = int(self.options.get("--num-distributed-optimizer-instances", ("1",))[0])
        return min(MAX_WORLD, 2 * instances * self.ranks_per_replica)

    @property
    def ranks_per_replica(self) -> int:
        size = 1
        for axis in AXES:
            size *= int(self.options.get(axis, ("1",))[0])
        return size

    def arguments(self, sizes: str, without: Callable[[Feature], bool] = lambda feature: False) -> list[str]:
        """Return the command line. without: features to leave out."""
        kept = [name for name in self.features if not without(BY_NAME[name])]
        batch = 2 * MICROBATCHES * self.world_size // self.ranks_per_replica
        own = itertools.chain.from_iterable((flag, *values) for flag, values in options_of(kept).items())
        return [*BASE.split(), *sizes.split(), "--global-batch-size", str(batch), *own]


def options_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return flag -> values of these features; raises ValueError if they give a flag two values."""
    options: dict[str, tuple[str, ...]] = {}
    for name in names:
        words = BY_NAME[name].flags.split()
        starts = [place for place, word in enumerate(words) if word.startswith("--")]
        for start, end in zip(starts, [*starts[1:], len(words)], strict=False):  # a recipe may have no flags
            flag, values = words[start], tuple(words[start + 1 : end])
            if options.setdefault(flag, values) != values:
                raise ValueError(f"{flag} has two values: {options[flag]} and {values}")
    if "--pipeline-schedule" in options and "--num-layers-per-virtual-pipeline-stage" in options:
        raise ValueError("--pipeline-schedule chooses the number of chunks")
    return options


def drawn(seed: int, number: int) -> Combination:
    """Draw MIN_FEATURES to MAX_FEATURES features that give no flag two values."""
    random = Random(f"{seed} {number}")
    wanted = random.randint(MIN_FEATURES, MAX_FEATURES)
    chosen: list[str] = []
    names = sorted([*(feature.name for feature in FEATURES if feature.name not in NOT_DRAWN), *RETIRED])
    for name in random.sample(names, len(names)):
        if name in RETIRED:
            continue
        try:
            options_of([*chosen, name])
        except ValueError:
            continue
        chosen.append(name)
        if len(chosen) == wanted:
            break
    return Combination(tuple(chosen))


@dataclass(frozen=True)
class Case:
    """A combination with a name."""

    name: str
    features: tuple[str, ...]

    @property
    def part(self) -> int:
        return part_of(self.name)

    @property
    def digest(self) -> str:
        """The value that changes with the flags, or with the end that is stated."""
        flags = [BY_NAME[name].flags for name in self.features]
        ends = ENDS.get(self.features, ())
        text = "\n".join([BASE, SIZES, SMALL_SIZES, *flags, *ends])
        return f"{zlib.crc32(text.encode()):08x}"


def part_of(name: str) -> int:
    """Return the part of a name: the same whatever other names there are."""
    return zlib.crc32(name.encode()) % PARTS


def pairs() -> Iterator[tuple[str, str]]:
    """Yield the pairs of features that give no flag two values."""
    for first, second in itertools.combinations([feature.name for feature in FEATURES], 2):
        try:
            options_of((first, second))
        except ValueError:
            continue
        yield first, second


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return all cases: pairs, chosen sets, recipes, drawn sets of four to seven features."""
    return (
        *(Case(" with ".join(pair), pair) for pair in pairs()),
        *(Case(" with ".join(names), names) for names in SETS),
        *(Case(recipe.name, (*recipe.features, recipe.name)) for recipe in RECIPES),
        *(Case(f"set {number}", drawn(SEED, number).features) for number in range(NUM_SETS)),
    )


def chosen(parts: Collection[int]) -> list[Case]:
    """Return the cases of some parts, and those of every day."""
    return [case for case in cases() if case.part in parts or case.name in EVERYDAY]


@functools.cache
def part_of_commit() -> tuple[int, str]:
    """Return the part that --all runs at this commit, and why."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        return 0, "a shallow clone or an archive, whose number of commits is unknown"
    number = int(git("rev-list", "--count", "--first-parent", "HEAD"))
    return number % PARTS, f"commit number {number}"


def git(*arguments: str) -> str:
    """Return the output of git in the repository; '' where it fails."""
    try:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def rows_of_record() -> dict[str, list[str]]:
    """Return the record: name of a case -> name, digest, commit, verdict, seconds."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    return {row[0]: row for row in (line.split("\t") for line in lines if not line.startswith("#"))}


def clean_commit() -> str:
    """Return the commit of the checkout. Raises ValueError if there is none, or files that differ from it."""
    commit, changes = (
        git("rev-parse", "--short=12", "HEAD"),
        git("status", "--porcelain", "--", ".", ":!tests/ledger.tsv"),
    )
    if not commit or changes:
        raise ValueError(f"--ledger-record needs a checkout of a commit without changes; git status:\n{changes}")
    return commit


def write_record(passed: Iterable[tuple[Case, str, float]], commit: str) -> None:
    """Add cases that have passed at a commit, with their verdicts and seconds; drop those that exist no longer."""
    rows, known = rows_of_record(), {case.name for case in cases()}
    rows |= {case.name: [case.name, case.digest, commit, verdict, f"{took:.1f}"] for case, verdict, took in passed}
    lines = ["\t".join(row) for name, row in sorted(rows.items()) if name in known]
    head = (
        "# Cases of tests/ledger.py that passed: name, digest of the flags, commit, verdict, seconds (--ledger-record)"
    )
    RECORD.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")


def not_recorded() -> tuple[list[str], list[str]]:
    """Return the names of the cases that were never recorded, and of those that changed since."""
    rows = rows_of_record()
    every = cases()
    changed = [case.name for case in every if case.name in rows and rows[case.name][1] != case.digest]
    return [case.name for case in every if case.name not in rows], changed


if __name__ == "__main__":
    for title, names in zip(("never recorded", "changed since it was recorded"), not_recorded(), strict=True):
        print(f"{title}: {len(names)} of {len(cases())}", *names, sep="\n  ")

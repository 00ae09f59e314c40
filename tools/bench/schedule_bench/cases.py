"""The cases: a schedule at (p, m, v) with equal durations, or with real computation."""

from __future__ import annotations

from dataclasses import dataclass

TORCH_HAS = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v")
FAMILIES = {  # in the order of the tables: chunks a rank
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "breadth-first": 2,
    "hanayo": 2,
    "chimera": 1,  # and one for each direction
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "dualpipe": 1,  # and one for each direction
    "dualpipe-v": 2,
}


@dataclass(frozen=True)
class Case:
    """One row of a table.

    seconds: of F, of I, of W and of a replay of one stage, each. message_bytes: of an activation and of a gradient.
    steps: of a stream, which drains after the last of them; microbatches are those of one.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int = 1
    seconds: float = 0.010
    message_bytes: int = 65536
    steps: int = 1
    replays: str = ""  # 'in backwards' or 'in bubbles': each stage runs its forward again

    @property
    def contenders(self) -> tuple[str, ...]:
        """The contenders: torch only if it has the family."""
        has_torch = self.schedule in TORCH_HAS and not self.replays
        return ("megapipe", "torch", "floor") if has_torch else ("megapipe", "floor")

    @property
    def title(self) -> str:
        """The schedule, and where it replays."""
        return f"{self.schedule}, replays {self.replays}" if self.replays else self.schedule

    def __str__(self) -> str:
        steps = f", {self.steps} steps" if self.steps > 1 else ""
        return f"{self.title} p {self.ranks} m {self.microbatches} v {self.chunks}{steps}"


@dataclass(frozen=True)
class RealCase:
    """One schedule with real computation: `layers` blocks over all stages, fp32, one thread a rank."""

    schedule: str
    ranks: int = 2
    microbatches: int = 8
    chunks: int = 1
    layers: int = 8
    hidden: int = 256
    heads: int = 4
    seq: int = 256
    vocab: int = 256
    micro_batch: int = 1

    @property
    def contenders(self) -> tuple[str, ...]:
        """The contenders; 'alone' is one process without a pipeline, on rank 0."""
        return ("alone", "megapipe", "torch") if self.schedule in TORCH_HAS else ("alone", "megapipe")

    def __str__(self) -> str:
        return f"{self.schedule} p {self.ranks} m {self.microbatches} v {self.chunks}, real computation"


AnyCase = Case | RealCase


def _all(ranks: int, microbatches: int, seconds: float = 0.010) -> tuple[Case, ...]:
    rows = [Case(name, ranks, microbatches, chunks, seconds) for name, chunks in FAMILIES.items()]
    return (*rows, Case("pipedream-2bw", ranks, microbatches, seconds=seconds, steps=4))


PARTS: dict[str, tuple[AnyCase, ...]] = {
    "p4-m8": _all(4, 8),
    "p4-m32": _all(4, 32),
    "replays": tuple(
        Case(name, 4, 8, FAMILIES.get(name, 2), replays=replays)
        for name in ("1f1b", "zb-h1", "zb-v", "v-half", "v-min")
        for replays in ("in backwards", "in bubbles")
    ),
    "p8-m16": (
        *(Case(name, 8, 16, FAMILIES[name]) for name in ("1f1b", "zb-h1", "interleaved")),
        *(RealCase(name, 8, 16, FAMILIES[name], layers=16) for name in ("1f1b", "interleaved")),
    ),
    "zero": _all(2, 32, seconds=0.0),
    "real": tuple(
        RealCase(name, chunks=FAMILIES[name])
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
    ),
}
NOT_BY_DEFAULT = "p8-m16"  # it needs eight cores
QUICK: tuple[AnyCase, ...] = (
    Case("1f1b", 2, 3, 1, 0.002, 1024),
    Case("zb-v", 2, 4, 2, 0.002, 1024),
    Case("1f1b", 2, 3, 1, 0.002, 1024, replays="in bubbles"),
    Case("pipedream-2bw", 2, 3, 1, 0.002, 1024, steps=3),
    RealCase("1f1b", microbatches=2, layers=2, hidden=16, heads=2, seq=8, vocab=16),
)

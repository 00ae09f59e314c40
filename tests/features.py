"""The features of a run that can be combined, with the flags of each: the rows and columns of docs/composition.md.

`RECIPES` are combinations of them that published runs use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.tables import rows

EXACT, ROUNDED, ON_GPU, LIBRARY = "exact", "rounded", "on a GPU", "with a library"


@dataclass(frozen=True)
class Feature:
    """A feature of a run.

    needs: how a run without a GPU compares it. EXACT: in fp64. ROUNDED: only in low precision, or beside a process in
    low precision. ON_GPU: not at all, only its memory is counted. LIBRARY: neither, the library is not installed.
    """

    name: str
    flags: str
    needs: str = EXACT


@dataclass(frozen=True)
class Recipe:
    """A published combination, on a tiny model.

    flags: those of the recipe that are no feature. run: what it stands for. lacks: what of it does not exist yet, and
    is left out here.
    """

    name: str
    features: tuple[str, ...]
    flags: str
    run: str
    lacks: str = ""


TABLE = rows(Path(__file__).with_name("features.tsv"))
FEATURES = tuple(Feature(*row[1:]) for row in TABLE if row[0] == "feature")
RECIPES = tuple(
    Recipe(name, tuple(features.split(", ")), *rest) for kind, name, features, *rest in TABLE if kind == "recipe"
)

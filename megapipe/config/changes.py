"""The class of every configuration field: the meaning of its change for a run that continues from a checkpoint.

`checkpoint.changes` compares a run with a checkpoint by these classes, and `--use-checkpoint-args` takes the fields of
the model's function from it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from megapipe.config.config import all_fields
from megapipe.input_files import read_table

FUNCTION = "function"  # what the model computes from its weights
OPTIMIZER = "optimizer"  # how gradients become updates, and the state that this needs
DATA = "data"  # the samples, and how they are read
LOSS = "loss"  # what is minimized, and in which precision
SCHEDULE = "schedule"  # length, batch, rates and random streams of the run
NEUTRAL = "neutral"  # results are the same up to rounding and the reduction order of the grid, or not affected

CLASSES = (FUNCTION, OPTIMIZER, DATA, LOSS, SCHEDULE, NEUTRAL)

# 'section.name' -> class, and 'section.*' of the fields without a row, which new fields join. Where changes are passed
# over in silence a field has a row of its own, except of sections that cannot change a result.
ROWS = {key: kind for key, kind, _ in read_table(Path(__file__).with_name("changes.csv"))}


@cache
def classes() -> dict[str, str]:
    """Return 'section.name' -> class."""
    return {field.key: ROWS.get(field.key) or ROWS[f"{field.section}.*"] for field in all_fields()}

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

# section -> the class of its fields; those of the other sections are neutral
OF_SECTION = {"model": FUNCTION, "optimizer": OPTIMIZER, "data": DATA, "precision": LOSS, "training": SCHEDULE}
# 'section.name' -> the class of a field that has not that of its section
EXCEPTIONS = {key: kind for key, kind, _ in read_table(Path(__file__).with_name("changes.csv"))}


@cache
def classes() -> dict[str, str]:
    """Return 'section.name' -> class."""
    return {field.key: EXCEPTIONS.get(field.key, OF_SECTION.get(field.section, NEUTRAL)) for field in all_fields()}

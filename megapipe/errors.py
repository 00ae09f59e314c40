"""What megapipe raises. A `MegapipeError` is a message for a person: every door prints it without a traceback and exits non-zero."""

from __future__ import annotations


class MegapipeError(Exception):
    """Base of all errors whose message alone tells a user what happened and what to do."""

    exit_code = 1


class ConfigError(MegapipeError):
    """A wish that cannot be granted: names the key, its value, the rule and a way out."""

    exit_code = 2


class DataError(MegapipeError):
    """A data file or tokenizer that is missing, truncated or not what it says it is: names the file and the offending number."""


class ScheduleError(MegapipeError):
    """A pipeline schedule that is incomplete, misplaced, out of order or deadlocks: shows the rank x slot grid with the culprit marked."""


class CheckpointError(MegapipeError):
    """A checkpoint that cannot be written or read: names the file and the tensor."""


class DamageError(CheckpointError):
    """A checkpoint whose bytes are not those that were written, or cannot be read: an older one may do."""


class CommunicationError(MegapipeError):
    """A peer that did not answer, or answered with something else than was agreed."""


class TrainingError(MegapipeError):
    """Training cannot go on (a NaN loss, say): names step, rank, stage and microbatch."""


class NoProgressError(MegapipeError):
    """A job that was restarted again and again without coming further: starting it once more is not worth it."""

    exit_code = 3

"""The exceptions of megapipe. Commands print a `MegapipeError` without a traceback and exit with its code."""

from __future__ import annotations


class MegapipeError(Exception):
    """Base of all errors whose message is enough for a user to know what happened and what to do."""

    exit_code = 1


class ConfigError(MegapipeError):
    """A configuration that is impossible; the message has the key, its value, the rule and a way out."""

    exit_code = 2


class DisagreementError(ConfigError):
    """Ranks that were started with different flags, files or versions, or of which one cannot start; on all ranks."""


class DataError(MegapipeError):
    """A missing, truncated or inconsistent data file or tokenizer; the message has the file and the wrong number."""


class ScheduleError(MegapipeError):
    """A pipeline schedule that is incomplete, misplaced, out of order or deadlocks; the message shows its grid."""


class CheckpointError(MegapipeError):
    """A checkpoint that cannot be written or read; the message has the file and the tensor."""


class DamageError(CheckpointError):
    """A checkpoint that is damaged or cannot be read; an older one may be usable."""


class RemovedError(DamageError):
    """A checkpoint that was removed while it was read, as a run with --keep-last does; a newer one may exist."""


class NewerVersionError(CheckpointError):
    """A checkpoint in a format of a later version: nothing may be concluded about it, nor changed in it."""


class SaveRefusedError(CheckpointError):
    """A directory that this run cannot save in: another run does, or it is not writable. A restart would not help."""

    exit_code = 2


class CommunicationError(MegapipeError):
    """A peer that did not answer, or sent something unexpected."""


class TrainingError(MegapipeError):
    """Training that cannot continue (such as a NaN loss); the message has step, rank, stage and microbatch."""


class NoProgressError(MegapipeError):
    """A job that was restarted repeatedly without progress and should not be restarted again."""

    exit_code = 3

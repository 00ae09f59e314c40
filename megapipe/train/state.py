"""The position of a run: what there is to save besides tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megapipe.data.skipped import SkippedSamples

COUNTS = ("step", "consumed_samples", "consumed_tokens", "skipped_steps")


@dataclass(frozen=True)
class Account:
    """Samples that were skipped or trained on in vain.

    skipped: windows of the data set that are passed over. rollbacks: how often the run went back to a checkpoint.
    discarded_*: trained on, then taken back with the weights.
    """

    skipped: SkippedSamples = field(default_factory=SkippedSamples)
    rollbacks: int = 0
    discarded_samples: int = 0
    discarded_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "skipped_samples": [list(window) for window in self.skipped.windows],
            "rollbacks": self.rollbacks,
            "discarded_samples": self.discarded_samples,
            "discarded_tokens": self.discarded_tokens,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> Account:
        """Restore `to_dict`; None, from a checkpoint without an account, gives an empty one."""
        if values is None:
            return cls()
        counts = (int(values[name]) for name in ("rollbacks", "discarded_samples", "discarded_tokens"))
        return cls(SkippedSamples.of(values["skipped_samples"]), *counts)


@dataclass
class TrainingState:
    """Position of a run.

    step: optimizer steps whose results are known, skipped ones included. consumed_*: what these weights were trained
    on, in the order of the data set without account.skipped. spikes: state of the spike watch, None without it.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    account: Account = field(default_factory=Account)
    spikes: dict[str, Any] | None = None

    def advance(self, samples: int, tokens: int) -> None:
        """Count one more step."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    @property
    def num_skipped_samples(self) -> int:
        """Number of samples before this position that these weights were not trained on."""
        return self.account.skipped.index(self.consumed_samples) - self.consumed_samples

    def become(self, other: TrainingState) -> None:
        """Take over another position, in place."""
        vars(self).update(vars(other))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts; account and spikes are separate entries of a checkpoint."""
        return {name: getattr(self, name) for name in COUNTS}

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], account: Account | None = None, spikes: dict[str, Any] | None = None
    ) -> TrainingState:
        return cls(**{name: int(values[name]) for name in COUNTS}, account=account or Account(), spikes=spikes)

"""What a run is besides its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainingState:
    """Position of a run. `step` counts optimizer steps taken, skipped ones included; samples and tokens those of the training set."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0

    def advance(self, samples: int, tokens: int) -> None:
        """One more step was taken; whether it was skipped may be known later."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        return cls(**{name: int(values[name]) for name in cls.__dataclass_fields__})

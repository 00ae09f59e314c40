"""The loss over held-out batches: the same stages and the same engine, forwards only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megapipe.model.microbatch import Microbatch
from megapipe.train.step import TrainStep


def evaluate(step: TrainStep, batches: Iterable[Sequence[Microbatch]], per_token: bool) -> tuple[float, int]:
    """(loss, tokens) over global batches: the mean of their losses, or with per_token over all their tokens. The same on every rank."""
    weighted = weights = tokens = 0.0
    for batch in batches:
        result = step.evaluate(batch)
        weight = result.num_tokens if per_token else 1.0
        weighted += result.loss * weight
        weights += weight
        tokens += result.num_tokens
    return weighted / max(weights, 1.0), round(tokens)

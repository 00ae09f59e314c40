"""Perplexity: windows score every token once, and the loss equals that of plain forwards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.extras.inference.generate import Perplexity, score, windows
from megapipe.model.microbatch import Microbatch
from megapipe.monitor import progress
from tests.extras.inference.grids import SIZES, runtime_on

TOKENS = np.random.default_rng(4).integers(0, 29, 131).astype(np.uint16)


@given(num_tokens=st.integers(2, 300), seq=st.integers(1, 40), share=st.floats(0.01, 1.0))
def test_windows_score_every_token_but_the_first_once(num_tokens: int, seq: int, share: float) -> None:
    stride = max(1, int(seq * share))
    found = list(windows(num_tokens, seq, stride))
    scored = [token for w in found for token in range(w.start + w.length - w.scored + 1, w.start + w.length + 1)]
    assert scored == list(range(1, num_tokens))
    assert {w.length for w in found} == {min(seq, num_tokens - 1)}
    assert all(w.start >= 0 and w.scored >= 1 for w in found)
    assert all(w.length - w.scored >= seq - stride for w in found[1:])


def expected_loss(tokens: np.ndarray, stride: int) -> float:
    """Return the loss token by token: each token's log-probability given the preceding tokens of its window."""
    stage = runtime_on(0, 1, {}, {}).stages[0]
    total = 0.0
    for window in windows(len(tokens), SIZES["seq_length"], stride):  # type: ignore[arg-type]
        text = torch.from_numpy(tokens[window.start : window.start + window.length + 1].astype(np.int64))
        with torch.no_grad():
            logits = stage(Microbatch(text[None, :-1]), return_logits=True)
        assert isinstance(logits, Tensor)
        log_probabilities = logits[:, 0, : SIZES["vocab_size"]].log_softmax(-1)  # type: ignore[misc]
        for position in range(window.length - window.scored, window.length):
            total -= float(log_probabilities[position, text[position + 1]])
    return total / (len(tokens) - 1)


@pytest.mark.parametrize(
    ("count", "stride"), [(131, 12), (131, 5), (8, 12), (2, 12)], ids=["whole", "stride_5", "short", "one_token"]
)
def test_the_loss_is_that_of_plain_forwards(count: int, stride: int) -> None:
    found = score(runtime_on(0, 1, {}, {}), TOKENS[:count], stride)
    assert found.num_tokens == count - 1
    assert found.loss == pytest.approx(expected_loss(TOKENS[:count], stride), rel=1e-10)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


@pytest.mark.parametrize(
    ("count", "stride", "words"), [(1, 4, "1 tokens cannot"), (9, 0, "--stride 0"), (9, 13, "--stride 13")]
)
def test_streams_that_cannot_be_scored_are_refused(count: int, stride: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        next(windows(count, 12, stride))


def test_a_loss_too_large_for_its_exponential_has_an_infinite_perplexity() -> None:
    assert Perplexity(1000.0, 5).perplexity == math.inf


def test_the_progress_of_a_score_is_said_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    said: list[str] = []
    score(runtime_on(0, 1, {}, {}), TOKENS, None, said.append)
    count = len(list(windows(len(TOKENS), 12, 12)))
    assert said and all(f" of {count} windows | " in line and line.endswith(" left") for line in said)

"""Models with layers that differ, converted from transformers: greedy texts and losses equal its own on every grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.extras.convert import hugging_face
from megapipe.extras.inference.generate import Generator, Limits, Sampling, score, windows
from tests.extras.convert.models import CASES, LENGTH, logits, make, save
from tests.extras.inference.grids import runtime_on
from tests.harness import RankPool

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)
EXPERTS = ["gpt_oss", "glm4_moe", "qwen2_moe", "mixtral"]
NAMES = ["gpt2", "llama_yarn", "qwen2_tied", "mistral_window", "gemma2", "gemma3", "olmo2", "olmo2_one_kv_head_linear"]
NAMES += ["olmo3", "ministral", *EXPERTS]
PROMPTS = [[5, 6, 7, 8, 9, 1, 2, 11, 12], [3], [4, 4, 2]]  # the first is longer than the window
NEW = LENGTH - 9
STREAM = np.random.default_rng(4).integers(0, 61, 60).astype(np.uint16)
GRID = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
EXPERT_GRID = GRID | {
    "sequence_parallel": True,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}


def converted(name: str, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Return a model of transformers, our options of it, and its weights by our names."""
    theirs = make(CASES[name])
    snapshot = hugging_face.read(save(theirs, folder))
    model = dataclasses.replace(snapshot.config.model, seq_length=LENGTH, make_vocab_size_divisible_by=8)
    return theirs, vars(model), {name: tensor.detach() for name, tensor in snapshot.weights.items()}


def texts_and_loss(
    rank: int, world_size: int, grid: dict[str, int], model: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[list[list[int]], float]:
    runtime = runtime_on(rank, world_size, grid, model, weights, dtype="fp32")
    texts = Generator(runtime, Sampling(temperature=0.0), batch_size=2).continue_prompts(PROMPTS, Limits(NEW))
    return texts, score(runtime, STREAM, stride=10).loss


def loss_of(model: Any) -> float:
    """Return the loss of the stream by transformers, window by window."""
    total = 0.0
    for window in windows(len(STREAM), LENGTH, 10):
        text = torch.from_numpy(STREAM[window.start : window.start + window.length + 1].astype(np.int64))
        scores = logits(model, text[None, :-1])[0].log_softmax(-1).gather(1, text[1:, None])
        total -= float(scores[-window.scored :].double().sum())
    return total / (len(STREAM) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_cached_greedy_texts_and_the_loss_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs, model, weights = converted(name, tmp_path / "theirs")
    texts, loss = texts_and_loss(0, 1, {}, model, weights)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        for use_cache in (True, False):
            found = theirs.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW,
                do_sample=False,
                use_cache=use_cache,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert text == found[0, len(prompt) :].tolist()
        assert len(text) == NEW
    assert len({token for text in texts for token in text}) > 3, "the texts were to vary"
    assert loss == pytest.approx(loss_of(theirs), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_tp2_pp2_writes_the_same_texts_and_finds_the_same_loss(
    rank_pools: Callable[[int], RankPool], tmp_path: Path, name: str
) -> None:
    _, model, weights = converted(name, tmp_path / "theirs")
    texts, loss = texts_and_loss(0, 1, {}, model, weights)
    grid = EXPERT_GRID if name in EXPERTS else GRID
    for found_texts, found_loss in rank_pools(4).run(texts_and_loss, grid, model, weights):
        assert found_texts == texts
        assert found_loss == pytest.approx(loss, rel=1e-6)

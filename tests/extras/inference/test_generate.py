"""Generation with a cache returns the same tokens as forwards over the whole text.

The tokens do not depend on the grid; test_converted.py compares them with transformers' models. Draws follow the
probabilities and depend only on their key; streamed text adds up to the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.inference.generate import INCOMPLETE_CHARACTER, Generator, Limits, Sampling, TextStream, score
from megapipe.model.microbatch import Microbatch
from megapipe.tokenizers.tokenizer import ByteTokenizer
from tests.extras.inference.grids import EXPERT_GRIDS, EXPERTS, SIZES, runtime_on
from tests.harness import RankPool
from tests.tiny import NOPE

Pools = Callable[[int], RankPool]

STREAM = np.random.default_rng(4).integers(0, 29, 131).astype(np.uint16)
PROMPTS = [[5, 6, 7, 8, 9, 1, 2], [3], [4, 4, 2], [17, 0, 3, 28, 2], [1, 2], [9, 8, 7, 6]]
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2_tied": {},
    "llama_gqa": LLAMA,
    "window_and_qk_norm": LLAMA | {"window_size": 4, "qk_layernorm": True},
    "soft_cap": LLAMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "num_query_groups": 4},
    "queries_that_grow": LLAMA | NOPE | {"qk_l2_norm": True},
    "predictions": LLAMA | {"mtp_num_layers": 1},  # which generation does not use
    "one_kv_head": LLAMA | {"num_query_groups": 1},
}
GRIDS: dict[str, dict[str, int]] = {
    "dp4": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2_dp2": {"pipeline_model_parallel_size": 2},
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
}
SAMPLED = Sampling(temperature=1.0, top_k=12, top_p=0.95, seed=2)


def generated(
    rank: int,
    world_size: int,
    grid: dict[str, int],
    model: dict[str, Any],
    sampling: Sampling,
    batch_size: int,
    limits: Limits,
) -> tuple[list[list[int]], float]:
    """Return the text of each prompt, and the loss of STREAM."""
    runtime = runtime_on(rank, world_size, grid, model)
    texts = Generator(runtime, sampling, batch_size).continue_prompts(PROMPTS, limits)
    return texts, score(runtime, STREAM, stride=7).loss


def assert_same(found: list[Any], expected: tuple[list[list[int]], float]) -> None:
    for texts, loss in found:
        assert texts == expected[0]
        assert loss == pytest.approx(expected[1], rel=1e-10)


def by_whole_forwards(
    logits_of: Callable[[Tensor], Tensor], prompt: Sequence[int], number: int, sampling: Sampling, count: int
) -> list[int]:
    """Generate each token by a forward over the whole text so far. logits_of: [1, s] -> [1, s, vocabulary]."""
    text = list(prompt)
    for position in range(count):
        logits = logits_of(torch.tensor([text]))[:, -1]
        text.append(int(sampling.choose(logits, [number], position)))
    return text[len(prompt) :]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_batch_of_unequal_prompts_equals_each_alone_by_whole_forwards(model: str) -> None:
    runtime = runtime_on(0, 1, {}, MODELS[model])
    stage = runtime.stages[0]

    def logits_of(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            logits = stage(Microbatch(tokens), return_logits=True)
        assert isinstance(logits, Tensor)
        return logits.transpose(0, 1)[..., : SIZES["vocab_size"]]  # type: ignore[misc]

    texts = Generator(runtime, SAMPLED, batch_size=4).continue_prompts(PROMPTS, Limits(10))
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert text == by_whole_forwards(logits_of, prompt, number, SAMPLED, 10)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_grid_writes_the_same_texts(rank_pools: Pools, grid: str) -> None:
    """And finds the same loss."""
    pool = rank_pools(2 if grid == "tp2" else 4)
    for model in ("gpt2_tied", "window_and_qk_norm", "one_kv_head"):
        expected = generated(0, 1, {}, MODELS[model], SAMPLED, 8, Limits(8, frozenset({3})))
        for batch_size in (1, 4):
            options = GRIDS[grid], MODELS[model], SAMPLED, batch_size, Limits(8, frozenset({3}))
            assert_same(pool.run(generated, *options), expected)


def test_experts_are_told_of_padding_and_of_texts_that_have_ended() -> None:
    """A prompt of 22 tokens leaves two positions of 24; the one beside it has two tokens."""
    runtime = runtime_on(0, 1, {}, EXPERTS)
    found: list[Any] = []
    runtime.stages[0].register_forward_pre_hook(lambda module, inputs: found.append(inputs[-1].padding))
    Generator(runtime, SAMPLED, batch_size=2).continue_prompts([[1] * 22, [2] * 2], Limits(4))
    prompts, second, *ended = found
    assert prompts.tolist() == [[False] * 22, [True] * 20 + [False] * 2]
    assert second is None
    assert [each.tolist() for each in ended] == [[[True], [False]]] * 2


@pytest.mark.parametrize("grid", EXPERT_GRIDS, ids=str)
def test_every_grid_of_experts_writes_the_same_texts(rank_pools: Pools, grid: str) -> None:
    expected = generated(0, 1, {}, EXPERTS, SAMPLED, 4, Limits(8, frozenset({3})))
    options = EXPERT_GRIDS[grid], EXPERTS, SAMPLED, 4, Limits(8, frozenset({3}))
    assert_same(rank_pools(4).run(generated, *options), expected)


def test_a_text_ends_before_a_stop_token_and_at_the_last_position() -> None:
    runtime = runtime_on(0, 1, {}, LLAMA)
    whole = Generator(runtime, SAMPLED).continue_prompts(PROMPTS, Limits(100))
    assert [len(text) for text in whole] == [24 - len(prompt) for prompt in PROMPTS]
    stop = frozenset(whole[0][3:5])
    seen: list[tuple[int, int]] = []
    cut = Generator(runtime, SAMPLED).continue_prompts(
        PROMPTS, Limits(100, stop), lambda number, token: seen.append((number, token))
    )
    for number, (text, complete) in enumerate(zip(cut, whole, strict=True)):
        ends = [position for position, token in enumerate(complete) if token in stop]
        assert text == complete[: ends[0] if ends else None]
        assert text == [token for which, token in seen if which == number]
    assert len(cut[0]) <= 3


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], []], "prompt 1 has no tokens"),
        ([[1] * 24], "prompt 0 has 24 tokens"),
        ([[29]], "outside the vocabulary of 29"),
    ],
    ids=["empty", "no_room", "foreign_token"],
)
def test_prompts_that_cannot_be_continued_are_named(prompts: list[list[int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Generator(runtime_on(0, 1, {}, {}), SAMPLED).continue_prompts(prompts, Limits(1))


def nan_generates(rank: int, world_size: int, grid: dict[str, int]) -> list[str]:
    """Generate with a model whose first stage has NaN weights; return the error, twice."""
    runtime = runtime_on(rank, world_size, grid, LLAMA)
    for stage in runtime.stages.values():
        if stage.stage_layers.has_embedding:
            with torch.no_grad():
                next(stage.parameters()).fill_(math.nan)
    found = []
    for sampling in (SAMPLED, Sampling(temperature=0.0)):
        with pytest.raises(CheckpointError) as caught:
            Generator(runtime, sampling, batch_size=4).continue_prompts(PROMPTS, Limits(3))
        found.append(str(caught.value))
    return found


def test_a_model_of_nan_is_an_error_on_all_ranks(rank_pools: Pools) -> None:
    expected = nan_generates(0, 1, {})
    assert "NaN" in expected[0]
    assert rank_pools(4).run(nan_generates, GRIDS["tp2_pp2"]) == [expected] * 4


# ------------------------------------------------------------------------------------------------- sampling

LOGITS = st.lists(st.floats(-20, 20), min_size=1, max_size=12)


def probabilities(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """Return the distribution that `choose` draws from: [batch, vocabulary], fp64, zero outside the candidates."""
    values, tokens = sampling.candidates(logits)
    whole = torch.zeros(logits.shape, dtype=torch.float64)
    return whole.scatter(-1, tokens, values / values.sum(-1, keepdim=True))


@given(logits=LOGITS, temperature=st.floats(0.1, 5.0), top_k=st.integers(0, 14), top_p=st.floats(0.01, 1.0))
def test_candidates_are_the_fewest_most_likely_that_reach_top_p_among_the_top_k(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    """The expected candidates are computed one token at a time in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = [math.exp((logits[token] - max(logits)) / temperature) for token in ranked]
    kept: list[int] = []
    reached = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if reached >= top_p:
            break
        kept.append(token)
        reached += weight / sum(weights)
    found = probabilities(Sampling(temperature, top_k, top_p), torch.tensor([logits], dtype=torch.float64))[0]
    total = sum(weights[: len(kept)])
    expected = torch.zeros(len(logits), dtype=torch.float64)
    expected[kept] = torch.tensor([weight / total for weight in weights[: len(kept)]], dtype=torch.float64)
    if abs(reached - top_p) > 1e-9:  # a sum equal to top_p in exact arithmetic may round either way
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_temperature_0_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.9]])
    assert Sampling(temperature=0.0, top_k=2, top_p=0.1).choose(logits, [0, 1], 5).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-308, 1e-300, 1e-30])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.9], [-1e30, -3e38, 3e38], [1e-3, 0.0, -1e-3]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        chosen = Sampling(temperature, top_p=0.9).choose(logits.to(dtype), range(4), 5)
        assert chosen.tolist() == [1, 0, 2, 0]


@given(logits=LOGITS, exponent=st.floats(-323, 0), top_k=st.integers(0, 3), top_p=st.floats(1e-6, 1.0))
def test_every_temperature_draws_a_token(logits: list[float], exponent: float, top_k: int, top_p: float) -> None:
    (token,) = Sampling(10.0**exponent, top_k, top_p).choose(torch.tensor([logits]), [0], 0).tolist()
    assert 0 <= token < len(logits)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]])
    sampling = Sampling(temperature=1.3, top_p=0.9)
    count = 4000
    drawn = torch.bincount(sampling.choose(logits.expand(count, -1), range(count), 0), minlength=5).double() / count
    expected = probabilities(sampling, logits)[0]
    assert (drawn[expected == 0] == 0).all()
    assert (drawn - expected).abs().max() < 4 * math.sqrt(0.25 / count)  # four standard deviations


def test_a_draw_depends_on_seed_prompt_and_position_alone() -> None:
    logits = torch.zeros(6, 1000)
    whole = Sampling(seed=3).choose(logits, range(6), 2)
    for prompt in range(6):
        assert Sampling(seed=3).choose(logits[:1], [prompt], 2) == whole[prompt]
    assert len(set(whole.tolist())) > 3
    assert Sampling(seed=4).choose(logits, range(6), 2).tolist() != whole.tolist()
    assert Sampling(seed=3).choose(logits, range(6), 3).tolist() != whole.tolist()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"seed": -1},
    ],
    ids=lambda values: "-".join(map(str, next(iter(values.items())))),
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(values)).replace("_", "-")):
        Sampling(**values)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ streaming


@given(text=st.text(max_size=20), cut=st.integers(0, 80))
def test_pieces_add_up_to_the_text(text: str, cut: int) -> None:
    tokenizer, pieces = ByteTokenizer(), list[str]()
    tokens = tokenizer.encode(text)[: len(tokenizer.encode(text)) - cut or None] if cut else tokenizer.encode(text)
    stream = TextStream(tokenizer.decode, [], pieces.append)
    for token in tokens:
        stream.add(token)
    assert INCOMPLETE_CHARACTER in text or not any(piece.endswith(INCOMPLETE_CHARACTER) for piece in pieces)
    stream.close()
    assert "".join(pieces) == tokenizer.decode(tokens)


def test_the_prompt_is_not_repeated() -> None:
    tokenizer, pieces = ByteTokenizer(), list[str]()
    stream = TextStream(tokenizer.decode, tokenizer.encode("naïv"), pieces.append)
    for token in tokenizer.encode("eté"):
        stream.add(token)
    assert pieces == ["e", "t", "é"]

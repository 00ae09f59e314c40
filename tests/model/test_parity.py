"""The whole model in one stage against the reference in fp64: loss and every gradient, option by option."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megapipe.config.config import ResolvedModelConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import (
    GPT2,
    LLAMA,
    SETS,
    assert_equal,
    make_microbatch,
    make_stage,
    model_config,
    options_of,
    reference,
    reference_run,
)
from tests.tables import options, rows, value

OPTIONS = options_of("parity", SETS)
STACKS = rows(Path(__file__).with_name("stacks.tsv"))
WITH_DOCUMENTS = ["gpt2", "llama", "window", "qk_norm_llama", "dropout_gqa_cap"]
KEY = DropoutKey(seed=11, step=2, microbatch=7)


@pytest.mark.parametrize(
    ("name", "documents"),
    [pytest.param(name, False, id=name) for name in OPTIONS]
    + [pytest.param(name, True, id=f"{name}-documents") for name in WITH_DOCUMENTS],
)
def test_loss_and_gradients_equal_the_reference(name: str, documents: bool) -> None:
    config = model_config(**OPTIONS[name])
    assert_equals_reference(config, reference(config), documents)


@pytest.mark.parametrize(("name", "words", "stack"), STACKS, ids=[row[0] for row in STACKS])
def test_layers_that_differ_equal_the_reference_with_a_list_by_hand(name: str, words: str, stack: str) -> None:
    layers = [{} if text == "-" else options(text, SETS) for text in stack.split(" / ")]
    config = model_config(**LLAMA | value(words), num_layers=5)
    assert_equals_reference(config, reference(config, layers=layers), documents="windows" in name)


def assert_equals_reference(config: ResolvedModelConfig, model: ReferenceGPT, documents: bool) -> None:
    microbatch = make_microbatch(config, documents=documents, dropout_key=KEY)
    expected = reference_run(model, microbatch)
    stage = make_stage(config, dict(model.named_parameters()))
    loss = stage(microbatch)
    loss.loss_sum.backward()
    assert_equal(loss.loss_sum, expected.loss_sum, "loss")
    assert loss.num_tokens == expected.num_tokens
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert grads.keys() == expected.grads.keys()
    for name, grad in grads.items():
        assert_equal(grad, expected.grads[name], name)


def test_missing_loss_mask_counts_every_token() -> None:
    config = model_config(**GPT2)
    model = reference(config)
    microbatch = make_microbatch(config)
    stage = make_stage(config, dict(model.named_parameters()))
    everywhere = torch.ones_like(microbatch.loss_mask)
    with_mask = stage(dataclasses.replace(microbatch, loss_mask=everywhere))
    without = stage(dataclasses.replace(microbatch, loss_mask=None))
    assert with_mask.loss_sum == without.loss_sum
    assert with_mask.num_tokens == without.num_tokens == everywhere.sum()

"""Logits of a GPTStage equal those of transformers' models with random weights, for every model option, in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.model.microbatch import Microbatch
from tests.extras.reference.transformers_models import FAMILIES, SEQ, VOCAB, build
from tests.model.grids import make_stage

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)


def stage_logits(family: str, microbatch: Microbatch, **changed: Any) -> torch.Tensor:
    case = build(family)
    stage = make_stage(ModelConfig(**case.config | changed), case.state)
    with torch.no_grad():
        return stage(microbatch, return_logits=True).transpose(0, 1)


def draw_tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_logits_equal_transformers(family: str) -> None:
    tokens = draw_tokens(seed=4)
    torch.testing.assert_close(
        stage_logits(family, Microbatch(tokens)), build(family).logits(tokens), rtol=0.0, atol=1e-5
    )


@pytest.mark.parametrize("family", ["llama", "llama_rope_yarn", "mistral_window", "gemma2_soft_cap", "gpt2"], ids=str)
def test_packed_documents_equal_transformers_on_each_document_alone(family: str) -> None:
    tokens = draw_tokens(seed=5)
    lengths = [9, 1, SEQ - 10]
    documents = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)]).expand(2, SEQ)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, SEQ)
    expected = torch.cat([build(family).logits(document) for document in tokens.split(lengths, dim=1)], dim=1)
    packed = Microbatch(tokens, position_ids=positions, document_ids=documents)
    torch.testing.assert_close(stage_logits(family, packed), expected, rtol=0.0, atol=1e-5)
    unmasked = stage_logits(family, replace(packed, document_ids=None))
    assert (unmasked - expected).abs().max() > 1e-3

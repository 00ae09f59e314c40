"""The oracle's configuration covers the model section; its dropout masks are those of the grid."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.verify.oracle import FROM_TRAINING, GridMasks, reference_config
from megapipe.plan.resolve import resolve
from megapipe.tensor_parallel.random import DropoutKey, keyed_mask
from tests.tiny import LLAMA, tiny_config

# the reference computes in fp32 or better anyway; its weights and padded vocabulary are given
WITHOUT_EFFECT = {"make_vocab_size_divisible_by", "init_method_std", "attention_softmax_in_fp32"}
KEY = DropoutKey(seed=3, step=1, microbatch=5)


def test_every_model_option_reaches_the_reference() -> None:
    options = {field.name for field in dataclasses.fields(ModelConfig)}
    known = {field.name for field in dataclasses.fields(ReferenceConfig)}
    assert options - known == WITHOUT_EFFECT
    assert known - options == set(FROM_TRAINING)
    config = resolve(tiny_config(**LLAMA, tp=2, label_smoothing=0.1, z_loss=1e-3), 2).config
    made = reference_config(config)
    assert all(getattr(made, name) == getattr(config.model, name) for name in options & known)
    assert (made.label_smoothing, made.z_loss) == (0.1, 1e-3)


@pytest.mark.parametrize("options", [{}, LLAMA, {"qk_layernorm": True}], ids=["gpt2", "llama", "qk-norm"])
def test_the_reference_has_the_parameters_of_the_specs_in_their_order(options: dict) -> None:
    plan = resolve(tiny_config(**options), 1)
    model = ReferenceGPT(reference_config(plan.config))
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        s.name: s.shape for s in plan.specs
    }


def masks(**options: object) -> GridMasks:
    return GridMasks(resolve(tiny_config(tp=2, hidden_dropout=0.25, attention_dropout=0.5, **options), 2).config, KEY)


def test_attention_masks_are_cut_by_heads() -> None:
    whole = masks()(1, "attention_probs", (3, 4, 8, 8))
    for tp_rank in range(2):
        slice_of_rank = keyed_mask((3, 2, 8, 8), 0.5, KEY, 1, "attention_probs", tp_rank)
        assert torch.equal(whole[:, 2 * tp_rank : 2 * tp_rank + 2], slice_of_rank.double() / 0.5)


@pytest.mark.parametrize("site", ["embedding", "attention_output", "mlp_output"])
def test_hidden_masks_are_cut_by_the_sequence_only_under_sequence_parallelism(site: str) -> None:
    shared, cut = masks()(0, site, (3, 8, 16)), masks(sp=True)(0, site, (3, 8, 16))
    assert torch.equal(shared, keyed_mask((8, 3, 16), 0.25, KEY, 0, site).transpose(0, 1).double() / 0.75)
    for tp_rank in range(2):
        slice_of_rank = keyed_mask((4, 3, 16), 0.25, KEY, 0, site, tp_rank)
        assert torch.equal(cut[:, 4 * tp_rank : 4 * tp_rank + 4], slice_of_rank.transpose(0, 1).double() / 0.75)

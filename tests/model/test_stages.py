"""Stages: names and shapes match their declarations, their composition equals one stage, inference, dtypes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megapipe.comm.groups import Group
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.layers.model import stage_parameters
from megapipe.model.attention import explicit_attention
from megapipe.model.context import whole_mask
from megapipe.model.microbatch import KVCache
from megapipe.model.stage import GPTStage
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.sequence import SequenceSlice, Visibility
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.trace.parameters import model_parameters
from tests.model.grids import (
    GPT2,
    LLAMA,
    SEQ,
    UNLIKE,
    assert_equal,
    make_microbatch,
    make_stage,
    model_config,
    reference,
    reference_run,
)

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
OPTIONS = {
    "gpt2": GPT2 | DROPOUT,
    "gpt2_untied_qk_norm": GPT2 | {"untie_embeddings_and_output_weights": True, "qk_layernorm": True},
    "llama": LLAMA | {"window_size": 5},
    "llama_tied": LLAMA | {"untie_embeddings_and_output_weights": False, "add_qkv_bias": True},
    "unlike": UNLIKE | {"hidden_dropout": 0.2, "untie_embeddings_and_output_weights": False},
}
CUTS = {
    "2|1": [StageLayers(0, 2, True, False), StageLayers(2, 3, False, True)],
    "1|1|1": [StageLayers(0, 1, True, False), StageLayers(1, 2, False, False), StageLayers(2, 3, False, True)],
    "E|3|L": [StageLayers(0, 0, True, False), StageLayers(0, 3, False, False), StageLayers(3, 3, False, True)],
}


@pytest.mark.parametrize("tp_rank", [0, 1, 3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_those_that_the_specs_declare(name: str, cut: str, tp_rank: int) -> None:
    config = model_config(**OPTIONS[name], num_layers=3)
    for layers in CUTS[cut]:
        tp = Group("tp", (0, 1, 2, 3), tp_rank)
        stage = GPTStage(
            config, layers, tp, sequence_parallel=False, recompute=RecomputeConfig(), loss=TrainingConfig()
        )
        numbers = range(layers.first_layer, layers.last_layer_exclusive)
        specs = stage_parameters(model_parameters(config, False), numbers, layers.has_embedding, layers.has_head)
        declared = {spec.name: spec.local_shape(tp_rank, 4) for spec in specs}
        assert {key: tuple(p.shape) for key, p in stage.named_parameters()} == declared
        assert all(parameter.is_meta for parameter in stage.parameters())


def test_a_tied_head_in_one_stage_is_one_parameter() -> None:
    config = model_config(**GPT2)
    stage = make_stage(config, dict(reference(config).named_parameters()))
    assert stage.output_layer.weight is stage.embedding.word_embeddings.weight


OF_CACHE = {
    "layers that differ": UNLIKE | {"num_layers": 6},
    "sinks": LLAMA | {"softmax_type": "learnable", "window_size": 4},
    "chunks": LLAMA | {"attention_kind": "chunked", "window_size": 5},
    "values narrower than keys": LLAMA
    | {"multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 7, "qk_head_dim": 6}
    | {"qk_pos_emb_head_dim": 4, "v_head_dim": 8},
}


@pytest.mark.parametrize("lengths", [(1,) * SEQ, (5, 1, 6)], ids=["token by token", "in three pieces"])
@pytest.mark.parametrize("name", OF_CACHE)
def test_a_cache_gives_the_logits_of_the_whole_sequence(name: str, lengths: tuple[int, ...]) -> None:
    config = model_config(**OF_CACHE[name])
    model = reference(config)
    stage = make_stage(config, dict(model.named_parameters()))
    microbatch = dataclasses.replace(make_microbatch(config), labels=None, loss_mask=None)
    with torch.no_grad():
        expected = stage(microbatch, return_logits=True)
        assert_equal(expected[..., :29].transpose(0, 1), model.logits(microbatch.tokens), "without a cache")
        cache = KVCache(SEQ)
        for length in lengths:
            new = slice(cache.length, cache.length + length)
            positions = torch.arange(SEQ)[new].expand(microbatch.tokens.shape[0], -1)
            piece = dataclasses.replace(
                microbatch, tokens=microbatch.tokens[:, new], position_ids=positions, cache=cache
            )
            assert_equal(stage(piece, return_logits=True), expected[new], f"positions {new}")
            cache.advance(length)


def test_a_microbatch_without_labels_has_no_loss() -> None:
    config = model_config(**GPT2)
    stage = make_stage(config, dict(reference(config).named_parameters()))
    with pytest.raises(ValueError, match="no labels"):
        stage(dataclasses.replace(make_microbatch(config), labels=None))


def test_an_inner_stage_without_hidden_states_raises() -> None:
    config = model_config(**GPT2)
    stage = make_stage(config, dict(reference(config).named_parameters()), layers=StageLayers(1, 2, False, False))
    with pytest.raises(ValueError, match="needs the hidden states"):
        stage(make_microbatch(config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_half_types_come_near_fp64(name: str, dtype: torch.dtype) -> None:
    config = model_config(**OPTIONS[name])
    model = reference(config)
    microbatch = make_microbatch(config, dropout_key=DropoutKey(1, 2, 3))
    weights = {key: tensor.detach().to(dtype) for key, tensor in model.named_parameters()}
    model.load_state_dict({key: tensor.double() for key, tensor in weights.items()})
    expected = reference_run(model, microbatch)
    stage = make_stage(config, weights)
    loss = stage(microbatch)
    loss.loss_sum.backward()
    assert loss.loss_sum.dtype == torch.float32
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    assert_equal(loss.loss_sum.double(), expected.loss_sum, "loss", tolerance / 10)
    for key, parameter in stage.named_parameters():
        assert parameter.grad.dtype == dtype
        assert_equal(parameter.grad.double(), expected.grads[key], key, tolerance)


def test_one_table_and_mask_are_kept_for_all_lengths() -> None:
    config = model_config(**LLAMA, window_size=3)
    stage = make_stage(config, dict(reference(config).named_parameters()))
    tokens = make_microbatch(config).tokens
    with torch.no_grad():
        whole = stage(dataclasses.replace(make_microbatch(config), tokens=tokens), return_logits=True)
        for length in range(1, SEQ + 1):
            logits = stage(dataclasses.replace(make_microbatch(config), tokens=tokens[:, :length]), return_logits=True)
            assert_equal(logits, whole[:length], f"{length} tokens")
    (rotary,) = stage.make_context.rotary.values()
    assert len(rotary._tables) == 1


def test_explicit_attention_in_fp16_does_not_overflow_on_large_logits() -> None:
    q = torch.full((4, 1, 1, 2, 64), 60.0, dtype=torch.float16)
    k = torch.full((4, 1, 1, 1, 64), 60.0, dtype=torch.float16)
    v = torch.arange(4, dtype=torch.float16).view(4, 1, 1, 1, 1).expand_as(k)
    mask = whole_mask(Visibility.of(SequenceSlice((4,))), q.device, q.dtype)
    output = explicit_attention(q, k, v, mask, 64**-0.5, None, None)  # q k = 230,400 > 65,504
    assert torch.equal(output[:, 0, 0], torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float16))

"""The reference model: names and shapes, attention masks, dropout sites, loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from tests.extras.reference.tiny import EVERYTHING, SIZES, batch, build, draw_weights, dropout_masks

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def shapes(**changed: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in build(num_layers=1, **changed).named_parameters()}


def test_gpt2_shape_has_megatrons_names_and_layouts():
    layer = "decoder.layers.0."
    assert shapes() == {
        "embedding.word_embeddings.weight": (24, 16),
        "embedding.position_embeddings.weight": (8, 16),
        layer + "input_layernorm.weight": (16,),
        layer + "input_layernorm.bias": (16,),
        layer + "self_attention.linear_qkv.weight": ((4 + 2 * 2) * 6, 16),
        layer + "self_attention.linear_qkv.bias": ((4 + 2 * 2) * 6,),
        layer + "self_attention.linear_proj.weight": (16, 24),
        layer + "self_attention.linear_proj.bias": (16,),
        layer + "pre_mlp_layernorm.weight": (16,),
        layer + "pre_mlp_layernorm.bias": (16,),
        layer + "mlp.linear_fc1.weight": (24, 16),
        layer + "mlp.linear_fc1.bias": (24,),
        layer + "mlp.linear_fc2.weight": (16, 24),
        layer + "mlp.linear_fc2.bias": (16,),
        "decoder.final_layernorm.weight": (16,),
        "decoder.final_layernorm.bias": (16,),
    }


def test_llama_shape_has_megatrons_names_and_layouts():
    layer = "decoder.layers.0."
    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
    }
    assert shapes(**llama, add_qkv_bias=True, qk_layernorm=True, untie_embeddings_and_output_weights=True) == {
        "embedding.word_embeddings.weight": (24, 16),
        layer + "input_layernorm.weight": (16,),
        layer + "self_attention.linear_qkv.weight": (48, 16),
        layer + "self_attention.linear_qkv.bias": (48,),
        layer + "self_attention.q_layernorm.weight": (6,),
        layer + "self_attention.k_layernorm.weight": (6,),
        layer + "self_attention.linear_proj.weight": (16, 24),
        layer + "pre_mlp_layernorm.weight": (16,),
        layer + "mlp.linear_fc1.weight": (48, 16),
        layer + "mlp.linear_fc2.weight": (16, 24),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (24, 16),
    }


def test_layers_have_the_norms_and_parts_of_their_own_settings():
    layers = (
        {"norm_position": "after", "has_attention": False, "ffn_hidden_size": 10},
        {"norm_position": "around", "has_mlp": False, "num_query_groups": 1},
    )
    found = build(layers=layers, add_bias_linear=False, qk_layernorm=True, qk_layernorm_scope="projection")
    assert [
        (name, tuple(p.shape)) for name, p in found.named_parameters() if "layers" in name and "bias" not in name
    ] == [
        ("decoder.layers.0.mlp.linear_fc1.weight", (10, 16)),
        ("decoder.layers.0.mlp.linear_fc2.weight", (16, 10)),
        ("decoder.layers.0.post_mlp_layernorm.weight", (16,)),
        ("decoder.layers.1.input_layernorm.weight", (16,)),
        ("decoder.layers.1.self_attention.linear_qkv.weight", ((4 + 2) * 6, 16)),
        ("decoder.layers.1.self_attention.linear_proj.weight", (16, 24)),
        ("decoder.layers.1.self_attention.q_layernorm.weight", (24,)),
        ("decoder.layers.1.self_attention.k_layernorm.weight", (6,)),
        ("decoder.layers.1.post_self_attn_layernorm.weight", (16,)),
    ]


def test_an_embedding_scale_scales_word_embeddings_but_not_positions():
    model, scaled = build(), build(embedding_scale=3.0, untie_embeddings_and_output_weights=False)
    ids = batch()["tokens"]
    positions = torch.arange(8).expand_as(ids)
    embedded, found = (m.embedding(ids, positions, None) for m in (model, scaled))
    torch.testing.assert_close(found - embedded, 2.0 * model.embedding.word_embeddings(ids), **EXACT)
    half = scaled.bfloat16()
    half.config = half.embedding.config = ReferenceConfig(**SIZES, embedding_scale=5.65)
    words = half.embedding.word_embeddings(ids)
    expected = words * torch.tensor(5.65, dtype=torch.bfloat16) + half.embedding.position_embeddings(positions)
    assert torch.equal(half.embedding(ids, positions, None), expected)


def test_a_norm_after_a_branch_of_zeros_adds_its_bias_alone():
    model = build(norm_position="after", num_layers=1)
    layer = model.decoder.layers[0]
    with torch.no_grad():
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            linear.weight.zero_()
            linear.bias.fill_(7.0)  # a LayerNorm subtracts it
    hidden = torch.randn(2, 8, 16, dtype=torch.float64)
    added = layer(hidden, torch.arange(8).expand(2, 8)) - hidden
    expected = layer.post_self_attn_layernorm.bias + layer.post_mlp_layernorm.bias
    torch.testing.assert_close(added, expected.expand_as(added), **EXACT)


def test_weights_are_nan_until_given_and_drawn_by_seed_alone():
    model = ReferenceGPT(ReferenceConfig(**SIZES))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    draw_weights(model, seed=5)
    first = {name: parameter.clone() for name, parameter in model.named_parameters()}
    torch.randn(3)
    draw_weights(model, seed=5)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all()
        assert parameter.std() > 0.05, f"{name} is constant"
        assert torch.equal(parameter, first[name])


def test_a_sequence_longer_than_seq_length_is_refused():
    with pytest.raises(ValueError, match="9 tokens is longer than seq_length 8"):
        build().logits(torch.zeros(1, 9, dtype=torch.long))


# ------------------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("window", [None, 3], ids=["full", "window 3"])
def test_a_token_changes_only_what_may_see_it(window):
    model = build(num_layers=1, window_size=window)
    tokens = batch()["tokens"][:1]
    other = tokens.clone()
    other[0, 2] = (other[0, 2] + 1) % SIZES["vocab_size"]
    change = (model.logits(tokens) - model.logits(other)).abs().amax(dim=(0, 2))
    seen_by = range(2, 8 if window is None else 5)
    assert [i for i in range(8) if change[i] > 1e-6] == list(seen_by)
    assert all(change[i] < 1e-13 for i in range(8) if i not in seen_by)


def test_documents_do_not_see_each_other():
    model = build()
    tokens = batch()["tokens"][:1]
    documents = torch.tensor([[7, 7, 7, 4, 4, 4, 4, 4]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    packed = model.logits(tokens, position_ids=positions, document_ids=documents)
    alone = torch.cat([model.logits(tokens[:, :3]), model.logits(tokens[:, 3:])], dim=1)
    torch.testing.assert_close(packed, alone, **EXACT)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn"], ids=str)
def test_rotary_positions_are_relative(scaling):
    model = build(position_embedding_type="rope", rope_scaling_type=scaling, rope_original_max_position_embeddings=4)
    tokens = batch()["tokens"]
    positions = torch.arange(8).expand_as(tokens)
    torch.testing.assert_close(
        model.logits(tokens, positions + 100), model.logits(tokens, positions), rtol=1e-10, atol=1e-10
    )
    stretched = model.logits(tokens, positions * 2)
    assert (stretched - model.logits(tokens, positions)).abs().max() > 1e-3


# -------------------------------------------------------------------------------------------------------------- dropout


def test_dropout_masks_are_asked_for_every_place_once_with_its_shape():
    asked = []

    def record(layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
        asked.append((layer, site, shape))
        return torch.ones(shape)

    build(hidden_dropout=0.1, attention_dropout=0.2)(**batch(), dropout_masks=record)
    hidden, probs = (2, 8, 16), (2, 4, 8, 8)
    expected: list[Any] = [(-1, "embedding", hidden)]
    for layer in range(2):
        expected += [
            (layer, "attention_probs", probs),
            (layer, "attention_output", hidden),
            (layer, "mlp_output", hidden),
        ]
    assert asked == expected


def test_at_rate_zero_no_mask_is_asked_for():
    def refuse(layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
        raise AssertionError(f"asked for {site} of layer {layer}")

    build()(**batch(), dropout_masks=refuse)


def scale_weights(model: ReferenceGPT, site: str, factors: Tensor) -> None:
    """Scale the weights behind a dropout site by factors that are constant over batch and sequence."""
    layer = "decoder.layers.1."
    name = {
        "embedding": "embedding.word_embeddings",
        "attention_probs": layer + "self_attention.linear_proj",
        "attention_output": layer + "self_attention.linear_proj",
        "mlp_output": layer + "mlp.linear_fc2",
    }[site]
    with torch.no_grad():
        if site == "embedding":
            model.get_parameter(name + ".weight").mul_(factors)
            model.get_parameter("embedding.position_embeddings.weight").mul_(factors)
        elif site == "attention_probs":
            model.get_parameter(name + ".weight").mul_(factors.repeat_interleave(SIZES["kv_channels"]))
        else:
            model.get_parameter(name + ".weight").mul_(factors[:, None])
            model.get_parameter(name + ".bias").mul_(factors)


@pytest.mark.parametrize("site", ["embedding", "attention_probs", "attention_output", "mlp_output"], ids=str)
def test_a_mask_acts_at_its_place(site):
    """A mask that depends only on the head or channel equals scaled weights."""
    model = build(hidden_dropout=0.1, attention_dropout=0.1, untie_embeddings_and_output_weights=True)
    size = SIZES["num_attention_heads"] if site == "attention_probs" else SIZES["hidden_size"]
    factors = torch.arange(size, dtype=torch.float64) / 3.0
    where = -1 if site == "embedding" else 1

    def only_here(layer: int, asked: str, shape: tuple[int, ...]) -> Tensor | None:
        if (layer, asked) != (where, site):
            return None
        return (factors[:, None, None] if site == "attention_probs" else factors).expand(shape)

    tokens = batch()["tokens"]
    without, masked = model.logits(tokens), model.logits(tokens, dropout_masks=only_here)
    scale_weights(model, site, factors)
    torch.testing.assert_close(masked, model.logits(tokens), **EXACT)
    assert (masked - without).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------------------------------- loss


def test_the_loss_is_the_masked_sum_of_surprise():
    model, data = build(), batch()
    log_probs = model.logits(data["tokens"]).log_softmax(dim=-1)
    expected = -sum(
        log_probs[row, i, data["labels"][row, i]] for row in range(2) for i in range(8) if data["loss_mask"][row, i]
    )
    loss_sum, num_tokens = model(**data)
    torch.testing.assert_close(loss_sum, expected, **EXACT)
    assert num_tokens == data["loss_mask"].sum() < 16


def test_label_smoothing_spreads_its_share_over_the_other_ids_as_megatron_does():
    model, data = build(label_smoothing=0.3), batch()
    log_probs = model.logits(data["tokens"]).log_softmax(dim=-1)
    target = torch.full_like(log_probs, 0.3 / (21 - 1)).scatter(-1, data["labels"][..., None], 1 - 0.3)
    expected = -(target * log_probs * data["loss_mask"][..., None]).sum()
    torch.testing.assert_close(model(**data)[0], expected, **EXACT)
    # Megatron's formula over a whole vocabulary of K ids
    smoothing = 0.3 * 21 / 20
    losses = -log_probs.gather(-1, data["labels"][..., None])[..., 0]
    megatron = (1 - smoothing) * losses - smoothing * log_probs.mean(dim=-1)
    torch.testing.assert_close(expected, (megatron * data["loss_mask"]).sum(), **EXACT)


def test_z_loss_adds_the_squared_logsumexp_of_each_counted_token():
    data = batch()
    plain, with_z = build(), build(z_loss=0.25)
    squares = plain.logits(data["tokens"]).exp().sum(dim=-1).log().square()
    expected = plain(**data)[0] + 0.25 * (squares * data["loss_mask"]).sum()
    torch.testing.assert_close(with_z(**data)[0], expected, **EXACT)


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_padded_rows_get_no_gradient(untied):
    model = build(untie_embeddings_and_output_weights=untied, label_smoothing=0.1, z_loss=0.1)
    model(**batch())[0].backward()
    head = model.output_layer.weight if untied else model.embedding.word_embeddings.weight
    assert head.grad is not None
    assert torch.count_nonzero(head.grad[21:]) == 0
    assert (head.grad[:21].abs().sum(dim=1) > 0).all()


# ------------------------------------------------------------------------------------------------------------ precision


def test_bf16_parameters_keep_norms_softmax_and_loss_in_fp32():
    exact, rounded = build(torch.float32, **EVERYTHING), build(torch.bfloat16, **EVERYTHING)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():  # the same weights, so that only the arithmetic differs
            parameter.copy_(rounded.get_parameter(name).float())
    data = batch()
    logits = rounded.logits(data["tokens"])
    assert logits.dtype == torch.float32
    assert rounded(**data)[0].dtype == torch.float32
    assert (logits - exact.logits(data["tokens"])).abs().max() < 0.15
    assert torch.equal(
        rounded.bfloat16().logits(data["tokens"], dropout_masks=dropout_masks).isfinite(),
        torch.ones(2, 8, 21, dtype=torch.bool),
    )

"""FLOPs against the published closed form."""

from __future__ import annotations

import pytest

from megapipe.config.config import resolve_model
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import ModelSpec, model_spec
from megapipe.plan.layer_costs import flop_costs, head_flops, layer_flops, recomputed_flops, step_flops
from megapipe.sharding.sequence import SequenceSlice, Visibility


def gpt(**changes: object) -> ModelConfig:
    return resolve_model(ModelConfig(**changes), tp=1)  # type: ignore[arg-type]


def spec_of(model: ModelConfig) -> ModelSpec:
    return model_spec(model, PrecisionConfig())


def test_a_gpt2_shaped_step_is_the_formula_of_narayanan_2021() -> None:
    model = gpt(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=51200)
    b, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    published = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(model, b, causal=False) == pytest.approx(published, rel=1e-12)


def test_a_layer_with_latent_attention_has_the_flops_of_its_products() -> None:
    h, n, s, q, kv, plain, rotated, value, ffn = 512, 8, 256, 192, 128, 64, 32, 48, 1000
    sizes = {"qk_head_dim": plain, "qk_pos_emb_head_dim": rotated, "v_head_dim": value, "q_lora_rank": q}
    sizes |= {"hidden_size": h, "num_attention_heads": n, "ffn_hidden_size": ffn, "kv_lora_rank": kv}
    model = gpt(**sizes, seq_length=s, vocab_size=100, multi_latent_attention=True, position_embedding_type="rope")
    up = q * n * (plain + rotated) + kv * n * (plain + value)
    weights = h * q + h * (kv + rotated) + up + n * value * h + 2 * h * ffn
    core = 2 * s * n * (plain + rotated) + 2 * s * n * value
    (layer,) = spec_of(model).kinds
    assert layer_flops(layer, s, causal=False) == pytest.approx(2 * weights + core)
    assert layer_flops(layer, s, causal=True) == pytest.approx(2 * weights + core / 2)


def test_the_head_of_the_small_benchmark_model_weighs_2_3_layers() -> None:
    model = gpt(num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256, vocab_size=8192)
    spec = spec_of(model)
    assert head_flops(spec) / layer_flops(spec.layers[0], 256, causal=False) == pytest.approx(2.29, abs=0.01)


def test_full_recompute_that_keeps_attention_computes_all_but_its_products_again() -> None:
    model = gpt(num_layers=2, hidden_size=256, num_attention_heads=4, seq_length=512, vocab_size=1000)
    full, kept = (RecomputeConfig("full", "uniform", 1, recompute_keep_attention=keeps) for keeps in (False, True))
    attention = 4.0 * 512 * 256  # q k^T and the product with v, per token
    of_full, of_kept = (recomputed_flops(model, [each] * 2, 3, causal=False) for each in (full, kept))
    spared = of_full - of_kept
    assert spared == pytest.approx(3 * 512 * 2 * attention)
    replays = [flop_costs(spec_of(model), 512, each).layers[0].replay for each in (full, kept)]
    assert replays[0] - replays[1] == pytest.approx(attention)


KINDS = ("window_size=64", "ffn_hidden_size=304", "attention=none", "mlp=none norm_position=after")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "recompute",
    [RecomputeConfig("full", "uniform", 1), RecomputeConfig("selective", recompute_modules=("mlp", "core_attn"))],
    ids=["full", "selective"],
)
def test_flops_of_unlike_layers_are_those_of_models_of_each_kind(recompute: RecomputeConfig, causal: bool) -> None:
    sizes = {"num_layers": 8, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 192, "vocab_size": 1000}
    mixed = gpt(**sizes, layer_pattern=tuple(f"2 {kind}" for kind in KINDS))
    each = [gpt(**sizes, layer_pattern=(f"8 {kind}",)) for kind in KINDS]
    for flops in (
        lambda model: step_flops(model, 3, causal),
        lambda model: recomputed_flops(model, [recompute] * 8, 3, causal),
        lambda model: sum(layer.forward + layer.replay for layer in flop_costs(spec_of(model), 192, recompute).layers),
    ):
        assert flops(mixed) == pytest.approx(sum(map(flops, each)) / len(each), rel=1e-12)
        assert len({round(flops(model)) for model in each}) == len(KINDS)


def test_causal_attention_counts_half_and_a_window_less() -> None:
    def mean_keys(window: int | None) -> float:
        return Visibility.of(SequenceSlice((1024,)), window=window).mean_keys

    assert mean_keys(None) == mean_keys(1024) == 512
    assert mean_keys(256) == pytest.approx((256 * 128 + 768 * 256) / 1024)

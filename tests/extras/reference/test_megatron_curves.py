"""The reference trains like Megatron-Core: same weights, same tokens, same curve."""

import pytest
import torch

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import build_optimizer, reference_step
from tests.extras.reference.megatron_curves import NAMES, Curve, load_curve


def train(curve: Curve, dtype: torch.dtype, **changed) -> list[tuple[float, float]]:
    model = ReferenceGPT(ReferenceConfig(**curve.config | changed)).to(dtype)
    extra_rows = model.config.padded_vocab_size - model.config.vocab_size
    weights = dict(curve.weights)
    for name in weights.keys() & {"embedding.word_embeddings.weight", "output_layer.weight"}:
        weights[name] = torch.cat((weights[name], torch.ones(extra_rows, model.config.hidden_size)))
    model.load_state_dict(weights)
    optimizer = build_optimizer(model, "adamw", weight_decay=0.1)
    results = [
        reference_step(model, optimizer, curve.microbatches(step), per_token_loss=False, clip_grad=1.0, lr=lr)
        for step, lr in enumerate(curve.lrs)
    ]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize("name", NAMES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_loss_and_gradient_norm_follow_megatron(name, dtype):
    curve = load_curve(name)
    results = train(curve, dtype)
    assert len(results) == len(curve.losses) == len(curve.grad_norms) == len(curve.tolerances)
    for step, (loss, norm) in enumerate(results):
        loss_abs, norm_rel = curve.tolerances[step]
        assert abs(loss - curve.losses[step]) <= loss_abs, f"step {step}: loss {loss} against {curve.losses[step]}"
        assert abs(norm / curve.grad_norms[step] - 1.0) <= norm_rel, (
            f"step {step}: gradient norm {norm} against {curve.grad_norms[step]}"
        )


@pytest.mark.parametrize("name", NAMES, ids=NAMES)
def test_padded_vocabulary_rows_change_nothing(name):
    curve = load_curve(name)
    plain = train(curve, torch.float64)
    padded = train(curve, torch.float64, padded_vocab_size=curve.config["vocab_size"] + 64)
    torch.testing.assert_close(torch.tensor(padded), torch.tensor(plain), rtol=1e-13, atol=0.0)

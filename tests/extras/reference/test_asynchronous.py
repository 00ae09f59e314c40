"""The emulation of PipeDream and PipeDream-2BW against the papers' update rules written in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.extras.reference.train import Delays, asynchronous_step, build_optimizer, reference_step
from tests.extras.reference.tiny import batch, build

LR = 0.3
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


def stages_of(model: nn.Module, num_stages: int) -> dict[str, int]:
    """Assign the two layers to the first and the last stage; stages between are empty or hold the final norm."""
    last = num_stages - 1
    ends = {
        "embedding": 0,
        "decoder.layers.0": 0,
        "decoder.layers.1": last,
        "decoder.final": last // 2,
        "output_layer": last,
    }
    return {
        name: next(s for prefix, s in ends.items() if name.startswith(prefix)) for name, _ in model.named_parameters()
    }


def gradient_at(model: nn.Module, weights: dict[str, Tensor], microbatches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the gradients of the microbatches' mean loss at the given weights."""
    model.load_state_dict(weights)
    model.zero_grad()
    for microbatch in microbatches:
        loss_sum, num_tokens = model(**microbatch)
        (loss_sum / num_tokens / len(microbatches)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("group", [1, 2, 3])
def test_2bw_is_gradient_descent_with_the_gradient_one_group_late(group: int) -> None:
    model, plain = (build(untie_embeddings_and_output_weights=True) for _ in range(2))
    microbatches = [batch(seed) for seed in range(4 * group)]
    optimizer = build_optimizer(model, "sgd", momentum=0.0)
    delays = Delays.pipedream_2bw(group)
    asynchronous_step(model, optimizer, [[each] for each in microbatches], stages_of(model, 3), delays, LR)

    weights = [{name: tensor.clone() for name, tensor in plain.state_dict().items()}]
    for t in range(4):  # W(t + 1) = W(t) - lr g_t(W(t - 1)), W(-1) = W(0)
        gradients = gradient_at(plain, weights[max(0, t - 1)], microbatches[t * group : (t + 1) * group])
        weights.append({name: tensor - LR * gradients[name] for name, tensor in weights[t].items()})
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, weights[-1][name], **EXACT)


@pytest.mark.parametrize("delays", [Delays.pipedream(1), Delays.pipedream_2bw(1)], ids=["no delay", "one update late"])
def test_without_delay_every_microbatch_is_a_step_of_its_own(delays: Delays) -> None:
    model, plain = (build(untie_embeddings_and_output_weights=True) for _ in range(2))
    microbatches = [batch(seed) for seed in range(3)]
    asynchronous_step(
        model, build_optimizer(model, "adamw"), [[each] for each in microbatches], stages_of(model, 1), delays, 0.01
    )
    optimizer = build_optimizer(plain, "adamw")
    for each in microbatches:
        reference_step(plain, optimizer, [each], per_token_loss=False, clip_grad=0.0, lr=0.01)
    same = all(torch.allclose(tensor, plain.state_dict()[name], **EXACT) for name, tensor in model.state_dict().items())
    assert same == (delays.versions(0, 2) == 2)


def test_pipedream_takes_each_stage_as_late_as_it_lies_before_the_end() -> None:
    """w(t + 1) = w(t) - lr grad f(w_1(t - n + 1), w_2(t - n + 2), ..., w_n(t)), written out for two stages."""
    model, plain = (build(untie_embeddings_and_output_weights=True) for _ in range(2))
    microbatches, stage_of = [batch(seed) for seed in range(4)], stages_of(model, 2)
    asynchronous_step(
        model,
        build_optimizer(model, "sgd", momentum=0.0),
        [[each] for each in microbatches],
        stage_of,
        Delays.pipedream(2),
        LR,
    )
    weights = [{name: tensor.clone() for name, tensor in plain.state_dict().items()}]
    for t, microbatch in enumerate(microbatches):
        seen = {name: weights[max(0, t - 1) if stage_of[name] == 0 else t][name] for name in weights[0]}
        gradients = gradient_at(plain, seen, [microbatch])
        weights.append({name: tensor - LR * gradients[name] for name, tensor in weights[t].items()})
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, weights[-1][name], **EXACT)

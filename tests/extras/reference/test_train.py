"""The reference step: averaging, clipping, parameter groups, learning rates."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import StepResult, build_optimizer, reference_step
from tests.extras.reference.tiny import batch, build

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


def weights_of(model: ReferenceGPT) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sgd_step(
    model: ReferenceGPT, microbatches: list, clip_grad: float = 0.0, per_token_loss: bool = False, **options: Any
) -> StepResult:
    optimizer = build_optimizer(model, "sgd", momentum=0.0)
    return reference_step(model, optimizer, microbatches, per_token_loss, clip_grad, **{"lr": 0.5} | options)


@pytest.mark.parametrize("per_token_loss", [False, True], ids=["mean of microbatch means", "mean of all tokens"])
def test_loss_and_gradients_are_those_of_the_stated_mean(per_token_loss):
    model, microbatches = build(), [batch(seed) for seed in (2, 3, 4)]
    counts = [microbatch["loss_mask"].sum() for microbatch in microbatches]
    assert len({count.item() for count in counts}) > 1, "with equal counts both means are one"
    sums = [model(**microbatch)[0] for microbatch in microbatches]
    if per_token_loss:
        expected = sum(sums) / sum(counts)
    else:
        expected = sum(loss_sum / count for loss_sum, count in zip(sums, counts, strict=True)) / 3
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))

    before = weights_of(model)
    result = sgd_step(model, microbatches, per_token_loss=per_token_loss)
    assert result.loss == pytest.approx((sum(sums) / sum(counts)).item(), rel=1e-13), "reported over tokens in any case"
    assert result.grads.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(result.grads[name], gradient, **EXACT)
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.5 * gradient, **EXACT)
    squares = sum(gradient.square().sum() for gradient in gradients.values())
    assert result.grad_norm == pytest.approx(squares.sqrt().item(), rel=1e-13)


def test_one_batch_cut_into_equal_microbatches_is_the_same_step():
    whole = batch(rows=4)
    whole["loss_mask"] = torch.ones_like(whole["loss_mask"])
    halves = [{name: tensor[rows] for name, tensor in whole.items()} for rows in (slice(0, 2), slice(2, 4))]
    one, two = sgd_step(build(), [whole]), sgd_step(build(), halves)
    assert one.loss == pytest.approx(two.loss, rel=1e-13)
    for name in one.grads:
        torch.testing.assert_close(one.grads[name], two.grads[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("per_token_loss", [False, True], ids=["microbatch means", "all tokens"])
def test_a_microbatch_without_counted_tokens_gives_nothing(per_token_loss):
    empty = batch(3) | {"loss_mask": torch.zeros(2, 8)}
    with_empty = sgd_step(build(), [batch(2), empty], per_token_loss=per_token_loss)
    without = sgd_step(build(), [batch(2)], per_token_loss=per_token_loss)
    share = 1.0 if per_token_loss else 0.5
    assert with_empty.loss == pytest.approx(without.loss, rel=1e-13)
    assert with_empty.grad_norm == pytest.approx(share * without.grad_norm, rel=1e-13)
    assert sgd_step(build(), [empty], per_token_loss=per_token_loss).grad_norm == 0.0


@pytest.mark.parametrize("share", [0.25, 4.0], ids=["norm above", "norm below"])
def test_gradients_are_clipped_only_above_the_norm(share):
    norm = sgd_step(build(), [batch()]).grad_norm
    model = build()
    before = weights_of(model)
    clip = share * norm
    result = sgd_step(model, [batch()], clip_grad=clip)
    assert result.grad_norm == norm
    coefficient = min(clip / (norm + 1e-6), 1.0)
    for name, gradient in result.grads.items():
        torch.testing.assert_close(
            model.get_parameter(name).detach(), before[name] - 0.5 * coefficient * gradient, **EXACT
        )


def test_weight_decay_spares_norms_and_biases():
    model = build(qk_layernorm=True, untie_embeddings_and_output_weights=True)
    groups = {
        group["name"]: group["weight_decay"] for group in build_optimizer(model, "adamw", weight_decay=0.3).param_groups
    }
    decayed = {name for name, decay in groups.items() if decay == 0.3}
    layer_matrices = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    expected = {f"decoder.layers.{i}.{name}.weight" for i in range(2) for name in layer_matrices}
    expected |= {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"}
    assert decayed == expected
    assert {decay for name, decay in groups.items() if name not in decayed} == {0.0}


def test_adamw_decays_apart_from_the_gradient():
    """The first step of Adam moves by lr * sign(gradient), apart from eps.

    Decoupled weight decay additionally subtracts lr * decay * weight.
    """
    model = build()
    before = weights_of(model)
    optimizer = build_optimizer(model, "adamw", weight_decay=0.3, eps=1e-30)
    result = reference_step(model, optimizer, [batch()], per_token_loss=False, clip_grad=0.0, lr=0.01)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    expected = before[name] * (1 - 0.01 * 0.3) - 0.01 * result.grads[name].sign()
    torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-10, atol=1e-12)


def test_decoupled_lr_moves_word_embedding_and_head_alone():
    model = build(untie_embeddings_and_output_weights=True)
    before = weights_of(model)
    result = sgd_step(model, [batch()], lr=0.5, decoupled_lr=0.125)
    for name, gradient in result.grads.items():
        rate = 0.125 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 0.5
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - rate * gradient, **EXACT)


def test_an_lr_is_valid_for_its_step_only():
    model = build()
    optimizer = build_optimizer(model, "sgd", momentum=0.0)
    reference_step(model, optimizer, [batch()], per_token_loss=False, clip_grad=0.0, lr=0.5, decoupled_lr=0.25)
    before = weights_of(model)
    reference_step(model, optimizer, [batch()], per_token_loss=False, clip_grad=0.0, lr=0.0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="lion"):
        build_optimizer(build(), "lion")

"""Keyed dropout: a mask is a function of its key; never of the order of calls, of torch's state or of recompute."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megapipe.errors import ConfigError
from megapipe.tensor_parallel.random import SITES, DropoutKey, keyed_dropout, keyed_mask

KEY = DropoutKey(seed=1234, step=5, microbatch=3)
PLACES = list(itertools.product((-1, 0, 7), SITES, (None, 0, 1)))
SHAPE = (16, 2, 8)


def test_masks_do_not_depend_on_the_order_of_calls_or_on_global_state() -> None:
    forward = {place: keyed_mask(SHAPE, 0.3, KEY, *place) for place in PLACES}
    torch.manual_seed(99)
    state = torch.get_rng_state()
    backward = {place: keyed_mask(SHAPE, 0.3, KEY, *place) for place in reversed(PLACES)}
    assert torch.equal(torch.get_rng_state(), state), "keyed dropout advanced the global generator"
    assert all(torch.equal(forward[place], backward[place]) for place in PLACES)


def test_every_part_of_the_key_gives_another_mask() -> None:
    keys = [KEY, replace(KEY, seed=1235), replace(KEY, step=6), replace(KEY, microbatch=4)]
    masks = [keyed_mask(SHAPE, 0.5, key, *place) for key in keys for place in PLACES]
    for a, b in itertools.combinations(masks, 2):
        assert not torch.equal(a, b)


def test_a_mask_is_the_same_on_every_machine() -> None:
    bits = keyed_mask((24,), 0.5, KEY, 2, "mlp_output").int().tolist()
    assert bits == [0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0]
    assert KEY.stream(2, "mlp_output", None) == 0x8A9E4D6013F851C012D87B11A16C00B2


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_one_minus_p(p: float) -> None:
    num = 200_000
    kept = int(keyed_mask((num,), p, KEY, 0, "embedding").sum())
    assert abs(kept - (1 - p) * num) <= 5 * (num * p * (1 - p)) ** 0.5  # five standard deviations


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    p=st.floats(0, 0.99),
    layer=st.integers(-1, 200),
    site=st.sampled_from(SITES),
)
def test_dropout_is_mask_over_keep_probability_and_so_is_its_gradient(
    shape: list[int], p: float, layer: int, site: str
) -> None:
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    y = keyed_dropout(x, p, KEY, layer, site)
    expected = keyed_mask(tuple(shape), p, KEY, layer, site).double() / (1 - p)
    torch.testing.assert_close(y.detach(), expected, rtol=1e-15, atol=0)
    y.backward(torch.full_like(y, 2.0))
    torch.testing.assert_close(x.grad, 2 * expected, rtol=1e-15, atol=0)


def test_recompute_replays_the_mask() -> None:
    x = torch.randn(*SHAPE, dtype=torch.float64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return keyed_dropout(torch.sin(x), 0.4, KEY, 3, "attention_output").square()

    (kept,) = torch.autograd.grad(block(x).sum(), x)
    loss = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum()
    torch.rand(17)
    (replayed,) = torch.autograd.grad(loss, x)
    assert torch.equal(kept, replayed)


def test_dropout_saves_one_byte_per_element() -> None:
    saved: list[int] = []
    x = torch.randn(*SHAPE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.nbytes), t)[1], lambda t: t):
        keyed_dropout(x, 0.1, KEY, 0, "mlp_output")
    assert saved == [x.numel()]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=["bf16", "fp16", "fp32", "fp64"]
)
def test_dropout_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(4, 4, dtype=dtype, requires_grad=True)
    y = keyed_dropout(x, 0.5, KEY, 0, "mlp_output")
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_impossible_probabilities_are_refused(p: float) -> None:
    with pytest.raises(ConfigError, match="outside"):
        keyed_dropout(torch.ones(2), p, KEY, 0, "mlp_output")


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(ValueError, match="no dropout site 'attention'"):
        keyed_dropout(torch.ones(2), 0.1, KEY, 0, "attention")

"""The comparison of tensors: which differences count, and how their place is described."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapipe.extras.verify.compare import Difference, HeldPiece, compare, part_of, uncovered
from megapipe.sharding.boxes import Box, pieces
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups

QKV = ParamSpec("qkv", (24, 5), owner=0, slicing=QueryGroups(heads=4, groups=2, head_dim=3))
NORM = ParamSpec("norm", (6,), owner=0)
EXPECTED = {
    "qkv": torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "norm": torch.full((6,), 1e-3).double(),
}


def held(spec: ParamSpec, whole: Tensor, tp_rank: int, tp: int) -> list[HeldPiece]:
    return [HeldPiece(3, piece, whole[piece.box.slices].reshape(-1).clone()) for piece in pieces(spec, tp_rank, tp)]


def both(qkv: Tensor, norm: Tensor, tolerance: float = 1e-10, least_share: float = 0.0) -> list[Difference]:
    return compare([*held(NORM, norm, 1, 2), *held(QKV, qkv, 1, 2)], EXPECTED, tolerance, least_share)


def test_equal_tensors_pass_in_model_order() -> None:
    found = both(EXPECTED["qkv"], EXPECTED["norm"])
    assert [d.name for d in found] == ["qkv", "norm"] and all(
        d.passes and d.difference == 0.0 and d.rows is None for d in found
    )


def test_one_wrong_element_is_named() -> None:
    wrong = EXPECTED["qkv"].clone()
    wrong[20, 2] += 0.5
    qkv, norm = both(wrong, EXPECTED["norm"])
    assert norm.passes and not qkv.passes
    assert (qkv.stage, qkv.index, qkv.part, qkv.rows, qkv.num_wrong, qkv.num_held) == (
        3,
        (20, 2),
        "key head 1",
        (20, 20),
        1,
        60,
    )
    assert qkv.grid == wrong[20, 2].item() and qkv.plain == EXPECTED["qkv"][20, 2].item()
    assert qkv.box.offset == (12, 0) and qkv.box.shape == (12, 5)
    assert qkv.factor is None


def test_a_wrong_row_of_another_rank_is_not_seen_here() -> None:
    wrong = EXPECTED["qkv"].clone()
    wrong[0] += 1.0
    assert all(d.passes for d in both(wrong, EXPECTED["norm"]))


def test_a_constant_factor_is_recognised() -> None:
    assert both(2.0 * EXPECTED["qkv"], EXPECTED["norm"])[0].factor == pytest.approx(2.0)


def test_a_coarse_tolerance_invents_no_factor() -> None:
    other = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert both(other, EXPECTED["norm"], tolerance=0.1)[0].factor is None
    assert both(2.0 * EXPECTED["qkv"] + 0.02 * other, EXPECTED["norm"], tolerance=0.1)[0].factor is not None


def test_nan_is_different() -> None:
    (_, norm) = both(EXPECTED["qkv"], torch.full((6,), torch.nan).double())
    assert not norm.passes and norm.difference == float("inf")


def test_the_bound_is_relative_to_the_whole_tensor() -> None:
    off = EXPECTED["norm"] + 1e-6
    assert not both(EXPECTED["qkv"], off, tolerance=0.9e-3)[1].passes
    assert both(EXPECTED["qkv"], off, tolerance=1.1e-3)[1].passes


def test_a_small_tensor_counts_as_the_least_share() -> None:
    assert both(EXPECTED["qkv"], EXPECTED["norm"] + 1e-6, tolerance=1e-5, least_share=0.1)[1].passes


def test_mathematically_zero_tensors_are_held_to_the_largest() -> None:
    expected = EXPECTED | {"norm": torch.full((6,), 1e-17).double()}
    for size, passes in ((1e-15, True), (1e-9, False)):
        (norm,) = compare(held(NORM, torch.full((6,), size).double(), 0, 2), expected, 1e-10)
        assert norm.passes == passes


def test_rows_of_fused_tensors_have_names() -> None:
    assert [part_of(QKV, (row, 0)) for row in (0, 5, 8, 11, 12, 23)] == [
        *("query head 0", "query head 1", "key head 0", "value head 0", "query head 2", "value head 1")
    ]
    gates = ParamSpec("qkv", (36, 5), owner=0, slicing=QueryGroups(4, 2, 3, is_gated=True))
    assert [part_of(gates, (row, 0)) for row in (5, 8, 14, 17, 25, 35)] == [
        *("query head 1", "gate head 0", "key head 0", "value head 0", "gate head 2", "value head 1")
    ]
    gated = ParamSpec("fc1", (8, 4), owner=0, slicing=Fused(0, 2))
    assert [part_of(gated, (row, 0)) for row in (3, 4)] == ["gate", "up"]
    assert part_of(NORM, (2,)) == ""


def test_a_tensor_with_an_uncompared_element_is_named() -> None:
    whole, half, none = (ParamSpec(name, (4, 2), "head") for name in ("whole", "half", "none"))
    upper, lower = Box((0, 0), (2, 2)), Box((2, 0), (2, 2))
    covered = [("whole", upper), ("whole", lower)]
    assert uncovered([whole], covered) == []
    assert uncovered([whole, half, none], [*covered, ("half", upper), ("half", upper)]) == ["half", "none"]

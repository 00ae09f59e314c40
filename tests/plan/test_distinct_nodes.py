"""Numbers of pairs (token, node), counted over all choices of experts."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.layers.distinct_nodes import expected_nodes, forced_pairs


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Draw experts, topk, nodes, groups and groups taken."""
    experts = draw(st.integers(2, 12))
    divisors = [n for n in range(1, experts + 1) if experts % n == 0]
    nodes, groups = draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))
    taken = draw(st.integers(1, groups))
    return experts, draw(st.integers(1, min(4, taken * experts // groups))), nodes, groups, taken


@given(choices())
@settings(max_examples=80)
def test_expected_nodes_are_the_mean_over_all_choices(drawn: tuple[int, int, int, int, int]) -> None:
    experts, topk, nodes, groups, taken = drawn
    size = experts // groups
    found = [
        len({expert * nodes // experts for expert in chosen})
        for of_token in combinations(range(groups), taken)
        for chosen in combinations([e for e in range(experts) if e // size in of_token], topk)
    ]
    assert expected_nodes(experts, topk, nodes, groups, taken) == pytest.approx(sum(found) / len(found), rel=1e-12)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 40))
def test_forced_pairs_are_those_of_consecutive_experts(held: int, nodes: int, tokens: int) -> None:
    experts = held * nodes
    for topk in range(1, min(experts, 8) + 1):
        nodes_of = [{(topk * x + j) % experts // held for j in range(topk)} for x in range(tokens)]
        assert forced_pairs(experts, topk, tokens, nodes) == sum(map(len, nodes_of))


def test_deepseek_v3_sends_to_at_most_the_nodes_of_its_groups() -> None:
    """256 experts in 8 groups, one a node; 8 experts of 4 groups: almost always all four."""
    assert 3.6 < expected_nodes(256, 8, 8, 8, 4) < 4
    assert 5.2 < expected_nodes(256, 8, 8) < 5.3

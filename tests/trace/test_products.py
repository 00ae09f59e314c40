"""The products of a trace are those of a layer's weights: each in F, I and W, and again where a backward repeats it.

The messages are compared with a real step's in tests/assembly/test_planned_traffic.py, by way of a plan.
"""

from __future__ import annotations

import pytest

from megapipe.errors import ConfigError
from megapipe.plan.layer_costs import linear_weights, replayed_flops
from megapipe.plan.traces import layer_trace
from megapipe.schedule.action import Op
from megapipe.trace.traced import Product
from tests.trace.units import CASES, layers_of, planned


@pytest.mark.parametrize("name", CASES)
def test_every_linear_multiplies_in_f_i_and_w(name: str) -> None:
    try:
        plan = planned(CASES[name], "cuda")
    except ConfigError:
        return  # a refused combination
    for layer, shape in layers_of(plan):
        of: dict[tuple[str, Op], Product] = {}
        for each in layer_trace(layer, shape).products:
            if not each.again:
                assert (each.name, each.op) not in of
                # --tp-comm-overlap cuts F, I and W into different numbers of chunks
                of[each.name, each.op] = each._replace(times=1)
        names = [each for each, op in of if op is Op.F]
        weights = linear_weights(layer)
        assert sorted(names) == sorted(each.removesuffix(".weight").replace("mlp.router", "router") for each in weights)
        for linear in names:
            forward = of.pop((linear, Op.F))
            back = forward._replace(op=Op.I, inputs=forward.outputs, outputs=forward.inputs)
            assert of.pop((linear, Op.I)) == back
            if linear.split(".")[-1] not in layer.frozen:
                assert of.pop((linear, Op.W)) == back._replace(op=Op.W)
        assert not of


@pytest.mark.parametrize("name", [name for name, features in CASES.items() if any("recompute" in x for x in features)])
def test_a_backward_repeats_the_products_of_its_recompute(name: str) -> None:
    try:
        plan = planned(CASES[name], "cuda")
    except ConfigError:
        return
    for layer, shape in layers_of(plan):
        if shape.tp > 1 or layer.num_experts:
            continue  # what a rank multiplies is not a share of what a token does
        repeated = sum(each.flops for each in layer_trace(layer, shape).products if each.again)
        of_attention = layer.attention_flops(1, False)
        is_full = shape.recompute.recompute_granularity == "full"
        attends = not shape.recompute.recompute_keep_attention if is_full else shape.recomputes("core_attn")
        said = replayed_flops(layer, shape.recompute, 1, False) - attends * of_attention
        assert repeated == pytest.approx(said * shape.tokens)

"""Plans at an imbalance of experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.layers import expert_layers
from megapipe.plan.expert_load import BALANCED, ExpertLoad, most_imbalance
from megapipe.plan.hardware import HARDWARE
from megapipe.plan.layer_time import expert_links, expert_message_seconds
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.report import plan_text
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step, stage_seconds
from megapipe.plan.traces import layer_trace
from megapipe.plan.traffic import layer_bytes
from megapipe.schedule.action import Op
from tests.plan.test_expert_time import plan_of

H100 = HARDWARE["h100"]
WIDE = {"num_experts": 16, "moe_router_topk": 2, "ep": 4}


def loaded(plan: RunPlan, load: ExpertLoad | float) -> RunPlan:
    return dataclasses.replace(plan, expert_load=load if isinstance(load, ExpertLoad) else ExpertLoad(load))


@given(st.floats(1.0, 4.0))
@settings(max_examples=15, deadline=None)
def test_the_fullest_rank_multiplies_and_exchanges_so_many_times_the_rows(imbalance: float) -> None:
    even = plan_of(4, **WIDE)
    plan, links = loaded(even, imbalance), expert_links(even, H100)
    assert links is not None
    rows = even.shape.own_tokens * 2
    traces = [layer_trace(each.model.layers[0], plan.shape) for each in (plan, even)]
    multiplied = [each.tokens for each in traces[0].products if each.op is Op.F and each.matrices > 1]
    assert multiplied == pytest.approx([imbalance * rows] * len(multiplied), abs=1) and multiplied
    messages = [expert_message_seconds(each.messages, plan.shape, links) for each in traces]
    assert messages[0] >= messages[1]
    for op in (Op.F, Op.B):
        assert stage_seconds(plan, H100)[0].of(op) >= stage_seconds(even, H100)[0].of(op)
    memory = [all_rank_memory(each)[0].items["activations"] for each in (plan, even)]
    assert memory[0] >= memory[1]


def test_balanced_routing_is_an_imbalance_of_one() -> None:
    plan = plan_of(4, **WIDE)
    even = loaded(plan, ExpertLoad(of_layers=tuple((layer, (1.0,) * 16) for layer in expert_layers(plan.config.model))))
    assert all_rank_memory(even) == all_rank_memory(plan) == all_rank_memory(loaded(plan, 1.0))
    assert predict_step(even, H100).parts == predict_step(plan, H100).parts
    assert "copies x pp 1, balanced;" in plan_text(plan)
    assert "the fullest rank with 1.5 times the mean of rows;" in plan_text(loaded(plan, 1.5))


def test_of_bytes_of_the_fullest_rank_those_of_the_fuller_direction_count() -> None:
    plan = plan_of(4, **WIDE)
    even, uneven = (layer_bytes(each, each.model.layers[0])["ep"] for each in (plan, loaded(plan, 1.5)))
    counts = 16 * 8 * 3 / 4  # int64, in a forward
    assert uneven - counts == pytest.approx(1.5 * (even - counts))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_logged_load_gives_the_fullest_rank_of_each_layer(data: st.DataObject) -> None:
    plan = plan_of(4, **WIDE)
    layers = expert_layers(plan.config.model)
    logged = []
    for layer in layers:
        rows = np.array(data.draw(st.lists(st.integers(0, 9), min_size=16, max_size=16))) + 0.5
        logged.append((layer, tuple(rows / rows.mean())))
    load = ExpertLoad(of_layers=tuple(logged))
    assert load.problem(plan.config.model, 4) == ""
    wanted = {layer: max(np.array(of_layer).reshape(4, 4).mean(1)) for layer, of_layer in logged}
    assert dict(load.of(plan.config.model, 4)) == pytest.approx(wanted)
    layers = [layer for layer in loaded(plan, load).model.layers if layer.num_experts]
    assert [layer.imbalance for layer in layers] == pytest.approx(list(wanted.values()))
    assert loaded(plan, load).expert_imbalance == pytest.approx(max(wanted.values()))


def test_loads_that_no_run_has_are_refused_with_a_reason() -> None:
    model, dense = plan_of(4, **WIDE).config.model, plan_of(1, num_experts=None).config.model
    assert most_imbalance(model, 4) == 4.0 and most_imbalance(model, 16) == 8.0 and most_imbalance(model, 1) == 1.0
    capped = plan_of(4, moe_expert_capacity_factor=1.25, **WIDE).config.model
    assert most_imbalance(capped, 4) == 1.25
    for value in (0.5, 4.01, float("nan"), -1.0):
        assert "has 1 to 4 times the mean of rows, with 16 experts" in ExpertLoad(value).problem(model, 4)
    assert ExpertLoad(4.0).problem(model, 4) == BALANCED.problem(model, 1) == ""
    assert "the model has no experts" in ExpertLoad(1.5).problem(dense, 1)
    layers = expert_layers(model)
    few = ExpertLoad(of_layers=tuple((layer, (1.0,) * 8) for layer in layers))
    assert few.problem(model, 4) == "it has 8 experts a layer, --num-experts is 16"
    other = ExpertLoad(of_layers=((0, (1.0,) * 16),))
    assert "it has layers 0, the model has experts in layers 0" in other.problem(model, 4)

"""Slices of every parameter over tp.

Together they are the whole tensor, only declared replicas overlap, and boxes describe the slices correctly.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.layers.model import stage_parameters
from megapipe.sharding.audit import audit_slices, audit_stages
from megapipe.sharding.boxes import Box, pieces
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups
from megapipe.trace.parameters import model_parameters


def resolved_model(**changes: object) -> ModelConfig:
    sizes: dict[str, object] = {
        "num_layers": 3, "hidden_size": 24, "num_attention_heads": 12, "num_query_groups": 12, "kv_channels": 2,
        "ffn_hidden_size": 48, "vocab_size": 100, "padded_vocab_size": 120, "seq_length": 12,
        "max_position_embeddings": 12,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))  # type: ignore[arg-type]


@st.composite
def sliced(draw: st.DrawFn) -> tuple[ParamSpec, int]:
    """Draw a parameter of one or two dimensions with some slicing rule, and a tp size that divides it."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    columns = draw(st.integers(1, 5))
    rule = draw(st.sampled_from(["rows", "columns", "gated", "qkv", "whole"]))
    if rule == "qkv":
        groups = draw(st.sampled_from([g for g in (1, 2, 3, 4, 6, 12) if g % tp == 0 or tp % g == 0]))
        head_dim = draw(st.integers(1, 3))
        shape = ((12 + 2 * groups) * head_dim, columns)
        return ParamSpec("qkv", shape, 0, QueryGroups(12, groups, head_dim)), tp
    if rule == "columns":
        return ParamSpec("row_parallel", (columns, tp * draw(st.integers(1, 4))), 0, Fused(1)), tp
    if rule == "whole":
        return ParamSpec("norm", (columns,), 0), tp
    parts = 2 if rule == "gated" else 1
    rows = parts * tp * draw(st.integers(1, 4))
    shape = (rows,) if draw(st.booleans()) else (rows, columns)
    return ParamSpec(rule, shape, 0, Fused(0, parts)), tp


@given(sliced(), st.data())
def test_pieces_are_the_local_tensor_cut_out_of_the_global_one(
    case: tuple[ParamSpec, int], data: st.DataObject
) -> None:
    spec, tp = case
    whole = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    owned = np.zeros(spec.shape, int)
    for tp_rank in range(tp):
        rows = [np.arange(i.start, i.stop) for i in spec.intervals(tp_rank, tp)]
        local = np.take(whole, np.concatenate(rows), axis=spec.slicing.dim or 0)
        assert local.shape == spec.local_shape(tp_rank, tp)
        start = data.draw(st.integers(0, local.size))
        stop = data.draw(st.integers(start, local.size))
        found = pieces(spec, tp_rank, tp, start, stop)
        assert [p.start for p in found] == [
            start + sum(q.box.num_elements for q in found[:i]) for i in range(len(found))
        ]
        flat = [whole[p.box.slices].reshape(-1) for p in found]
        assert np.array_equal(np.concatenate([*flat, np.empty(0, int)]), local.reshape(-1)[start:stop])
        assert len(found) <= 3 * len(rows)
        for piece in pieces(spec, tp_rank, tp):
            owned[piece.box.slices] += piece.owned
    assert (owned == 1).all()
    audit_slices([spec], tp)


def test_fewer_key_value_heads_than_ranks_are_replicas_whose_gradients_are_summed() -> None:
    spec = ParamSpec("qkv", ((4 + 2 * 2) * 8, 32), 0, QueryGroups(heads=4, groups=2, head_dim=8))
    q, k, v = spec.intervals(3, 4)  # second query head of the second group
    assert (q.start, q.stop, q.replicas) == (40, 48, (3,))
    assert (k.start, k.stop, k.replicas) == (48, 56, (2, 3))
    assert (v.start, v.stop, v.replicas) == (56, 64, (2, 3))
    assert spec.summed_over_replicas(3, 4) == (k, v)
    assert spec.summed_over_replicas(1, 2) == ()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence_parallel"])
def test_partial_gradients_are_declared(sequence_parallel: bool) -> None:
    specs = {s.name: s for s in model_parameters(resolved_model(qk_layernorm=True), sequence_parallel)}
    for name, spec in specs.items():
        summed = bool(spec.summed_over_replicas(0, 2))
        if "q_layernorm" in name or "k_layernorm" in name:
            assert summed, name
        elif "layernorm" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")) or "position" in name:
            assert summed == sequence_parallel, name
        else:
            assert not summed, name


def test_no_weight_decay_on_vectors() -> None:
    for spec in model_parameters(resolved_model(add_qkv_bias=True, qk_layernorm=True), False):
        assert spec.weight_decay == (len(spec.shape) == 2), spec.name


def test_stages_hold_every_parameter_once_and_the_tied_embedding_twice() -> None:
    specs = model_parameters(resolved_model(), False)
    stages = {
        0: stage_parameters(specs, range(1), True, False),
        1: stage_parameters(specs, range(1, 3), False, False),
        2: stage_parameters(specs, range(3, 3), False, True),
    }
    audit_stages(specs, stages)
    held = [spec.name for stage in stages.values() for spec in stage]
    assert held.count("embedding.word_embeddings.weight") == 2
    assert len(held) == len(specs) + 1
    on_the_first_stages_rank = stages | {2: stage_parameters(specs, range(3, 3), False, True, has_tied_copy=False)}
    audit_stages(specs, on_the_first_stages_rank)
    assert [spec.name for stage in on_the_first_stages_rank.values() for spec in stage] == [spec.name for spec in specs]


def test_a_dropped_layer_and_a_doubled_layer_are_named() -> None:
    specs = model_parameters(resolved_model(), False)
    first, last = stage_parameters(specs, range(1), True, False), stage_parameters(specs, range(2, 3), False, True)
    with pytest.raises(ConfigError, match=r"decoder\.layers\.1\.input_layernorm\.weight"):
        audit_stages(specs, {0: first, 1: last})
    middle = stage_parameters(specs, range(1, 3), False, False)
    with pytest.raises(ConfigError, match=r"decoder\.layers\.2\..* \[1, 2\]"):
        audit_stages(specs, {0: first, 1: middle, 2: last})


def test_boxes_intersect_as_sets_of_indices() -> None:
    assert Box((0, 2), (4, 4)).intersect(Box((2, 0), (4, 3))) == Box((2, 2), (2, 1))
    assert Box((0,), (4,)).intersect(Box((4,), (4,))) is None

"""The model on two and four tp ranks against the reference in fp64.

The loss and every gradient slice, as declared by ParamSpec, are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe.comm.groups import Group
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.model.stage import GPTStage
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.trace.parameters import model_parameters
from tests.harness import RankPool
from tests.model.grids import (
    GPT2,
    LLAMA,
    UNLIKE,
    Expected,
    assert_equal,
    make_microbatch,
    make_stage,
    model_config,
    reference,
    reference_run,
)

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
OPTIONS = {
    "gpt2": GPT2,
    "gpt2_dropout": GPT2 | DROPOUT,
    "llama_qk_norm": LLAMA | {"qk_layernorm": True},
    "gated": LLAMA | {"attention_output_gate": True, "qk_layernorm": True},
    "gated_kv_heads_fewer_than_tp": LLAMA | {"attention_output_gate": True, "num_query_groups": 1},
    "kv_heads_fewer_than_tp": LLAMA | {"num_query_groups": 1, "qk_layernorm": True},
    "kv_heads_fewer_than_tp_dropout": LLAMA | {"num_query_groups": 1, "add_qkv_bias": True} | DROPOUT,
    "tied_rms_soft_caps_window": LLAMA
    | {
        "untie_embeddings_and_output_weights": False,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "window_size": 5,
    },
    "unlike_dropout": UNLIKE | DROPOUT | {"num_layers": 3},
}
SELECTIVE = RecomputeConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp"))
ACTIVATIONS = RecomputeConfig("selective", recompute_modules=("activation", "layernorm"))
FULL = RecomputeConfig("full", "uniform", 2)
KEY = DropoutKey(seed=4, step=1, microbatch=3)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(4) as four:
        yield {2: two, 4: four}


def compared_tensors(
    rank: int, world_size: int, options: dict[str, Any], sequence_parallel: bool, recompute: RecomputeConfig
) -> int:
    """Run one rank's slice, compare it with the reference, and return the number of tensors compared.

    Partial gradients are summed as ParamSpec declares.
    """
    config = model_config(**options)
    model = reference(config)
    microbatch = make_microbatch(config, dropout_key=KEY, documents="window_size" in options)
    expected = reference_run(model, microbatch, world_size, sequence_parallel)
    tp = Group("tp", tuple(range(world_size)), rank, dist.group.WORLD)
    weights = dict(model.named_parameters())
    stage = make_stage(config, weights, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)
    loss = stage(microbatch)
    loss.loss_sum.backward()
    assert_equal(loss.loss_sum, expected.loss_sum, "loss")
    return assert_gradients(stage, config, expected, rank, world_size, sequence_parallel)


def assert_gradients(
    stage: GPTStage, config: ModelConfig, expected: Expected, rank: int, world_size: int, sequence_parallel: bool
) -> int:
    """Assert that this rank's gradient slices, with partial ones summed, equal the reference's; return their number."""
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    specs = {spec.name: spec for spec in model_parameters(config, sequence_parallel)}
    assert grads.keys() == specs.keys()
    for name, grad in grads.items():
        spec, parts = (
            specs[name],
            [],
        )  # every rank's gradient, so that replicas can be summed where their rows are declared partial
        for source in range(world_size):
            part = (
                grad.clone() if source == rank else torch.empty(spec.local_shape(source, world_size), dtype=grad.dtype)
            )
            dist.broadcast(part, source)
            parts.append(part)
        for interval, mine in zip(spec.intervals(rank, world_size), split(spec, grad, rank, world_size), strict=True):
            total = mine.clone()
            if len(interval.replicas) > 1 and spec.needs_replica_sum(interval):
                total = sum(rows_of(spec, parts[r], interval, r, world_size) for r in interval.replicas)
            dim = spec.slicing.dim or 0
            assert_equal(
                total,
                expected.grads[name].narrow(dim, interval.start, interval.stop - interval.start),
                f"{name} {interval}",
            )
    return len(grads)


def split(spec: Any, local: torch.Tensor, tp_rank: int, tp: int) -> list[torch.Tensor]:
    return list(local.split([i.stop - i.start for i in spec.intervals(tp_rank, tp)], dim=spec.slicing.dim or 0))


def rows_of(spec: Any, local: torch.Tensor, interval: Any, tp_rank: int, tp: int) -> torch.Tensor:
    """Return the same global rows from another rank's local tensor."""
    (part,) = (
        p
        for i, p in zip(spec.intervals(tp_rank, tp), split(spec, local, tp_rank, tp), strict=True)
        if (i.start, i.stop) == (interval.start, interval.stop)
    )
    return part


# four ranks where they differ from two: more replicas of a key/value head, other dropout streams
GRIDS = [(2, name) for name in OPTIONS] + [
    (4, name)
    for name in (
        "gpt2_dropout",
        "llama_qk_norm",
        "gated_kv_heads_fewer_than_tp",
        "kv_heads_fewer_than_tp_dropout",
        "unlike_dropout",
    )
]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
@pytest.mark.parametrize(("tp", "name"), GRIDS, ids=[f"tp{tp}-{name}" for tp, name in GRIDS])
def test_tp_loss_and_gradients_equal_the_reference(
    pools: dict[int, RankPool], tp: int, name: str, sequence_parallel: bool
) -> None:
    assert min(pools[tp].run(compared_tensors, OPTIONS[name], sequence_parallel, RecomputeConfig())) > 10


@pytest.mark.parametrize("recompute", [SELECTIVE, ACTIVATIONS, FULL], ids=["core-norm-mlp", "activation-norm", "full"])
@pytest.mark.parametrize("name", ["gpt2_dropout", "kv_heads_fewer_than_tp_dropout", "unlike_dropout"])
def test_tp_with_recompute_equals_the_reference(
    pools: dict[int, RankPool], name: str, recompute: RecomputeConfig
) -> None:
    assert min(pools[2].run(compared_tensors, OPTIONS[name], True, recompute)) > 10

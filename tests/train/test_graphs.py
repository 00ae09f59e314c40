"""Steps that replay graphs equal eager steps bit-identically: on a CPU, with tapes in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.data.batch import DocumentRules
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.tensor_parallel import cross_entropy, embedding
from megapipe.train.nonfinite import OutputWatch, repeat_step
from megapipe.train.step import LossAverage
from tests.harness import RankPool
from tests.pipeline.tape import Pool, TapeRecorder
from tests.train.grids import step_microbatches, trainer
from tests.train.runs import tiny

WARMUP = 2
BATCHES = (8, 8, 4, 8)  # samples of each step; a microbatch has two
THREE = {"pipeline_model_parallel_layout": "Et|tt|tL"}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "num_query_groups": 2,
    "add_bias_linear": False,
    "window_size": 5,
}

LATENT = LLAMA | {"multi_latent_attention": True, "kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4}
LATENT |= {"v_head_dim": 6, "qk_layernorm": True, "num_query_groups": None, "window_size": None}
WIDE = THREE | {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "seq_length": 8, "dtype": "bf16"}


@dataclass(frozen=True)
class Trained:
    """Results of one rank's training.

    losses: per step. forwards: calls of each stage's module. pools: one entry per pool, its number of recordings.
    """

    losses: list[tuple[float, float]]
    sums: list[dict[tuple[int, int], float]]
    weights: dict[str, Tensor]
    forwards: dict[int, int]
    pools: list[int]


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """Check ids on the device, as on a GPU; on a CPU the host checks them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (embedding, cross_entropy):
            patch.setattr(module, "check_ids", lambda *_: None)
        patch.setattr(
            embedding,
            "_local_rows",
            lambda rows, gradient, is_local: (rows, gradient.masked_fill(~is_local[:, None], 0)),
        )
        yield


def train(rank: int, world_size: int, changes: dict[str, Any], graphs: bool, documents: bool = False) -> Trained:
    asked = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": WARMUP} if graphs else {}
    fixed = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    plan = resolve(tiny(**(fixed | changes | asked)), world_size)
    recorder = TapeRecorder()
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"), recorder=recorder)
    with as_on_a_card():
        return steps_of(runtime, recorder, DocumentRules(3, True, True, True) if documents else None)


def steps_of(runtime: TrainingRuntime, recorder: TapeRecorder, rules: DocumentRules | None = None) -> Trained:
    calls = dict.fromkeys(runtime.stages, 0)

    def count(stage: int) -> Callable[..., None]:
        def called(*_: Any) -> None:
            calls[stage] += 1

        return called

    for stage, module in runtime.stages.items():
        module.register_forward_pre_hook(count(stage))
    watch, step, random = OutputWatch(runtime), trainer(runtime), np.random.RandomState(0)
    losses, sums = [], []
    for number, samples in enumerate(BATCHES):
        rows = random.randint(0, 29, (samples * runtime.plan.topology.dp, 9))
        result = step.run(step_microbatches(runtime, rows, number, rules), Rates(1e-2, 0.01))
        losses.append((result.loss, result.update.grad_norm))
        sums.append({key: float(value) for key, value in watch.take().items()})
        if number == 2:  # an evaluation between replays
            step.evaluate(step_microbatches(runtime, rows, number, rules))
            watch.take()
    runtime.stores.finish_weights()
    weights = {f"{s} {n}": b.parameter(n).clone() for s, b in runtime.buffers.items() for n in b.names}
    return Trained(losses, sums, weights, calls, [len(pool.tapes) for pool in recorder.pools])


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    assert found.sums == expected.sums
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], values) for name, values in expected.weights.items())


def num_live(trained: Trained, stage: int) -> int:
    """Return the number of forwards that a stage ran in order to be recorded."""
    counts = [samples // 2 for samples in BATCHES]
    return trained.forwards[stage] - sum(counts[:WARMUP]) - counts[2]


@pytest.mark.parametrize(
    ("changes", "documents"),
    [
        pytest.param({}, False, id="one stage"),
        pytest.param(
            THREE | LLAMA | {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
            False,
            id="llama",
        ),
        pytest.param(
            THREE
            | {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "recompute_keep_attention": True,
            }
            | {"cross_entropy_chunk_size": 5, "dtype": "bf16", "qk_layernorm": True},
            True,
            id="full recompute, chunks, documents, bf16",
        ),
        pytest.param(LATENT | {"mtp_num_layers": 1}, False, id="latent attention, prediction ahead"),
        pytest.param(WIDE | {"fp8_recipe": "tensorwise", "fp8_format": "e4m3"}, False, id="fp8"),
    ],
)
def test_steps_replayed_from_graphs_equal_eager_ones(changes: dict[str, Any], documents: bool) -> None:
    expected, found = (train(0, 1, changes, graphs, documents) for graphs in (False, True))
    assert_same(found, expected)
    assert len(set(expected.losses)) == len(BATCHES)
    stages = len(found.forwards)
    assert len(found.pools) == sum(num_live(found, stage) for stage in found.forwards)
    assert stages in (1, 3) and set(found.pools) == {2}


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b, ZeRO-1": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "global_batch_size": 16,
        },
    ),
    "tp 2, sequence parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    ),
    "zb-h1": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
    "cp 2, p2p": (2, LLAMA | {"context_parallel_size": 2}),
    "cp 2, a2a": (2, LLAMA | {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}),
    "zb-v": (
        2,
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 2},
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_pipelines_replayed_from_graphs_equal_eager_ones(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    ranks, changes = GRIDS[name]
    changes = {"overlap_grad_reduce": True, **changes}
    both: Sequence[list[Trained]] = [rank_pools(ranks).run(train, changes, graphs) for graphs in (False, True)]
    for expected, found in zip(*both, strict=True):
        assert_same(found, expected)
        assert set(found.pools) == {3 if name.startswith("zb") else 2}


def test_the_search_for_a_fault_runs_without_graphs_and_the_next_step_records_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with as_on_a_card():
        changes = {
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "cuda_graph_impl": "local",
            "cuda_graph_warmup_steps": 1,
        }
        recorder = TapeRecorder()
        plan = resolve(tiny(**changes), 1)
        runtime = TrainingRuntime(
            plan, build_process_groups(plan.topology, 0, "gloo", 60), torch.device("cpu"), recorder=recorder
        )
        step, rows = trainer(runtime), np.random.RandomState(0).randint(0, 29, (8, 9))
        for number in range(2):
            step.run(step_microbatches(runtime, rows, number), Rates(1e-2, 0.0))
        pools = len(recorder.pools)
        fc2: Any = runtime.stages[0].decoder.layers["2"].mlp.linear_fc2
        with monkeypatch.context() as patch:
            patch.setattr(fc2, "forward", lambda *arguments: type(fc2).forward(fc2, *arguments) * torch.nan)
            assert np.isfinite(
                step.run(step_microbatches(runtime, rows, 2), Rates(0.0, 0.0)).loss
            )  # a replay runs no Python
            objective = LossAverage.of(plan).objective(lambda: 1.0)
            found = repeat_step(runtime, step_microbatches(runtime, rows, 2), objective)
        assert "decoder.layers.2.mlp.linear_fc2 (RowParallelLinear)" in found
        assert len(recorder.pools) == pools
        step.run(step_microbatches(runtime, rows, 3), Rates(0.0, 0.0))
        assert len(recorder.pools) == 2 * pools


def test_nothing_of_the_warm_up_is_alive_when_recording_begins() -> None:
    """No gradient accumulation node of the warm-up is alive when recording begins.

    Such a node adds to a parameter's .grad on the stream it was created on, and a weight does not keep its node alive.
    """
    with as_on_a_card():
        changes = {
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "cuda_graph_impl": "local",
            "cuda_graph_warmup_steps": 1,
        }
        plan = resolve(tiny(**THREE, **changes), 1)
        alive: list[str] = []

        class Looks(TapeRecorder):
            def pool(self) -> Pool:
                if not self.pools:
                    alive.extend(name for name, parameter in parameters() if "warm-up" in adds_to(parameter).metadata)
                return super().pool()

        runtime = TrainingRuntime(
            plan, build_process_groups(plan.topology, 0, "gloo", 60), torch.device("cpu"), recorder=Looks()
        )

        def parameters() -> list[tuple[str, Tensor]]:
            return [named for module in runtime.stages.values() for named in module.named_parameters()]

        tagged = 0

        def tag(module: Any, inputs: Any, output: Any) -> None:
            nonlocal tagged
            for parameter in module.parameters():
                adds_to(parameter).metadata["warm-up"] = True
                tagged += "warm-up" in adds_to(parameter).metadata

        for module in runtime.stages.values():
            module.register_forward_hook(tag)
        step, rows = trainer(runtime), np.random.RandomState(0).randint(0, 29, (8, 9))
        step.run(step_microbatches(runtime, rows, 0), Rates(1e-2, 0.0))
        assert tagged > len(parameters()) and runtime.graphs is not None
        assert all(graphs.slots for graphs in runtime.graphs.stages.values())
        assert alive == []


def adds_to(parameter: Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient: the live one if there is one, otherwise a new one."""
    view = parameter.view_as(parameter).grad_fn
    assert view is not None
    return view.next_functions[0][0]

"""Compiled blocks train as eager ones do, with one graph for the segments between two operators; the choice of
--compile-blocks is logged and kept.

The short tests run the functions that would be compiled as they are; the long ones trace them, forward and backward
("aot_eager"); one compiles them, which takes half a minute a shape.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch._inductor.utils import run_and_get_code

from megapipe.data.batch import DocumentRules
from megapipe.errors import ConfigError
from megapipe.model.block import Block
from megapipe.model.mlp import activation_element
from megapipe.model.segments import Compiler, Elements, Segment, run_branch
from megapipe.optimizer.schedule import Rates
from megapipe.pipeline.parts import elements_of_parts
from megapipe.train import compiled_blocks
from megapipe.train.compiled_blocks import TOLERANCES, Trial, choose_blocks
from megapipe.train.stream import train_step
from tests.harness import RankPool
from tests.model.saved_bytes import SavedBytes
from tests.tables import options, rows
from tests.tiny import LLAMA, NOPE, tiny_config  # noqa: F401  names of the table
from tests.train.grids import runtime_of, step_microbatches, trainer

TABLE = Path(__file__).with_name("compiled_blocks.tsv")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PP = {"pipeline_model_parallel_size": 2}
TP = {"tensor_model_parallel_size": 2}
LATENT = LLAMA | {"multi_latent_attention": True, "kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4}
LATENT |= {"v_head_dim": 6, "kv_channels": None, "num_query_groups": None}
EXPERTS = LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True}


def cases(number: int) -> dict[str, dict[str, Any]]:
    """Return the options of the runs on so many ranks, by name."""
    return {name: options(words, globals()) for ranks, name, words in rows(TABLE) if int(ranks) == number}


ONE_RANK, TWO_RANKS = cases(1), cases(2)


def compiler(backend: str) -> Callable[..., Any]:
    """Return torch.compile with a backend; untraced: the functions that would be compiled, as they are."""
    if backend == "untraced":
        return lambda function, dynamic: function
    return partial(torch.compile, fullgraph=True, backend=backend)


def trained(
    rank: int, world_size: int, changes: dict[str, Any], backend: str | None, evaluates: bool = True
) -> tuple[list[float], list[torch.Tensor], list[str]]:
    """Train two steps and evaluate; return losses and gradient norms, the parameters, and what was said."""
    said: list[str] = []
    options = {"dtype": "fp64", "vocab_size": 28, "make_vocab_size_divisible_by": 1, "global_batch_size": 8}
    if changes.get("reset_attention_mask"):
        options["tokenizer_type"] = "NullTokenizer"
    config = tiny_config(**options | changes, compile_blocks="off" if backend is None else "on")
    runtime = runtime_of(config, rank, world_size)
    if backend is not None:
        assert choose_blocks(runtime, None, said.append, compiler(backend)) is None
        blocks = [block for stage in runtime.stages.values() for block in stage.modules() if isinstance(block, Block)]
        assert all(block.compiler is not None for block in blocks)
    step = trainer(runtime) if runtime.plan.is_synchronous else train_step(runtime)
    random, numbers = np.random.RandomState(0), []
    rules = DocumentRules(3, True, True, True) if changes.get("reset_attention_mask") else None
    for number in range(2):
        rows = random.randint(0, 28, (8, 9))
        result = step.run(step_microbatches(runtime, rows, number, rules), Rates(1e-2, 0.01))
        numbers += [result.loss, result.update.grad_norm]
    if evaluates:
        numbers.append(step.evaluate(step_microbatches(runtime, rows, 2, rules)).loss)
    runtime.stores.finish_weights()
    if runtime.plan.sharding is not None:  # the weights of the last stage that ran are freed; evaluation has read them
        return numbers, [], said
    return numbers, [b.parameter(name).clone() for b in runtime.buffers.values() for name in b.names], said


def assert_alike(found: tuple[Any, ...], expected: tuple[Any, ...], dtype: torch.dtype) -> None:
    limit = 10 * TOLERANCES[dtype]
    assert found[0] == pytest.approx(expected[0], rel=limit)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def check_one_rank(name: str, backend: str) -> None:
    changes = ONE_RANK[name]
    found, expected = trained(0, 1, changes, backend), trained(0, 1, changes, None)
    assert_alike(found, expected, torch.bfloat16 if "dtype" in changes else torch.float64)
    assert found[2][0].startswith("blocks are compiled: forward and backward take ")


def check_two_ranks(name: str, backend: str, pool: RankPool) -> None:
    changes = TWO_RANKS[name]
    actual, plain = (pool.run(trained, changes, which, timeout=280) for which in (backend, None))
    for found, expected in zip(actual, plain, strict=True):
        assert_alike(found, expected, torch.float64)


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank_trains_as_without_compiled_blocks(name: str) -> None:
    check_one_rank(name, "untraced")


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_grid_trains_as_without_compiled_blocks(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    check_two_ranks(name, "untraced", rank_pools(2))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONE_RANK)
def test_traced_blocks_train_the_same_without_a_graph_break(name: str) -> None:
    check_one_rank(name, "aot_eager")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_traced_blocks_of_a_grid_train_the_same(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    check_two_ranks(name, "aot_eager", rank_pools(2))


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the compiled shapes of a session share one cache; one that TORCHINDUCTOR_CACHE_DIR names is kept."""
    with pytest.MonkeyPatch.context() as patch:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("inductor_cache")
def test_a_compiled_llama_block_has_five_kernels_forward_and_four_backward() -> None:
    """One pass each: the norm; split, rotation and v; residual sum with the next norm; SwiGLU; the last sum.

    The gradient of the last sum is passed on. The block saves what the eager one saves.
    """
    runtime = runtime_of(tiny_config(**LLAMA | {"num_layers": 1, "compile_blocks": "on"}), 0, 1)
    (module,) = runtime.stages.values()
    block = module.decoder.layers["0"]
    hidden = torch.randn(8, 1, 16, requires_grad=True)
    context = module.make_context(compiled_blocks.example(runtime, (8, 1, 16)), torch.float32)[0]

    def run() -> SavedBytes:
        with SavedBytes(module, [hidden, *(context.rotary or ())]) as saved:
            output = block(hidden, context)
        output.sum().backward()
        return saved

    eager = run().total
    said: list[str] = []
    _, codes = with_code(lambda: choose_blocks(runtime, None, said.append))
    assert said[0].startswith("blocks are compiled")
    assert [kernels_of(code) for code in codes] == [(1, 0)] * 9
    assert run().total <= eager


def with_code(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of work, and the code that inductor writes for each graph of it."""
    # graphs that inductor has in its cache come without their code
    with torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1):
        result, codes = run_and_get_code(work)
    return result, codes


def kernels_of(code: str) -> tuple[int, int]:
    """Return the fused kernels and the GEMMs that a graph's code calls."""
    calls = re.findall(r"^\s+(?:buf\d+ = )?([\w.]+)\(", code[code.index("def call(") :], re.M)
    fused = sum(name.startswith("cpp_fused") for name in calls)
    return fused, sum(name in ("extern_kernels.mm", "extern_kernels.addmm") for name in calls)


def trained_with_code(
    rank: int, world_size: int, changes: dict[str, Any], cache: str
) -> tuple[Any, list[tuple[int, int]]]:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    result, codes = with_code(lambda: trained(rank, world_size, changes, "inductor", evaluates=False))
    return result, [kernels_of(code) for code in codes]


@pytest.mark.timeout(600)
def test_compiled_regions_between_collectives_train_the_same(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """One kernel each: the norm; split, rotation and v; residual sum with the next norm; SwiGLU; the last sum.

    So are the gradients, but of the last sum, which is passed on.
    """
    changes = TP | LLAMA | {"sequence_parallel": True, "num_layers": 1}
    actual = rank_pools(2).run(trained_with_code, changes, str(tmp_path), timeout=540)
    plain = rank_pools(2).run(trained, changes, None, False, timeout=200)
    for (found, kernels), expected in zip(actual, plain, strict=True):
        assert_alike(found, expected, torch.float64)
        assert found[2][0].startswith("blocks are compiled")
        assert kernels == [(1, 0)] * 9


@pytest.mark.timeout(200)
def test_other_numbers_of_rows_and_slices_are_not_compiled_again() -> None:
    """One graph serves any number of rows of experts; none and one row run as written. A dense MLP before them with the
    same activation has a graph of its own.
    """
    counter = torch._dynamo.testing.CompileCounter()
    runtime = runtime_of(tiny_config(**EXPERTS | {"compile_blocks": "on"}), 0, 1)
    (module,) = runtime.stages.values()
    experts = module.decoder.layers["0"].mlp.experts
    (activation,) = (element for element in experts.elements if isinstance(element, Segment))
    fused = Compiler([(8, 1, 16)], partial(torch.compile, fullgraph=True, backend=counter))
    dense = Elements([activation_element(runtime.plan.config.model)])
    run_branch(dense, (torch.randn(8, 1, 16, requires_grad=True),), SimpleNamespace(compiler=fused))
    rows = [random.Random(number).randrange(12) for number in range(100)]
    assert {0, 1} < set(rows)
    for number in rows:
        x, weights = torch.randn(number, 16, requires_grad=True), torch.rand(number)
        context = SimpleNamespace(compiler=fused)
        (found,) = run_branch(Elements([activation._replace(at=slice(None))]), (weights, x), context)
        torch.testing.assert_close(found, activation.function(weights, x))
        found.sum().backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize("changes", [{}, {"norm_position": "around", "recompute_modules": ("layernorm",)} | SELECTIVE])
def test_parts_of_a_layer_are_its_elements_and_its_graphs(changes: dict[str, Any]) -> None:
    sizes = EXPERTS | {"moe_shared_expert_intermediate_size": 8, "dtype": "fp64"}
    runtime = runtime_of(tiny_config(**sizes | changes), 0, 1)
    (module,) = runtime.stages.values()
    block, hidden = module.decoder.layers["0"], torch.randn(8, 1, 16, dtype=torch.float64)
    context = module.make_context(compiled_blocks.example(runtime, (8, 1, 16)), torch.float64)[0]

    def run(*parts: Any) -> tuple[torch.Tensor, set[str]]:
        graphs: set[str] = set()

        def compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
            graphs.add(function.__name__)
            return function

        block.compiler, state = Compiler([(8, 1, 16)], compiled), (hidden,)
        for elements in parts:  # on one rank the all-to-alls between them move nothing
            state = block(state[0], context, elements, state[1:])
        (output,) = state
        return output, graphs

    whole, expected = run(block.elements)
    parts, graphs = run(*elements_of_parts(block).values())
    assert torch.equal(whole, parts)
    assert graphs == expected
    assert "expert_activation" in graphs


def other_result(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """Stand in for a compiler that makes another function."""

    def wrong(*given: Any) -> Any:
        stream, values = function(*given)
        return None if stream is None else stream * 1.0001, values

    return wrong


def failing(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel for this\nand more")

    return fail


def choice(
    wanted: str, compiler: Callable[..., Any], before: bool | None = None, **changes: Any
) -> tuple[bool | None, str, bool]:
    """Return the choice of a run that takes the CPU for a GPU, what it said, and whether blocks are compiled."""
    runtime = runtime_of(tiny_config(**(LLAMA | changes), compile_blocks=wanted), 0, 1)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_blocks, "chooses", lambda device: True)
        made = choose_blocks(runtime, before, said.append, compiler)
    (stage,) = runtime.stages.values()
    compiled = {block.compiler is not None for block in stage.modules() if isinstance(block, Block)}
    assert len(compiled) == len(said) == 1
    return made, said[0], compiled.pop()


def test_another_result_is_not_used() -> None:
    made, said, is_compiled = choice("auto", other_result)
    assert (made, is_compiled) == (False, False)
    assert said.startswith("blocks are not compiled: ")
    assert "results differ by" in said
    with pytest.raises(ConfigError, match="a compiled block is not the eager one"):
        choice("on", other_result)


def test_a_block_that_cannot_be_compiled_runs_eager_with_the_reason() -> None:
    assert choice("auto", failing) == (
        False,
        "blocks are not compiled: compiling failed: no kernel for this (--compile-blocks auto)",
        False,
    )
    with pytest.raises(ConfigError, match="no kernel for this"):
        choice("on", failing)


@pytest.mark.parametrize(
    "failure", [AttributeError("no linear_qkv\nin a module"), KeyError(), TypeError("two")], ids=repr
)
def test_any_exception_of_the_trial_leaves_the_blocks_eager(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> Any:
        raise failure

    monkeypatch.setattr(compiled_blocks, "try_block", raises)
    first = str(failure).split("\n")[0] or type(failure).__name__
    said = f"compiling failed: {first}"
    expected = False, f"blocks are not compiled: {said} (--compile-blocks auto)", False
    assert choice("auto", compiler("untraced")) == expected
    with pytest.raises(ConfigError, match=f"^--compile-blocks on: a compiled block is not the eager one: {said}; use"):
        choice("on", compiler("untraced"))


def test_a_trial_that_runs_out_of_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(compiled_blocks, "try_block", raises)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        choice("auto", compiler("untraced"))


@pytest.mark.parametrize("seconds", [0.5, 2.0], ids=["faster", "slower"])
def test_auto_takes_the_faster_form(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "agreed_trial", lambda *_: Trial(0.1, 1.0, seconds, 3.0))
    made, _, is_compiled = choice("auto", compiler("untraced"))
    assert made is is_compiled is (seconds < 1.0)
    assert choice("on", compiler("untraced"))[2]


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_keeps_the_choice(before: bool) -> None:
    made, said, is_compiled = choice("auto", failing, before)  # nothing is tried
    assert made is is_compiled is before
    assert said.endswith("as in the run before (--compile-blocks auto)")


def test_without_a_compiler_on_is_an_error_and_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(compiled_blocks, "missing_compiler", lambda device: "no compiler here")
    none: Any = None
    assert choice("auto", none)[1] == "blocks are not compiled: no compiler here (--compile-blocks auto)"
    with pytest.raises(ConfigError, match=r"--compile-blocks on: .*no compiler"):
        choice("on", none)

"""--compile-blocks on the fake device: graphs are traced, forward and backward, and not made into kernels.

Dynamo traces each function to one graph, AOT autograd splits that into a forward and a backward of torch's operations;
each runs as one kernel. The CPU build chooses no CUDA kernel of attention, so it is chosen here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _pop_mode_temporarily

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.extras.streams.recorder import Recorder
from megapipe.trace.meta import attention_on
from megapipe.train.compiled_blocks import choose_blocks

WHOLE = torch.compile  # before `recorder.pretend_streams` replaces it
Graphs = dict[str, list[dict[str, int]]]  # function -> of each graph, in the order of their traces: operations


def compile_blocks(runtime: TrainingRuntime, recorder: Recorder, graphs: Graphs) -> str:
    """Let all blocks of a rank run compiled, as a run with --compile-blocks on does; return what it says.

    graphs: gets those of the trial, and those that are traced later.
    """
    said: list[str] = []
    answers = recorder.answers
    # the host reads 0 for differences, and what it has put into small tensors
    with patch.object(answers, "knows_given", True), patch.dict(answers.numbers, {Tensor.__float__: 0.0}):
        choose_blocks(runtime, None, said.append, partial(traced, recorder, graphs))
    return "\n".join(said)


def traced(recorder: Recorder, graphs: Graphs, function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """Stand in for torch.compile of a function of a block."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    name = function.__name__
    found = graphs.setdefault(name, [])

    def lower(module: torch.fx.GraphModule, _: Any, kind: str) -> Callable[..., Any]:
        calls = (node for node in module.graph.nodes if node.op == "call_function")
        names = (getattr(node.target, "__name__", str(node.target)) for node in calls)
        found.append(dict(Counter(name.split(".")[0] for name in names)))

        def run(*args: Any) -> Any:
            return recorder.as_kernel(f"graph {name} {kind}", module, *args)

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=partial(lower, kind="forward"),
        bw_compiler=partial(lower, kind="backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = WHOLE(function, fullgraph=True, dynamic=dynamic, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", attention_of_cuda))
            # Dynamo asks for the device's current stream, which the CPU build does not have
            stack.enter_context(patch.object(torch.accelerator, "is_available", lambda: False))
            if torch._C._len_torch_function_stack():  # not in a backward
                stack.enter_context(_pop_mode_temporarily())
            return compiled(*args, **kwargs)

    return call


def attention_of_cuda(*args: Any, **kwargs: Any) -> Tensor:
    return attention_on("cuda", *args, **kwargs)

#!/usr/bin/env python3
"""Training speed of megapipe and Megatron-Core 0.16.1 on CPUs, one process or tensor parallel, in alternating turns.

    pip install --no-deps --target FOLDER megatron-core==0.16.1
    python tools/bench/bench_megatron.py FOLDER --tp 2
    python tools/bench/bench_megatron.py FOLDER --tp 2 --tuned    with torch's attention kernel and its own fusions

Both train the shape of bench_cpu.py on the same tokens, each with its own initial weights. Megatron-Core expects CUDA;
its calls of it are redirected to the CPU. docs/performance.md explains the results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_cpu import ratios, take_turns
from bench_job import Grid, make_plan, serve, timed
from bench_processes import BenchError, Ranks, exit_code, machine_text, make_parser
from bench_table import Quartiles
from card_bench.contenders import CLIP, LR, WEIGHT_DECAY, draw_rows
from plain_loop import Shape
from schedule_bench.figures import StepFigures

from megapipe.environment import set_for_libraries


def redirect_cuda() -> None:
    """Make explicit CUDA calls of Megatron-Core run on the CPU."""
    import torch

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: make(*a, **(k | {"device": "cpu"} if "cuda" in str(k.get("device")) else k))

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *arguments, **named: None
    tensor.cuda = lambda self, *arguments, **named: self
    type_of = tensor.type
    tensor.type = lambda self, *to: type_of(self, *to) if to else type_of(self).replace("torch.", "torch.cuda.")
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Compute causal attention of [s, b, heads, d] by torch's kernel, in place of Megatron's separate GEMMs.

    k and v may have fewer heads.
    """
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared).permute(2, 0, 1, 3).flatten(2)


def gpt_model(
    sizes: Mapping[str, Any], dtype: Any, vocab_size: int, seq_length: int, *, tuned: bool, tied: bool, **model: Any
) -> Any:
    """Return Megatron-Core's GPTModel on its local kernels, without dropout; its parallel state must be initialized.

    sizes: of its TransformerConfig. tuned: with torch's attention kernel and its own fusions. model: of GPTModel.
    """
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()  # there is no dropout
    config = TransformerConfig(
        **sizes, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, pipeline_dtype=dtype,
        params_dtype=dtype, masked_softmax_fusion=False, bias_activation_fusion=tuned, bias_dropout_fusion=tuned,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    gpt = GPTModel(config, spec, vocab_size, seq_length, share_embeddings_and_output_weights=tied, **model)
    for layer in gpt.decoder.layers if tuned else ():
        layer.self_attention.core_attention.forward = attention
    return gpt


def make_step(shape: Shape, tuned: bool) -> Callable[[], float]:
    """Return Megatron's training step, which returns the mean loss; its parallel state must be initialized."""
    import torch
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    sizes = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": 4 * shape.hidden,
        "activation_func": F.gelu,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "finalize_model_grads_func": finalize_model_grads,
    }
    gpt = gpt_model(sizes, torch.float32, shape.vocab, shape.seq, tuned=tuned, tied=True)
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    options = OptimizerConfig(optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    optimizer = get_megatron_optimizer(options, [model])
    rows = torch.from_numpy(draw_rows(make_plan(shape, Grid())))
    positions = torch.arange(shape.seq).expand(shape.micro_batch, -1)
    hidden = torch.ones(1, 1, shape.seq, shape.seq, dtype=torch.bool).triu(1)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.mean()
        return loss, {"loss": loss.detach().clone()}

    def forward(batches: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        return model(batch[:, :-1].contiguous(), positions, hidden, labels=batch[:, 1:].contiguous()), loss_of

    def step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(rows.split(shape.micro_batch)), model=[model],
            num_microbatches=shape.microbatches, seq_length=shape.seq, micro_batch_size=shape.micro_batch,
            forward_only=False,
        )  # fmt: skip
        optimizer.step()
        return sum(float(each["loss"]) for each in found) / len(found)

    return step


def initialize(backend: str, rank: int, tp: int, port: int) -> None:
    """Make Megatron's process groups of tp ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    set_for_libraries(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tp, 1)


def serve_megatron(orders: Connection, rank: int, tp: int, port: int, folder: str, shape: Shape, tuned: bool) -> None:
    """Answer each order with a step, until None, as `bench_job.serve` does."""
    sys.path.append(folder)  # last, so that everything else comes from this environment
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    redirect_cuda()
    initialize("gloo", rank, tp, port)
    step = make_step(shape, tuned)
    orders.send(None)
    while orders.recv() is not None:
        dist.barrier()
        orders.send(timed(step))
    os._exit(0)  # gloo may abort at interpreter exit


def measure(folder: str, shape: Shape, tp: int, rounds: int, tuned: bool) -> dict[str, list[StepFigures]]:
    """Return each round's step by name; a first step is not counted."""
    plan = make_plan(shape, Grid(tp=tp))
    starts = {
        "megapipe": (partial(Ranks, "megapipe", tp, serve, shape, Grid(tp=tp)), plan),
        "Megatron-Core": (partial(Ranks, "Megatron-Core", tp, serve_megatron, folder, shape, tuned), plan),
    }
    return take_turns(starts, rounds, 1)


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where megatron-core is installed")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="steps of each in turn (default: 10)")
    parser.add_argument("--tuned", action="store_true", help="give Megatron torch's attention kernel and its fusions")
    given, shape = parser.parse_args(argv), Shape()
    if not (given.folder / "megatron" / "core").is_dir():
        raise BenchError(f"no megatron/core in {given.folder}; see --help")
    turns = measure(str(given.folder), shape, given.tp, given.rounds, given.tuned)
    for name, found in turns.items():
        tokens = Quartiles.of([shape.step_tokens / turn.measured_seconds for turn in found])
        cpu = Quartiles.of([turn.cpu_seconds for turn in found])
        print(f"{name}: {tokens.text(',.0f')} tokens/s, {cpu.text('.3f')} CPU s a step")
    theirs, ours = turns["Megatron-Core"], turns["megapipe"]
    speed = ratios([turn.measured_seconds for turn in theirs], [turn.measured_seconds for turn in ours])
    cpu_speed = ratios([turn.cpu_seconds for turn in theirs], [turn.cpu_seconds for turn in ours])
    print(f"megapipe / Megatron-Core, tokens/s: {speed.text('.3f')}")
    print(f"megapipe / Megatron-Core, tokens per CPU second: {cpu_speed.text('.3f')}")
    tuned = ", Megatron tuned" if given.tuned else ""
    print(f"tp {given.tp}{tuned}; median [quartiles] of {given.rounds} pairs; {machine_text()}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

"""Time the kinds of context parallelism on gloo: forward and backward of attention, kinds in turn.

    python tools/bench/bench_context_parallel.py --cp 2 --seq-length 8192 --num-query-groups 2

Ranks are processes of this machine with one thread each. Every repeat runs each kind once, so that other work on the
machine meets all of them; medians over the repeats. Bytes are those that a rank sends in a forward and a backward, by
the plan. Inputs are random; the outputs of the kinds are compared first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from bench_processes import BenchError, Ranks, exit_code, join, machine_text, make_parser

from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import ContextGroups, Group
from megapipe.config.config import resolve_model
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig
from megapipe.layers.table import RankShape
from megapipe.model.attention import fused_attention
from megapipe.model.block_attention import FusedBlocks
from megapipe.model.context import masked_blocks
from megapipe.model.context_parallel import ContextParallel
from megapipe.model.ring_attention import BlockAttention
from megapipe.plan.traces import sent_bytes
from megapipe.sharding.sequence import SequenceSlice, Visibility
from megapipe.topology import Topology
from megapipe.trace.layers import trace_layers
from megapipe.trace.traced import TracedLayer

KINDS = ("p2p", "all_gather", "a2a")
TIMEOUT_SECONDS = 600.0
TOLERANCE = 1e-4


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--cp", type=int, default=2, help="ranks")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--num-query-groups", type=int, default=2, help="a multiple of --cp, for a2a")
    parser.add_argument("--kv-channels", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    own = parser.parse_args(words)
    if own.seq_length % (2 * own.cp) or own.num_query_groups % own.cp or own.num_attention_heads % own.num_query_groups:
        parser.error("--seq-length must be a multiple of 2 x --cp, --num-query-groups of --cp and divide the heads")
    return own


def rank_main(connection: Connection, rank: int, ranks: int, port: int, own: argparse.Namespace) -> None:
    """Compute on one rank: for each kind the seconds of every repeat."""
    cp = join(rank, ranks, port, Topology(cp=own.cp), TIMEOUT_SECONDS).cp
    connection.send(seconds_of_kinds(cp, own))
    connection.recv()  # until all have answered
    shutdown(0)


def seconds_of_kinds(cp: Group, own: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each repeat by kind. Raises BenchError if the kinds do not agree."""
    runs = {kind: attention_of(kind, cp, own) for kind in KINDS}
    results = {kind: run() for kind, run in runs.items()}
    for kind, found in results.items():
        for one, other in zip(found, results["p2p"], strict=True):
            if not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE):
                raise BenchError(f"{kind} and p2p differ by {(one - other).abs().max():.2g}")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(own.repeats):
        for kind, run in runs.items():
            barrier(cp)
            began = time.perf_counter()
            run()
            barrier(cp)
            seconds[kind].append(time.perf_counter() - began)
    return seconds


def attention_of(kind: str, cp: Group, own: argparse.Namespace) -> Callable[[], tuple[Any, ...]]:
    """Return a function that runs forward and backward and returns the output and the gradients of q, k and v."""
    parallel = ContextParallel.of(kind, ContextGroups(cp))
    scale, local = own.kv_channels**-0.5, own.seq_length // own.cp
    queries = own.num_attention_heads // own.num_query_groups
    generator = torch.Generator().manual_seed(cp.rank)
    sizes = [(local, 1, own.num_query_groups, heads, own.kv_channels) for heads in (queries, 1, 1)]
    q, k, v = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
    grad = torch.randn(local, 1, own.num_attention_heads * own.kv_channels, generator=generator)
    device, blocks, adds = torch.device("cpu"), {}, False
    if parallel.ring.size > 1:
        seen = Visibility.of(SequenceSlice((own.seq_length,)), part=parallel.part)
        blocks, adds = masked_blocks(seen, device, torch.float32), seen.adds_key_gradients

    def run() -> tuple[Any, ...]:
        inputs = parallel.heads_for_positions(q, k, v)
        if parallel.ring.size > 1:
            output = BlockAttention(0, blocks, FusedBlocks(scale), parallel.exchange, adds)(*inputs, None)
        else:
            output = fused_attention(*inputs, None, scale)
        output = parallel.positions_for_heads(output.unflatten(-1, (-1, own.kv_channels))).flatten(2)
        return output.detach(), *torch.autograd.grad(output, (q, k, v), grad)

    return run


def sent_megabytes(kind: str, own: argparse.Namespace) -> float:
    """Return the megabytes that a rank sends in a forward and a backward, as a plan has them."""
    names = "seq_length", "num_attention_heads", "num_query_groups"
    sizes: dict[str, Any] = {name: getattr(own, name) for name in names}
    model = ModelConfig(num_layers=1, hidden_size=64, kv_channels=own.kv_channels, vocab_size=8, **sizes)
    layer = layer_configs(resolve_model(model, 1))[0]
    shape = RankShape(1, own.seq_length // own.cp, "fp32", cp=own.cp)
    messages = trace_layers((TracedLayer(layer, False, kind),), shape, has_levels=False).messages
    return sum(sent_bytes(each, shape) for each in messages) / 1e6


def main(words: Sequence[str]) -> int:
    own = arguments(words)
    ranks = Ranks("context parallelism", own.cp, rank_main, own)
    found = ranks.answers(TIMEOUT_SECONDS)
    ranks.close(None)
    print(f"{machine_text()}, {own.cp} ranks of one thread, gloo; {own.repeats} repeats in turn")
    print(f"sequence {own.seq_length}, {own.num_attention_heads} heads, {own.num_query_groups} key/value heads, fp32")
    print(f"{'kind':<12}{'median':>10}{'fastest':>10}{'sent':>12}")
    for kind in KINDS:
        slowest_rank = [max(times) for times in zip(*(each[kind] for each in found), strict=True)]
        median, fastest = 1e3 * statistics.median(slowest_rank), 1e3 * min(slowest_rank)
        print(f"{kind:<12}{median:>7.0f} ms{fastest:>7.0f} ms{sent_megabytes(kind, own):>9.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

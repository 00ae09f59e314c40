"""Rules on the cut of sequences over cp ranks and into slices: lengths, kinds of communication, heads, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.layers import LayerConfig, of_each_kind
from megapipe.config.problems import divisors, nearest_values, use_multiples
from megapipe.formatting import one_of

CP = "--context-parallel-size"
KIND = "--cp-comm-type"
SIZES = "--hierarchical-context-parallel-sizes"
SPLITS = "--pipe-sp-splits"
FP8_MULTIPLE = 16  # the matrix units of Hopper need every size of an fp8 GEMM to be a multiple of this


def length(config: Config) -> Iterator[str]:
    """Check that the sequence can be cut into two chunks for each cp rank, and their tokens over tp."""
    parallel, seq = config.parallel, config.model.seq_length
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if cp == 1:
        return
    unit, rule = 2 * cp, f"2 x {CP} {cp}: each rank holds an early chunk and a late one"
    if parallel.sequence_parallel and tp > 1:
        unit = math.lcm(unit, cp * tp)
        rule += f", with --sequence-parallel a multiple of {CP} x --tensor-model-parallel-size {tp}"
    if seq % unit:
        yield f"--seq-length {seq} is not a multiple of {rule}; {use_multiples(unit, seq)}"


def kinds(config: Config) -> Iterator[str]:
    """Check the number of kinds and the levels of a2a+p2p."""
    parallel, layers = config.parallel, config.model.num_layers
    types, sizes, cp = (
        parallel.cp_comm_type,
        parallel.hierarchical_context_parallel_sizes,
        parallel.context_parallel_size,
    )
    if len(types) not in (1, layers):
        yield f"{KIND} names {len(types)} kinds; name one, or one for each of {layers} layers"
    if "a2a+p2p" in types and cp > 1 and sizes is None:
        yield f"{KIND} a2a+p2p needs {SIZES} A R, ranks that exchange heads and groups in the ring, A x R = {cp}"
    if sizes is not None and "a2a+p2p" not in types:
        yield f"{SIZES} belongs to {KIND} a2a+p2p; leave one of the two out"
    elif sizes is not None and (len(sizes) != 2 or math.prod(sizes) != cp):
        ways = one_of([f"{size} {cp // size}" for size in nearest_values(divisors(cp), sizes[0] if sizes else 1)])
        yield f"{SIZES} {' '.join(map(str, sizes))}: two numbers whose product is {CP} {cp}; use {ways}"


def heads_exchanged(config: Config) -> int:
    """Return the most ranks among which a layer exchanges heads for positions; 1 if none does."""
    parallel = config.parallel
    inner = (parallel.hierarchical_context_parallel_sizes or (1,))[0]
    ranks = {"a2a": parallel.context_parallel_size, "a2a+p2p": inner}
    return max(ranks.get(kind, 1) for kind in parallel.cp_comm_type or ("p2p",))


@of_each_kind
def heads(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Check that the heads of a tp rank can be divided over the ranks that exchange them, with whole key/value heads or
    a copy of one on each.
    """
    parallel, ranks = config.parallel, heads_exchanged(config)
    tp = parallel.tensor_model_parallel_size
    if layer.num_attention_heads < tp:  # refused by a rule on its own
        return
    held, queries = max(1, layer.num_query_groups // tp), layer.num_attention_heads // tp
    fitting = [count for count in divisors(queries) if held % count == 0 or count % held == 0]
    if layer.has_attention and ranks > 1 and ranks not in fitting:
        ways = one_of(nearest_values(fitting, ranks))
        flag = f"{KIND} a2a" if "a2a" in parallel.cp_comm_type else f"{SIZES} {ranks}"
        rule = f"with --tensor-model-parallel-size {tp} a rank has {queries} heads, and {held} key/value heads"
        yield f"{flag} divides heads over {ranks} ranks, but {rule}: use {ways}, or {KIND} p2p or all_gather"


def slice_unit(config: Config) -> int:
    """Return the number of tokens of which the length of every slice is a multiple: with sequence parallelism of tp,
    with fp8 of what its GEMMs need, both on each cp rank, which has two chunks of it.
    """
    parallel, batch = config.parallel, config.training.micro_batch_size
    cp, unit = parallel.context_parallel_size, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if config.precision.fp8_format is not None:
        unit = math.lcm(unit, FP8_MULTIPLE // math.gcd(FP8_MULTIPLE, batch))
    return unit if cp == 1 else math.lcm(2 * cp, cp * unit)


def slices(config: Config) -> Iterator[str]:
    """Check that every slice can have the least number of tokens."""
    seq, count, unit = config.model.seq_length, config.parallel.pipe_sp_splits, slice_unit(config)
    most = seq // unit
    if count > 1 and count > most >= 1:
        rule = f" of a multiple of {unit} tokens" if unit > 1 else ""
        yield f"{SPLITS} {count}: --seq-length {seq} has at most {most} slices{rule}; use {most} or fewer"


def dropout(config: Config) -> Iterator[str]:
    """Refuse dropout, whose masks are drawn for whole sequences."""
    parallel, model = config.parallel, config.model
    if parallel.pipe_sp_splits > 1 and (model.hidden_dropout or model.attention_dropout):
        given = f"--hidden-dropout {model.hidden_dropout:g} and --attention-dropout {model.attention_dropout:g}"
        rule = "masks would depend on the number of slices"
        yield f"{SPLITS} {parallel.pipe_sp_splits} with {given}: {rule}; use 0 for both"


RULES = (length, kinds, heads)
SLICE_RULES = (slices, dropout)

"""Pairs of options that exclude each other: pairs.csv, the one table of refusals from which docs/composition.md is
written, and the words of each option.

A row is of one of two kinds. A contradiction is refused for good: the two options together mean nothing, or compute
another function. What is NOT_BUILT works alone, but not together yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.config.config import Config, fields_by_key, given, value_of
from megapipe.config.fields import shown
from megapipe.config.layers import kinds_of
from megapipe.config.model import ATTENTIONS, NORMALIZATIONS
from megapipe.config.parallel import SHARDED_GRADS, SHARDED_PARAMS, strategy_of
from megapipe.config.problems import UnreadError
from megapipe.formatting import one_of
from megapipe.input_files import read_table

CONTRADICTION, NOT_BUILT = "contradiction", "not built"
EITHER = "leave one of the two out"
BY_HAND = tuple(
    f"recompute.recompute_{name}" for name in ("granularity", "method", "num_layers", "keep_attention", "modules")
)

# An option's words on the command line; False where a configuration does not choose it.
Option = Callable[[Config], str | bool]


@dataclass(frozen=True)
class Refusal:
    """A row: an option with each of some others. way: what to do instead."""

    option: str
    others: tuple[str, ...]
    kind: str
    reason: str
    way: str = EITHER

    def message(self, words: str, others: Sequence[str]) -> str:
        """Return the refusal of these words with one or more others."""
        yet = " yet" if self.kind == NOT_BUILT else ""
        return f"{words} does not work with {one_of(others)}{yet}: {self.reason}; {self.way}"


def words_of(config: Config, name: str, options: Mapping[str, Option] | None = None) -> str:
    """Return the words of an option; '' if it is not chosen, or if what it depends on could not be read."""
    with suppress(UnreadError):
        return str((options or OPTIONS)[name](config) or "")
    return ""


def refusals(config: Config, rows: Sequence[Refusal], options: Mapping[str, Option]) -> Iterator[str]:
    """Yield a message for each row that a configuration falls under."""
    for row in rows:
        words = words_of(config, row.option, options)
        others = [other for name in row.others if words and (other := words_of(config, name, options))]
        if others:
            yield row.message(words, others)


def _blocks_of_cp(config: Config) -> str | bool:
    """Name the kinds of context parallelism that compute attention in blocks of queries and keys."""
    kinds = [kind for kind in dict.fromkeys(config.parallel.cp_comm_type) if kind != "a2a"]
    return config.parallel.context_parallel_size > 1 and bool(kinds) and f"--cp-comm-type {one_of(kinds)}"


def _fp8_of_own_parts(config: Config) -> str | bool:
    """Name what is multiplied in 8 bits and has no module of Transformer Engine."""
    parts = [words_of(config, name) for name in ("experts", "latent attention", "multi-token prediction")]
    chosen = [words for words in parts if words]
    return config.precision.fp8_format is not None and bool(chosen) and f"--fp8-format and {' and '.join(chosen)}"


def _selects(module: str) -> Option:
    def words(config: Config) -> str | bool:
        asked = config.recompute
        is_asked = asked.recompute_granularity == "selective" and module in asked.recompute_modules
        return is_asked and f"--recompute-modules {module}"

    return words


def _strategy(*names: str) -> Option:
    """Name the strategy of sharding if it is one of these."""

    def words(config: Config) -> str | bool:
        found = strategy_of(config.parallel)
        return found in names and f"--data-parallel-sharding-strategy {found}"

    return words


def _field(key: str, *values: Any) -> Option:
    """Name a field that has one of these values, or by default another value than its default."""

    def words(config: Config) -> str | bool:
        field = fields_by_key()[key]
        value = value_of(config, field)
        return (value in values if values else value != field.default) and shown(field, value)

    return words


OPTIONS: dict[str, Option] = {
    "slices": _field("parallel.pipe_sp_splits"),
    "context parallelism": _field("parallel.context_parallel_size"),
    "blocks of context parallelism": _blocks_of_cp,
    "sharded gradients": _strategy(*SHARDED_GRADS),
    "sharded gradients alone": _strategy(SHARDED_GRADS[0]),
    "sharded weights": _strategy(SHARDED_PARAMS),
    "experts": _field("model.num_experts"),
    "capacity of experts": _field("model.moe_expert_capacity_factor"),
    "sinkhorn": _field("model.moe_router_load_balancing_type", ("sinkhorn",)),
    "overlapped all-to-alls": lambda c: (
        c.model.num_experts is not None
        and c.parallel.overlap_moe_expert_parallel_comm
        and "--overlap-moe-expert-parallel-comm"
    ),
    "latent attention": _field("model.multi_latent_attention"),
    "multi-token prediction": _field("model.mtp_num_layers"),
    "sinks": _field("model.softmax_type"),
    "chunked attention": lambda c: (
        any(layer.limits["has_chunks"] for layer in kinds_of(c.model)) and "--attention-kind chunked"
    ),
    "attention of an extension": lambda c: next(
        (
            f"--attention-kind {layer.attention_kind}"
            for layer in kinds_of(c.model)
            if layer.has_attention and ATTENTIONS[layer.attention_kind].function is not None
        ),
        False,
    ),
    "norms without weights": _field("model.qk_l2_norm"),
    "norms of q and k": _field("model.qk_layernorm"),
    "gated attention": _field("model.attention_output_gate"),
    "biases of q, k and v": _field("model.add_qkv_bias"),
    "norm of the projection": _field("model.qk_layernorm_scope"),
    "norm of an extension": lambda c: (
        NORMALIZATIONS[c.model.normalization].function is not None and f"--normalization {c.model.normalization}"
    ),
    "attention of Transformer Engine": _field("kernels.attention_impl", "te"),
    "flash with documents": lambda c: (
        c.kernels.attention_impl == "flash"
        and c.data.reset_attention_mask
        and "--attention-impl flash with --reset-attention-mask"
    ),
    "CUDA graphs": _field("gpu.cuda_graph_impl", "local"),
    "compiled pointwise": _field("kernels.compile_pointwise"),
    "activation offload": _field("offload.cpu_offloading_num_layers"),
    "another optimizer than Adam": _field("optimizer.optimizer"),
    "narrow moments": _field("optimizer.use_precision_aware_optimizer"),
    "frozen parameters": _field("optimizer.freeze"),
    "fp8 of parts without its modules": _fp8_of_own_parts,
    "fp64": _field("precision.dtype", "fp64"),
    "delayed scales": lambda c: (
        c.precision.fp8_format is not None and c.precision.fp8_recipe == "delayed" and "--fp8-recipe delayed"
    ),
    "recompute by hand": lambda c: " and ".join(given(c, *BY_HAND)) or False,
    "full recompute": _field("recompute.recompute_granularity", "full"),
    "memory budget": _field("recompute.recompute_memory_budget"),
    "replays in bubbles": _field("recompute.recompute_in_bubbles"),
    "recompute of experts": _selects("moe"),
    "recompute of activations": _selects("activation"),
    "recompute of MLPs": _selects("mlp"),
    "recompute of norms": _selects("layernorm"),
    "overlapped tp": _field("parallel.tp_comm_overlap", True),
    "memory by rank": _field("parallel.pipeline_rank_memory"),
    "measured layers": _field("parallel.pipeline_layer_times"),
    "pipeline profile": _field("logging.profile_pipeline"),
}


REFUSED = tuple(
    Refusal(option, tuple(others.split("|")), kind, reason, way or EITHER)
    for option, others, kind, reason, way in read_table(Path(__file__).with_name("pairs.csv"))
)


def combinations(config: Config) -> Iterator[str]:
    """Yield what is chosen together and excludes each other."""
    yield from refusals(config, REFUSED, OPTIONS)


RULES = (combinations,)

"""Pairs of options that exclude each other: pairs.csv, the one table of refusals from which docs/composition.md is
written, and the words of each option.

A row is of one of two kinds. A contradiction is refused for good: the two options together mean nothing, or compute
another function. What is NOT_BUILT works alone, but not together yet.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megapipe.config.config import Config, given
from megapipe.config.layers import kinds_of
from megapipe.config.model import ATTENTIONS, NORMALIZATIONS
from megapipe.config.parallel import SHARDED_GRADS, SHARDED_PARAMS, strategy_of
from megapipe.config.problems import UnreadError
from megapipe.formatting import one_of

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


def _strategy(name: str) -> Option:
    return lambda config: strategy_of(config.parallel) == name and f"--data-parallel-sharding-strategy {name}"


OPTIONS: dict[str, Option] = {
    "slices": lambda c: c.parallel.pipe_sp_splits > 1 and f"--pipe-sp-splits {c.parallel.pipe_sp_splits}",
    "context parallelism": lambda c: (
        c.parallel.context_parallel_size > 1 and f"--context-parallel-size {c.parallel.context_parallel_size}"
    ),
    "blocks of context parallelism": _blocks_of_cp,
    "sharded gradients": lambda c: (
        strategy_of(c.parallel) in SHARDED_GRADS and f"--data-parallel-sharding-strategy {strategy_of(c.parallel)}"
    ),
    "sharded gradients alone": _strategy(SHARDED_GRADS[0]),
    "sharded weights": _strategy(SHARDED_PARAMS),
    "experts": lambda c: c.model.num_experts is not None and "--num-experts",
    "capacity of experts": lambda c: (
        c.model.moe_expert_capacity_factor is not None
        and f"--moe-expert-capacity-factor {c.model.moe_expert_capacity_factor:g}"
    ),
    "sinkhorn": lambda c: c.model.has_sinkhorn and "--moe-router-load-balancing-type sinkhorn",
    "overlapped all-to-alls": lambda c: (
        c.model.num_experts is not None
        and c.parallel.overlap_moe_expert_parallel_comm
        and "--overlap-moe-expert-parallel-comm"
    ),
    "latent attention": lambda c: c.model.multi_latent_attention and "--multi-latent-attention",
    "multi-token prediction": lambda c: (
        c.model.mtp_num_layers is not None and f"--mtp-num-layers {c.model.mtp_num_layers}"
    ),
    "sinks": lambda c: c.model.softmax_type != "vanilla" and f"--softmax-type {c.model.softmax_type}",
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
    "norms without weights": lambda c: c.model.qk_l2_norm and "--qk-l2-norm",
    "norms of q and k": lambda c: c.model.qk_layernorm and "--qk-layernorm",
    "gated attention": lambda c: c.model.attention_output_gate and "--attention-output-gate",
    "biases of q, k and v": lambda c: c.model.add_qkv_bias and "--add-qkv-bias",
    "norm of the projection": lambda c: (
        c.model.qk_layernorm_scope != "head" and f"--qk-layernorm-scope {c.model.qk_layernorm_scope}"
    ),
    "norm of an extension": lambda c: (
        NORMALIZATIONS[c.model.normalization].function is not None and f"--normalization {c.model.normalization}"
    ),
    "attention of Transformer Engine": lambda c: c.kernels.attention_impl == "te" and "--attention-impl te",
    "flash with documents": lambda c: (
        c.kernels.attention_impl == "flash"
        and c.data.reset_attention_mask
        and "--attention-impl flash with --reset-attention-mask"
    ),
    "CUDA graphs": lambda c: c.gpu.cuda_graph_impl == "local" and "--cuda-graph-impl local",
    "compiled pointwise": lambda c: c.kernels.compile_pointwise and "--compile-pointwise",
    "activation offload": lambda c: (
        c.offload.cpu_offloading_num_layers > 0 and f"--cpu-offloading-num-layers {c.offload.cpu_offloading_num_layers}"
    ),
    "another optimizer than Adam": lambda c: c.optimizer.optimizer != "adam" and f"--optimizer {c.optimizer.optimizer}",
    "narrow moments": lambda c: c.optimizer.use_precision_aware_optimizer and "--use-precision-aware-optimizer",
    "frozen parameters": lambda c: bool(c.optimizer.freeze) and f"--freeze {' '.join(c.optimizer.freeze)}",
    "fp8 of parts without its modules": _fp8_of_own_parts,
    "fp64": lambda c: c.precision.dtype == "fp64" and "--dtype fp64",
    "delayed scales": lambda c: (
        c.precision.fp8_format is not None and c.precision.fp8_recipe == "delayed" and "--fp8-recipe delayed"
    ),
    "recompute by hand": lambda c: " and ".join(given(c, *BY_HAND)) or False,
    "full recompute": lambda c: c.recompute.recompute_granularity == "full" and "--recompute-granularity full",
    "memory budget": lambda c: (
        c.recompute.recompute_memory_budget is not None
        and f"--recompute-memory-budget {c.recompute.recompute_memory_budget:g}"
    ),
    "recompute of experts": _selects("moe"),
    "recompute of activations": _selects("activation"),
    "recompute of MLPs": _selects("mlp"),
    "recompute of norms": _selects("layernorm"),
    "overlapped tp": lambda c: bool(c.parallel.tp_comm_overlap) and "--tp-comm-overlap",
    "memory by rank": lambda c: c.parallel.pipeline_rank_memory is not None and "--pipeline-rank-memory",
    "measured layers": lambda c: c.parallel.pipeline_layer_times is not None and "--pipeline-layer-times",
    "pipeline profile": lambda c: c.logging.profile_pipeline and "--profile-pipeline",
}


def _refused() -> Iterator[Refusal]:
    """Yield the rows of the table; without a way, one of the two options is left out."""
    with Path(__file__).with_name("pairs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Refusal(
                row["option"], tuple(row["others"].split("|")), row["kind"], row["reason"], row["way"] or EITHER
            )


REFUSED = tuple(_refused())


def combinations(config: Config) -> Iterator[str]:
    """Yield what is chosen together and excludes each other."""
    yield from refusals(config, REFUSED, OPTIONS)


RULES = (combinations,)

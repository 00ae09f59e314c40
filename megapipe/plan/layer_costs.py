"""Costs of embedding, layers, head and stages for one microbatch on one rank: FLOPs, relative costs from them, or
seconds measured by `megapipe profile-layers`, whose file --pipeline-layer-times reads. From FLOPs follows the cut of
sequences into slices (--pipe-sp-splits), and the share that each slice has in the work of a stage.

A multiply and an add count as two FLOPs, a backward as twice its forward. Attention is counted in full (every query
with every key) or causal (half of it): the conventions are named wherever a figure is printed. For the GPT-2 shape,
full, a step equals 72 B s l h^2 (1 + s/(6h) + V/(12 l h)) of Narayanan et al. 2021 (arXiv:2104.04473, section 5.1).
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.layers.model import LayerSpec, ModelSpec, comm_chunks, model_spec
from megapipe.layers.table import RankShape
from megapipe.plan.attention_rates import FUSED_BACKWARD
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.partition import Partition, StageLayers
from megapipe.sharding.sequence import SequenceSlice
from megapipe.trace.parameters import layer_parameters

FORMAT = "megapipe layer times"
VERSION = 1
FLAG = "--pipeline-layer-times"
GEMM_PASSES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0, Op.RECOMPUTE: 0.0}  # of a forward's FLOPs, without replays
ATTENTION_PASSES = {Op.F: 1.0, Op.B: FUSED_BACKWARD, Op.I: FUSED_BACKWARD, Op.W: 0.0, Op.RECOMPUTE: 0.0}
LINEARS_OF = {  # that recomputing a module runs again; of `moe` all
    "mla_up_proj": tuple(f"self_attention.linear_{name}" for name in ("q_proj", "q_up_proj", "kv_up_proj")),
    "mlp": ("mlp.linear_fc1",),
    "shared_experts": ("mlp.shared_experts.linear_fc1",),
}
# model options that change neither the shapes nor the work of a layer, the embedding or the head
WITHOUT_EFFECT = (
    "num_layers",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "init_method_std",
    "untie_embeddings_and_output_weights",
)


@cache
def linear_weights(layer: LayerSpec) -> dict[str, int]:
    """Return the weights of a layer's linears that a token goes through, by name: of experts those of k of them."""
    found, config = {}, layer.config
    for spec in layer_parameters(config):
        if spec.matrix or spec.name == "mlp.router.weight":
            found[spec.name] = math.prod(spec.shape)
            if layer.num_experts and spec.name.startswith("mlp.experts."):
                found[spec.name] = found[spec.name] * config.moe_router_topk // layer.num_experts
    return found


def gemm_flops(layer: LayerSpec) -> float:
    """Return the forward FLOPs of a layer's linears, per token."""
    return 2.0 * sum(linear_weights(layer).values())


def layer_flops(layer: LayerSpec, seq_length: int, causal: bool) -> float:
    """Return the forward FLOPs of one layer, per token."""
    return gemm_flops(layer) + layer.attention_flops(seq_length, causal)


def head_flops(model: ModelSpec) -> float:
    """Return the forward FLOPs of the output layer, per token, vocabulary padding included; for each module of
    multi-token prediction again, with those of its projection.
    """
    hidden, vocabulary = model.config.hidden_size, model.config.padded_vocab_size
    return 2.0 * hidden * vocabulary * (1 + len(model.predictions)) + 4.0 * hidden**2 * len(model.predictions)


def step_flops(model: ResolvedModelConfig, sequences: int, causal: bool) -> float:
    """Return the FLOPs of forward and backward of one step over `sequences` sequences, without recomputation (MFU)."""
    spec = model_spec(model, PrecisionConfig())
    counts = Counter((*spec.layers, *spec.predictions))
    layers = sum(count * layer_flops(layer, model.seq_length, causal) for layer, count in counts.items())
    return 3.0 * (layers + head_flops(spec)) * sequences * model.seq_length


def replayed_flops(layer: LayerSpec, recompute: RecomputeConfig, seq_length: int, causal: bool) -> float:
    """Return what a backward repeats of a layer, per token.

    Full recompute: its forward, but for attention if that is kept. Selective: core attention, the projections up from
    latents, the first linear of the MLP or of the shared experts, the router with all experts.
    """
    if recompute.recompute_granularity == "full":
        keeps = recompute.recompute_keep_attention and layer.config.has_attention
        return gemm_flops(layer) if keeps else layer_flops(layer, seq_length, causal)
    if recompute.recompute_granularity is None:
        return 0.0
    modules = recompute.recompute_modules
    again = {name for module in modules for name in LINEARS_OF.get(module, ())}
    repeats_experts = layer.num_experts > 0 and "moe" in modules
    products = sum(
        count
        for name, count in linear_weights(layer).items()
        if name.removesuffix(".weight") in again or (repeats_experts and name.startswith("mlp."))
    )
    return 2.0 * products + (layer.attention_flops(seq_length, causal) if "core_attn" in modules else 0.0)


def recomputed_flops(
    model: ResolvedModelConfig, recompute: Iterable[RecomputeConfig], sequences: int, causal: bool
) -> float:
    """Return what a step computes again, for hardware FLOPs (HFU).

    recompute: of each layer, those of multi-token prediction included.
    """
    spec = model_spec(model, PrecisionConfig())
    layers = (*spec.layers, *spec.predictions)
    counts = Counter(zip(layers, recompute, strict=True)).items()
    total = sum(count * replayed_flops(*layer, model.seq_length, causal) for layer, count in counts)
    return total * sequences * model.seq_length


@dataclass(frozen=True)
class PartCost:
    """The cost of one part in F, B, I and W."""

    forward: float = 0.0
    backward: float = 0.0  # the whole, of which inputs and weights are the halves
    inputs: float = 0.0
    weights: float = 0.0
    replay: float = 0.0  # the forward that B or I repeats under full recompute

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: int) -> PartCost:
        return PartCost(*(cost * count for cost in vars(self).values()))

    def of(self, op: Op) -> float:
        """Return the cost of one op, replays included."""
        return {
            Op.F: self.forward,
            Op.B: self.backward + self.replay,
            Op.I: self.inputs + self.replay,
            Op.W: self.weights,
        }[op]

    def step(self, splits_backward: bool) -> float:
        """Return the cost of all ops of one microbatch."""
        return self.of(Op.F) + (self.of(Op.I) + self.of(Op.W) if splits_backward else self.of(Op.B))


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the parts of a model."""

    embedding: PartCost
    layers: tuple[PartCost, ...]  # one entry for each
    head: PartCost  # with multi-token prediction
    recompute: RecomputeConfig  # decides which layers are replayed
    # the layers and the shape by which --recompute-memory-budget chooses, or layers with their own recompute
    specs: tuple[LayerSpec, ...] = ()
    shape: RankShape | None = None

    @cached_property
    def layers_alike(self) -> bool:
        return len(set(self.layers)) < 2

    def of_stage(self, stage: StageLayers) -> PartCost:
        """Return the cost of a stage."""
        first, end, num_replayed = stage.first_layer, stage.last_layer_exclusive, 0
        if self.recompute.recompute_granularity == "full":
            is_block = self.recompute.recompute_method == "block"
            most = (self.recompute.recompute_num_layers or 1) if is_block else stage.num_layers
            num_replayed = min(most, stage.num_layers)
        if not stage.num_layers:
            total = PartCost()
        elif self.shape is not None:
            specs, seq = self.specs[first:end], self.shape.whole_seq
            total = sum(self.layers[first:end], PartCost())
            again = (
                cost.forward * replayed_flops(spec, recompute, seq, False) / layer_flops(spec, seq, False)
                for cost, spec, recompute in zip(
                    self.layers[first:end], specs, layer_recompute(specs, self.shape), strict=True
                )
            )
            total = replace(total, replay=sum(again))
        elif self.layers_alike:
            total = replace(self.layers[0] * stage.num_layers, replay=self.layers[0].replay * num_replayed)
        else:
            with_replays, without = self._sums
            replayed = first + num_replayed
            total = with_replays[replayed] + with_replays[first] * -1 + without[end] + without[replayed] * -1
        if stage.has_embedding:
            total += self.embedding
        return total + self.head if stage.has_head else total

    def checkpoints(self, stage: StageLayers) -> float:
        """Return the cost of running the checkpointed layers of a stage again."""
        return self.of_stage(stage._replace(has_embedding=False, has_head=False)).replay

    @cached_property
    def _sums(self) -> tuple[list[PartCost], list[PartCost]]:
        """Costs of the first n layers together, with replays and without."""
        plain = [replace(layer, replay=0.0) for layer in self.layers]
        return list(accumulate(self.layers, initial=PartCost())), list(accumulate(plain, initial=PartCost()))


def flop_costs(model: ModelSpec, seq_length: int, recompute: RecomputeConfig) -> LayerCosts:
    """Return relative costs: FLOPs with full attention, a backward twice a forward, half of it W, no embedding."""

    def part(flops: float, replay: float = 0.0) -> PartCost:
        return PartCost(flops, 2.0 * flops, flops, flops, replay)

    is_full = recompute.recompute_granularity == "full"
    of_kind = {
        kind: part(
            layer_flops(kind, seq_length, causal=False),
            replayed_flops(kind, recompute, seq_length, causal=False) if is_full else 0.0,
        )
        for kind in model.kinds
    }
    head, again = part(head_flops(model)), recompute.of_predictions
    for layer in model.predictions:
        replay = replayed_flops(layer, again, seq_length, causal=False) if is_full else 0.0
        head += part(layer_flops(layer, seq_length, causal=False), replay)
    return LayerCosts(PartCost(), tuple(of_kind[layer] for layer in model.layers), head, recompute)


def stage_costs(layers: LayerCosts, partition: Partition, rank_speeds: tuple[float, ...]) -> Costs:
    """Return the seconds of every op of every stage, relative where they come from FLOPs; messages take no time."""
    stages = [layers.of_stage(stage) for stage in partition.stages]
    replays = {(index, Op.RECOMPUTE): layers.checkpoints(stage) for index, stage in enumerate(partition.stages)}
    smallest = max(stage.forward for stage in stages) * 1e-6  # a stage without layers still takes some time
    seconds = {
        (index, op): max(stage.of(op), smallest)
        for index, stage in enumerate(stages)
        for op in (Op.F, Op.B, Op.I, Op.W)
    }
    return Costs(seconds | replays, rank_speeds=rank_speeds)


# Slices. With a causal mask a slice of positions [a, b) costs C(b) - C(a), where C(x) is the cost of a sequence of x
# tokens. FLOPs of linears grow with the tokens, a backward has twice a forward's; those of fused attention grow with
# the visible keys, a backward has 2.5 times a forward's. So slices of equal forward costs would differ in their
# backward costs; the cut is made for the sum of both.


def sequence_slices(
    model: ModelSpec, recompute: RecomputeConfig, seq: int, count: int, strategy: str, unit: int
) -> tuple[SequenceSlice, ...]:
    """Return `count` slices of a sequence, each a multiple of `unit` tokens, which divides seq and count x unit <= seq.

    strategy: as in --pipe-sp-strategy.
    """
    num_units, layers = seq // unit, (*model.layers, *model.predictions)

    @cache
    def cost(units: int) -> float:
        tokens = units * unit
        if strategy == "average":
            return float(tokens)
        return sum(flops_of_length(layers, model, recompute, op)(tokens) for op in (Op.F, Op.B))

    ends = [0]
    for number in range(1, count):
        wanted, low, high = cost(num_units) * number / count, ends[-1] + 1, num_units - (count - number)
        while low < high:  # the first end at which the slices so far have their share
            middle = (low + high) // 2
            low, high = (middle + 1, high) if cost(middle) < wanted else (low, middle)
        is_nearer = low - 1 > ends[-1] and wanted - cost(low - 1) < cost(low) - wanted
        ends.append(low - is_nearer)
    places = tuple(units * unit for units in (*ends[1:], num_units))
    return tuple(SequenceSlice(places, number) for number in range(count))


def slice_shares(
    model: ModelSpec, partition: Partition, recompute: RecomputeConfig, slices: Iterable[SequenceSlice]
) -> dict[tuple[int, Op], tuple[float, ...]]:
    """Return the share of each slice in the F, B, I and W of every stage, by FLOPs; a message's is that of tokens."""
    slices, found = tuple(slices), dict[tuple[int, Op], tuple[float, ...]]()
    by_tokens = tuple(each.length / each.seq for each in slices)
    for stage, (first, end, _, has_head) in enumerate(partition.stages):
        for op in (Op.F, Op.B, Op.I, Op.W, Op.RECOMPUTE):
            with_head = has_head and op is not Op.RECOMPUTE
            layers = (*model.layers[first:end], *(model.predictions if with_head else ()))
            cost = flops_of_length(layers, model if with_head else None, recompute, op)
            costs = [cost(each.stop) - cost(each.start) for each in slices]
            total = sum(costs)
            found[stage, op] = tuple(one / total for one in costs) if total else by_tokens
        found[stage, Op.SEND_F] = found[stage, Op.SEND_B] = by_tokens
    return found


def flops_of_length(
    layers: Iterable[LayerSpec], head: ModelSpec | None, recompute: RecomputeConfig, op: Op
) -> Callable[[int], float]:
    """Return the FLOPs of an op of layers, and of a model's head, as a function of the length of a sequence."""
    counts, replays = Counter(layers), op in (Op.B, Op.I, Op.RECOMPUTE)

    def cost(tokens: int) -> float:
        total = 0.0 if head is None else GEMM_PASSES[op] * head_flops(head)
        for layer, count in counts.items():
            attention = layer.attention_flops(tokens, causal=True)
            of_layer = GEMM_PASSES[op] * gemm_flops(layer) + ATTENTION_PASSES[op] * attention
            if replays:
                of_layer += replayed_flops(layer, recompute, tokens, causal=True)
            total += count * of_layer
        return tokens * total

    return cost


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds on one rank for one microbatch: the file that `megapipe profile-layers` writes."""

    setting: Mapping[str, Any]  # the options they were measured with
    embedding: PartCost
    layers: tuple[PartCost, ...]  # one entry if all layers are alike, else one for each
    head: PartCost
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # device, versions, date, command: for people


def setting_of(config: Config) -> dict[str, Any]:
    """Return the options that layer times depend on. config: resolved."""
    model, parallel, recompute = config.model, config.parallel, config.recompute
    tp, granularity = parallel.tensor_model_parallel_size, recompute.recompute_granularity
    setting = {name: value for name, value in dataclasses.asdict(model).items() if name not in WITHOUT_EFFECT}
    return setting | {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": parallel.sequence_parallel and tp > 1,
        "comm_chunks": dataclasses.astuple(comm_chunks(parallel)),
        "micro_batch_size": config.training.micro_batch_size,
        "dtype": config.precision.dtype,
        "recompute_granularity": granularity,
        "recompute_keep_attention": recompute.recompute_keep_attention,
        "recompute_modules": list(recompute.recompute_modules) if granularity == "selective" else [],
    }


def measured_costs(path: Path, config: Config) -> LayerCosts:
    """Return the costs of a resolved run's layers from a file. Raises ConfigError if its options were others."""
    times = read_layer_times(path)
    defaults = dataclasses.asdict(ModelConfig())  # of options that are newer than the file
    wanted, known = json.loads(json.dumps([setting_of(config), defaults]))  # as JSON has it: lists for tuples
    known |= times.setting
    other = [
        f"{name} {known.get(name)!r}, the run has {value!r}"
        for name, value in wanted.items()
        if known.get(name) != value
    ]
    if other:
        more = f" (and {len(other) - 4} more)" if len(other) > 4 else ""
        raise ConfigError(
            f"{FLAG} {path} was measured for {'; '.join(other[:4])}{more}: measure again with the run's flags "
            "(megapipe profile-layers), or leave it out to balance by FLOPs"
        )
    num_layers = config.model.num_layers
    layers = times.layers * num_layers if len(times.layers) == 1 else times.layers
    if len(layers) != num_layers:
        raise ConfigError(
            f"{FLAG} {path} has the times of {len(layers)} layers, --num-layers is {num_layers}; give one entry "
            "without a count, for layers that are all alike, or counts that add up"
        )
    return LayerCosts(times.embedding, layers, times.head, config.recompute)


def to_json(times: LayerTimes) -> str:
    """Return the text of the file."""
    seconds = dataclasses.asdict(times)
    about = {name: seconds.pop(name) for name in ("measured", "setting")}
    runs = [(layer, len(list(run))) for layer, run in groupby(seconds["layers"])]
    if len(times.layers) > 1:  # an entry without a count stands for any number of layers
        seconds["layers"] = [{"count": count} | layer for layer, count in runs]
    return json.dumps({"format": FORMAT, "version": VERSION, **about, "seconds": seconds}, indent=2)


def read_layer_times(path: Path) -> LayerTimes:
    """Read layer times. Raises ConfigError if the file cannot be read, has another format or holds invalid times."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{FLAG} {path} is not a file of layer times; megapipe profile-layers writes one")
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{FLAG} {path} has version {found.get('version')!r}, this megapipe reads {VERSION}; measure again"
        )
    try:
        seconds, setting, measured = found["seconds"], dict(found["setting"]), dict(found.get("measured", {}))
        layers = tuple(part for entry in seconds["layers"] for part in [_part(entry)] * int(entry.get("count", 1)))
        times = LayerTimes(setting, _part(seconds["embedding"]), layers, _part(seconds["head"]), measured)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{FLAG} {path} lacks or misstates something: {error!r}; docs/planner.md shows such a file"
        ) from None
    if not any(part.forward for part in layers):
        raise ConfigError(f"{FLAG} {path} has no time for a layer's forward")
    return times


def _part(values: Mapping[str, Any]) -> PartCost:
    part = PartCost(**{name: float(value) for name, value in values.items() if name != "count"})
    bad = [name for name, value in dataclasses.asdict(part).items() if not (math.isfinite(value) and value >= 0)]
    if bad:
        raise ValueError(f"{bad[0]} is not a valid time")
    return part

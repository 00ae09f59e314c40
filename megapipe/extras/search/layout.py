"""The layouts that a search compares: every one that the sizes of the model, the batch and the cluster allow.

Not varied:
- overlaps (--overlap-grad-reduce, --overlap-param-gather, --overlap-p2p-communication) are on: they cost no memory, and
  in the model of `step_time` they never slow a step
- gpipe, breadth-first and zb-h2 take as long as 1f1b, interleaved and zb-h1, and use more memory; only with sharded
  weights breadth-first is one
- weights are sharded with the schedules for which that is made: breadth-first, which gathers each chunk twice a step,
  1f1b in units of one layer, which gathers them for every microbatch, and interleaved between the two; with layers
  divided by cost. So are gradients alone
- DualPipe is faster only by the overlap of its pairs: it is tried with overlapped all-to-alls of experts, and if it is
  the configured schedule
- tokens are sent once to a node (the dispatcher flex) where the ranks of ep are on several nodes; results are added
  there only if the configuration does
- cuts by hand
- context parallelism with fewer than LEAST_TOKENS tokens of a sequence on a rank, but the configured one; its kinds are
  p2p, a2a, a2a within nodes with p2p between them, and the configured kinds. all_gather sends what p2p does, not under
  computation
- slices: other numbers than SLICES, or of fewer than LEAST_TOKENS tokens, but the configured number. Microbatches of
  several sequences have only that: smaller ones fill a pipeline as slices do. None with sharded weights; with context
  parallelism only the configured number
- experts: more ranks that share every expert than tp has
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.config.layers import is_explicit, layer_kinds
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import SHARDED_GRADS, SHARDED_PARAMS, ParallelConfig, RecomputeConfig, strategy_of
from megapipe.config.problems import divisors
from megapipe.config.rules import context, experts
from megapipe.config.rules.check import Rule
from megapipe.config.rules.pairs import combinations
from megapipe.formatting import grid_text
from megapipe.plan.hardware import Hardware
from megapipe.plan.recompute_choice import recompute_text
from megapipe.schedule.families import SCHEDULES, default_schedule
from megapipe.schedule.parts import MERGED
from megapipe.schedule.placement import two_directions

MOST_CHUNKS = 8
LEAST_TOKENS = 8192  # of a sequence on a cp rank, as in the last stage of Llama 3's training: 131,072 tokens, cp 16
SLICES = (2, 4)
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
RECOMPUTES = (
    RecomputeConfig(),
    RecomputeConfig("selective", recompute_modules=("core_attn",)),
    RecomputeConfig("selective", recompute_modules=("layernorm", "activation")),
    RecomputeConfig("selective", recompute_modules=("core_attn", "layernorm", "activation")),
    RecomputeConfig("selective", recompute_modules=("moe_act",)),
    RecomputeConfig("selective", recompute_modules=("layernorm", "moe")),
    RecomputeConfig("full", "uniform", 1),
    RecomputeConfig("selective", recompute_modules=("layernorm", "moe_act")),
)
PAIRED = (*sorted(MERGED), "dualpipe", "dualpipe-v")  # with pairs, in which all-to-alls of experts overlap
# by cost; in equal numbers; in equal numbers with embedding and head counted as a layer each
CUTS = ("cost", "even", "ends")

# what two layouts may differ in: the fields of a layout. A table of `spread` names some of them
ASPECTS = {
    "tp": ("tp", "sequence_parallel"),
    "the pipeline": ("pp", "chunks", "schedule", "cut", "slices"),
    "microbatch": ("micro_batch_size",),
    "recompute": ("recompute",),
    "sharding": ("sharding", "units", "distributed_optimizer", "instances"),
    "cp": ("context",),
    "experts": ("ep", "etp", "overlap", "flex"),
}


class Context(NamedTuple):
    """Context parallelism: ranks that share every sequence, --cp-comm-type, --hierarchical-context-parallel-sizes."""

    ranks: int = 1
    kinds: tuple[str, ...] = ("p2p",)
    sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = "" if self.sizes is None else " " + " ".join(map(str, self.sizes))
        if self.ranks == 1:
            return "cp 1"
        return f"cp {self.ranks} ({' '.join(dict.fromkeys(self.kinds))}{sizes})"

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Context:
        """Return that of a configuration."""
        sizes = parallel.hierarchical_context_parallel_sizes
        return cls(parallel.context_parallel_size, parallel.cp_comm_type, sizes)

    def applied_to(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return the section with this context parallelism."""
        ranks, kinds, sizes = self if self.ranks > 1 else NO_CONTEXT
        return dataclasses.replace(
            parallel, context_parallel_size=ranks, cp_comm_type=kinds, hierarchical_context_parallel_sizes=sizes
        )


NO_CONTEXT = Context()


@dataclass(frozen=True)
class Layout:
    """One candidate of a search. cut: one of CUTS. etp: ranks that share every expert; None: tp."""

    tp: int
    pp: int
    chunks: int
    schedule: str
    micro_batch_size: int
    recompute: RecomputeConfig
    sequence_parallel: bool = True  # where there is tp
    distributed_optimizer: bool = True
    cut: str = "cost"
    ep: int = 1
    etp: int | None = None
    context: Context = NO_CONTEXT
    sharding: str = ""  # optim_grads or optim_grads_params, with the distributed optimizer
    units: int = 1  # of each stage, gathered and reduced one by one
    slices: int = 1  # of every sequence
    overlap: bool = False  # all-to-alls of experts under computation, in pairs
    flex: bool = False  # tokens once to a node with several of their experts
    instances: int = 1  # of the distributed optimizer (HSDP)

    def dp(self, world_size: int) -> int:
        """Return the data-parallel size on so many accelerators."""
        return world_size // self.context.ranks // self.tp // self.pp

    def num_microbatches(self, config: Config, world_size: int) -> int:
        """Return the microbatches of each dp rank in a step."""
        batch = config.training.global_batch_size
        assert batch is not None
        return batch // self.dp(world_size) // self.micro_batch_size

    def applied_to(self, config: Config) -> Config:
        """Return the configuration with this layout; its manual cuts and group sizes are dropped."""
        own = config.parallel
        parallel = dataclasses.replace(
            self.context.applied_to(own),
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            num_virtual_stages_per_pipeline_rank=self.chunks if takes_any_chunks(self.schedule) else None,
            num_layers_per_virtual_pipeline_stage=None,
            pipeline_model_parallel_layout=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            account_for_embedding_in_pipeline_split=self.cut == "ends",
            account_for_loss_in_pipeline_split=self.cut == "ends",
            pipeline_balance="cost" if self.cut == "ends" else self.cut,
            pipeline_layer_times=None,  # measured for one layout
            microbatch_group_size_per_virtual_pipeline_stage=None,
            pipeline_schedule=self.schedule,
            pipeline_memory_limit=None,
            sequence_parallel=self.sequence_parallel and self.tp > 1,
            use_distributed_optimizer=self.distributed_optimizer,
            data_parallel_sharding_strategy=self.sharding or None,
            data_parallel_sharding_units=self.units,
            num_distributed_optimizer_instances=self.instances,
            pipe_sp_splits=self.slices,
            overlap_moe_expert_parallel_comm=self.overlap,
            # as configured, if the configuration overlaps
            delay_wgrad_compute=self.overlap and (own.delay_wgrad_compute or not own.overlap_moe_expert_parallel_comm),
            overlap_grad_reduce=True,
            overlap_param_gather=self.distributed_optimizer,
            overlap_p2p_comm=True,
        )
        training, model = dataclasses.replace(config.training, micro_batch_size=self.micro_batch_size), config.model
        model = with_dispatcher(model, self.flex)
        return dataclasses.replace(config, model=model, parallel=parallel, training=training, recompute=self.recompute)

    def __str__(self) -> str:
        return f"{self.grid}, {self.schedule}, microbatch {self.micro_batch_size}, {', '.join(self.options)}"

    @property
    def grid(self) -> str:
        experts = f", etp {self.etp} x ep {self.ep}" if self.etp is not None else ""
        cp = str(self.context).removeprefix("cp ") if self.context.ranks > 1 else 1
        return grid_text(self.tp, self.pp, cp=cp, chunks=self.chunks) + experts

    @property
    def options(self) -> tuple[str, ...]:
        """The recompute setting, and the settings that differ from the default."""
        return (
            recompute_text(self.recompute),
            *(["no sequence parallelism"] if self.tp > 1 and not self.sequence_parallel else []),
            *([] if self.distributed_optimizer else ["no distributed optimizer"]),
            *({"optim_grads": ["gradients sharded"], SHARDED_PARAMS: ["weights sharded"]}.get(self.sharding, [])),
            *([f"{self.units} units a stage"] if self.units > 1 else []),
            *([f"{self.instances} instances"] if self.instances > 1 else []),
            *([f"slices {self.slices}"] if self.slices > 1 else []),
            *(["all-to-alls overlap"] if self.overlap else []),
            *(["flex"] if self.flex else []),
            *({"even": ["layers cut evenly"], "ends": ["cut evenly, both ends counted as layers"]}.get(self.cut, [])),
        )


def difference(a: Layout, b: Layout) -> str:
    """Return what two layouts differ in: one of ASPECTS, or several."""
    found = [
        aspect for aspect, fields in ASPECTS.items() if any(getattr(a, name) != getattr(b, name) for name in fields)
    ]
    return found[0] if len(found) == 1 else "several"


class Variant(NamedTuple):
    """How replicas share the state of their parameters; what they compute does not depend on it. Fields of `Layout`."""

    distributed_optimizer: bool = True
    sharding: str = ""
    instances: int = 1


class Group(NamedTuple):
    """Layouts that differ in the schedule, the cut, the sharing between replicas and the recompute alone."""

    first: Layout  # without recompute, with the first variant
    schedules: Sequence[tuple[str, int, int]]  # name, chunks per rank, units of a stage
    cuts: Sequence[str]
    recomputes: Sequence[RecomputeConfig]
    variants: Sequence[Variant]  # the first keeps the least, but for gathered weights

    @property
    def size(self) -> int:
        return math.prod(map(len, self[1:]))

    def members(self, *variants: Variant) -> Iterator[Layout]:
        """Yield the layouts with these variants; `resolve` may still refuse some of them."""
        first = vars(self.first)
        for variant, (name, chunks, units), cut, recompute in product(
            variants, self.schedules, self.cuts, self.recomputes
        ):
            changes = {"schedule": name, "chunks": chunks, "units": units, "cut": cut, "recompute": recompute}
            yield Layout(**{**first, **changes, **variant._asdict()})


def layouts(config: Config, world_size: int, hardware: Hardware) -> Iterator[Layout]:
    """Yield every layout that the sizes allow."""
    for group in groups(config, world_size, hardware):
        yield from group.members(*group.variants)


def groups(config: Config, world_size: int, hardware: Hardware) -> Iterator[Group]:
    """Yield every layout that the sizes allow, in groups."""
    model, batch = config.model, config.training.global_batch_size
    assert batch is not None
    ranks_per_node, is_alike = hardware.ranks_per_node, len(layer_kinds(model)) == 1
    options = {each: _recomputes(_with_exchanges(config, *each)) for each in _exchanges(config)}
    parallel = dataclasses.replace(config.parallel, data_parallel_sharding_strategy=SHARDED_PARAMS)
    shards_weights = _allows((combinations,), dataclasses.replace(config, parallel=parallel))
    # tp within a node unless --allow-tp-across-nodes is given
    widest = world_size if config.parallel.allow_tp_across_nodes else min(ranks_per_node, world_size)
    for tp in divisors(widest):
        if world_size % tp or model.num_attention_heads % tp:
            continue
        contexts = list(_contexts(config, tp, world_size // tp, ranks_per_node))
        numbers = {(shared, sp): list(_slices(config, tp, shared, sp)) for shared in contexts for sp in (True, False)}
        for shared, pp in product(contexts, divisors(world_size // tp)):
            dp, rest = divmod(world_size // tp // pp, shared.ranks)
            if rest or pp > model.num_layers or batch % dp:
                continue
            sizes = [size for size in MICRO_BATCH_SIZES if batch // dp % size == 0]
            schedules = {overlap: list(_schedules(config, pp, is_alike, overlap)) for overlap in (False, True)}
            cuts = CUTS if pp > 1 else CUTS[:1]
            # experts need sequence parallelism
            is_sliced = (True, False)[: 1 if model.num_experts else 2] if tp > 1 else (False,)
            instances = divisors(dp * shared.ranks)
            for sp, (ep, etp, has_replicas), size, each in product(
                is_sliced, _expert_grids(config, tp, dp * shared.ranks), sizes, options
            ):
                overlap, flex = each
                is_own = flex == (model.moe_token_dispatcher_type == "flex")
                if (overlap and ep == 1) or not (is_own or ep * (etp or 1) > ranks_per_node):
                    continue
                whole = Layout(tp, pp, 1, "1f1b", size, RecomputeConfig(), sp, True, "cost", ep, etp, shared)
                whole = dataclasses.replace(whole, overlap=overlap, flex=flex)
                variants = [Variant(instances=number) for number in instances] if has_replicas else []
                variants.append(Variant(distributed_optimizer=False))
                yield Group(whole, schedules[overlap], cuts, options[each], variants)
                for count in numbers[shared, sp] if pp > 1 and not overlap else ():
                    if size == 1 or count == config.parallel.pipe_sp_splits:
                        taking = [one for one in schedules[overlap] if SCHEDULES[one[0]].takes_slices]
                        unbudgeted = [one for one in options[each] if one.recompute_memory_budget is None]
                        yield Group(dataclasses.replace(whole, slices=count), taking, cuts, unbudgeted, variants)
                if len(instances) > 1 and shards_weights and sp == (tp > 1):
                    whole = dataclasses.replace(whole, sharding=SHARDED_PARAMS)
                    kinds = product(reversed(SHARDED_GRADS), instances)
                    variants = [Variant(True, sharding, number) for sharding, number in kinds]
                    in_units = list(_in_units(schedules[overlap], -(-model.num_layers // pp), overlap))
                    yield Group(whole, in_units, CUTS[:1], options[each], variants)


def _in_units(
    schedules: Iterable[tuple[str, int, int]], most_layers: int, overlap: bool
) -> Iterator[tuple[str, int, int]]:
    """Yield the schedules for which sharded weights are made, with chunks and units. most_layers: of a 1f1b stage."""
    for schedule, chunks, _ in schedules:
        if schedule == "1f1b":
            yield schedule, chunks, most_layers
        elif takes_any_chunks(schedule):
            yield schedule, chunks, 1
            if not overlap:
                yield "breadth-first", chunks, 1


def with_dispatcher(model: ModelConfig, flex: bool) -> ModelConfig:
    """Return the model with the dispatcher flex, or with the configured one, alltoall if that is flex."""
    if model.num_experts is None or flex == (model.moe_token_dispatcher_type == "flex"):
        return model
    if flex:
        return dataclasses.replace(model, moe_token_dispatcher_type="flex")
    without = {"moe_combine_in_node": False, "moe_flex_dispatcher_backend": None}
    return dataclasses.replace(model, moe_token_dispatcher_type="alltoall", **without)  # type: ignore[arg-type]


def _with_exchanges(config: Config, overlap: bool, flex: bool) -> Config:
    parallel = dataclasses.replace(config.parallel, overlap_moe_expert_parallel_comm=overlap)
    return dataclasses.replace(config, model=with_dispatcher(config.model, flex), parallel=parallel)


def _exchanges(config: Config) -> Iterator[tuple[bool, bool]]:
    """Yield the ways of all-to-alls to compare that the rules allow: whether they overlap, and whether tokens are sent
    once to a node.
    """
    if config.model.num_experts is None:
        yield False, config.model.moe_token_dispatcher_type == "flex"
        return
    for overlap, flex in product((False, True), repeat=2):
        changed = _with_exchanges(config, overlap, flex)
        parallel = dataclasses.replace(changed.parallel, expert_model_parallel_size=config.model.num_experts)
        changed = dataclasses.replace(changed, parallel=parallel, recompute=RecomputeConfig())
        if _allows((experts.dispatcher, experts.overlap, combinations), changed):
            yield overlap, flex


def _allows(rules: Iterable[Rule], config: Config) -> bool:
    return not any(True for rule in rules for _ in rule(config))


def _contexts(config: Config, tp: int, ranks: int, ranks_per_node: int) -> Iterator[Context]:
    """Yield the context parallelism to compare on so many ranks of each tp rank; each one that the rules allow."""
    seq, own = config.model.seq_length, Context.of(config.parallel)
    most = max(seq // LEAST_TOKENS, own.ranks)
    sized = dataclasses.replace(config.parallel, tensor_model_parallel_size=tp)
    for cp in divisors(ranks):
        if cp == 1:
            yield NO_CONTEXT
        if cp == 1 or cp > most or (cp * LEAST_TOKENS > seq and cp != own.ranks):
            continue
        inner = max((size for size in divisors(cp) if size * tp <= ranks_per_node), default=1)
        choices = [Context(cp), Context(cp, ("a2a",))]
        choices += [Context(cp, ("a2a+p2p",), (inner, cp // inner))] if 1 < inner < cp else []
        choices += [own._replace(ranks=cp)] if own.sizes is None or math.prod(own.sizes) == cp else []
        for choice in dict.fromkeys(choices):
            changed = dataclasses.replace(config, parallel=choice.applied_to(sized))
            if _allows((*context.RULES, combinations), changed):
                yield choice


def _slices(config: Config, tp: int, shared: Context, sequence_parallel: bool) -> Iterator[int]:
    """Yield the numbers of slices above 1 to compare with whole sequences; each one that the rules allow."""
    seq, own = config.model.seq_length, config.parallel.pipe_sp_splits
    sized = dataclasses.replace(
        shared.applied_to(config.parallel), tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel
    )
    others = SLICES if sized.context_parallel_size == 1 else ()
    for count in sorted({own, *(count for count in others if count * LEAST_TOKENS <= seq)} - {1}):
        parallel = dataclasses.replace(sized, pipe_sp_splits=count)
        changed = dataclasses.replace(config, parallel=parallel, recompute=RecomputeConfig())
        if _allows((*context.SLICE_RULES, combinations), changed):
            yield count


def _recomputes(config: Config) -> list[RecomputeConfig]:
    """Return the settings of recompute to compare: those that change something and that the model allows."""
    # recompute of core attention saves almost nothing with fused kernels
    unfused = any(layer.has_attention and is_explicit(layer) for layer in layer_kinds(config.model))
    recomputes = [
        each
        for each in RECOMPUTES
        if unfused or each.recompute_granularity != "selective" or "core_attn" not in each.recompute_modules
    ]
    if config.recompute.recompute_memory_budget is not None and config.recompute not in recomputes:
        recomputes.append(config.recompute)

    def refused(recompute: RecomputeConfig) -> set[str]:
        tried = dataclasses.replace(config, recompute=recompute)
        return {message for rule in (combinations, experts.recompute) for message in rule(tried)}

    always = refused(RecomputeConfig())
    return [each for each in recomputes if always.issuperset(refused(each))]


def _expert_grids(config: Config, tp: int, dp: int) -> list[tuple[int, int | None, bool]]:
    """Return every ep and etp that divide experts, their widths and ranks, and whether some parameters have replicas.
    etp divides tp.
    """
    model = config.model
    if model.num_experts is None:
        return [(1, None, dp > 1)]
    width = model.moe_ffn_hidden_size or model.feed_forward_size()
    return [
        (ep, etp, dp > 1 or tp > ep * etp)
        for etp in divisors(tp)
        if width % etp == 0
        for ep in divisors(model.num_experts)
        if tp * dp % (ep * etp) == 0
    ]


def _schedules(config: Config, pp: int, alike: bool, overlap: bool) -> Iterator[tuple[str, int, int]]:
    """Yield (name, chunks per rank, 1). alike: of any number of chunks, those that divide the layers among all stages.
    overlap: schedules with pairs.
    """
    num_layers, parallel = config.model.num_layers, config.parallel
    if pp == 1:
        yield default_schedule(1), 1, 1
        return
    for family in SCHEDULES.values():
        is_tried = family.is_candidate or family.name == parallel.pipeline_schedule
        if overlap:
            is_tried = family.name in PAIRED
        if not is_tried or family.is_automatic or (family.placement is two_directions and pp % 2):
            continue
        if takes_any_chunks(family.name):
            for count in range(2, MOST_CHUNKS + 1):
                divides = any((num_layers + ends) % (pp * count) == 0 for ends in (0, 2))
                if pp * count <= num_layers + 2 * divides and (divides or not alike):
                    yield family.name, count, 1
        elif pp * family.num_chunks(1) <= num_layers:
            yield family.name, family.num_chunks(1), 1


def takes_any_chunks(schedule: str) -> bool:
    """Return True if the number of chunks per rank is a choice."""
    family = SCHEDULES[schedule]
    return family.takes_chunks and family.chunks is None


def keeps_all(schedule: str) -> bool:
    """Return True if a rank keeps every microbatch of a step, so that no shorter step needs as much memory."""
    return schedule in ("gpipe", "breadth-first")


def has_values(layout: Layout, config: Config, keys: Set[str]) -> bool:
    """Return True if the layout has the configured values of these fields."""
    parallel, recompute = config.parallel, config.recompute
    chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    strategy = layout.sharding or ("optim" if layout.distributed_optimizer else "no_shard")
    has_value = {
        "parallel.tensor_model_parallel_size": layout.tp == parallel.tensor_model_parallel_size,
        "parallel.pipeline_model_parallel_size": layout.pp == parallel.pipeline_model_parallel_size,
        "parallel.context_parallel_size": layout.context.ranks == parallel.context_parallel_size,
        "parallel.cp_comm_type": layout.context.ranks == 1 or layout.context.kinds == parallel.cp_comm_type,
        "parallel.hierarchical_context_parallel_sizes": layout.context.ranks == 1
        or layout.context.sizes == parallel.hierarchical_context_parallel_sizes,
        "parallel.expert_model_parallel_size": layout.ep == parallel.expert_model_parallel_size,
        "parallel.expert_tensor_parallel_size": layout.etp == parallel.expert_tensor_parallel_size,
        "parallel.pipeline_schedule": parallel.pipeline_schedule in ("auto", layout.schedule),
        "parallel.num_virtual_stages_per_pipeline_rank": layout.chunks == chunks,
        "training.micro_batch_size": layout.micro_batch_size == config.training.micro_batch_size,
        "parallel.sequence_parallel": layout.tp == 1 or layout.sequence_parallel == parallel.sequence_parallel,
        "parallel.use_distributed_optimizer": layout.distributed_optimizer == parallel.use_distributed_optimizer,
        "parallel.data_parallel_sharding_strategy": strategy == strategy_of(parallel),
        "parallel.num_distributed_optimizer_instances": layout.instances
        == parallel.num_distributed_optimizer_instances,
        "parallel.data_parallel_sharding_units": layout.units == parallel.data_parallel_sharding_units,
        "parallel.overlap_moe_expert_parallel_comm": layout.overlap == parallel.overlap_moe_expert_parallel_comm,
        "parallel.delay_wgrad_compute": layout.overlap or not parallel.delay_wgrad_compute,
        "model.moe_token_dispatcher_type": layout.flex == (config.model.moe_token_dispatcher_type == "flex"),
        "parallel.pipe_sp_splits": layout.pp == 1 or layout.slices == parallel.pipe_sp_splits,
        "parallel.pipeline_balance": layout.pp == 1 or layout.cut == parallel.pipeline_balance,
        "recompute.recompute_granularity": layout.recompute.recompute_granularity == recompute.recompute_granularity,
        "recompute.recompute_memory_budget": layout.recompute.recompute_memory_budget
        == recompute.recompute_memory_budget,
    }
    return all(has_value[key] for key in has_value.keys() & keys)

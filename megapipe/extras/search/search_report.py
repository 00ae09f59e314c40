"""The report of a search: the best layouts, the winner's time and memory, why it wins, near misses; as text or JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config, ResolvedModelConfig, convert
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.errors import ConfigError
from megapipe.extras.search.experiments import Experiment
from megapipe.extras.search.layout import difference
from megapipe.extras.search.search import Candidate, Found, Objective, predict_plan, without_recompute
from megapipe.extras.search.spread import SPREAD
from megapipe.formatting import bytes_text, text_table
from megapipe.plan.expert_load import BALANCED
from megapipe.plan.hardware import TERA, Hardware
from megapipe.plan.layer_costs import recomputed_flops, step_flops
from megapipe.plan.recompute_choice import recompute_text
from megapipe.plan.report import load_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.sharded import row_bytes
from megapipe.schedule.families import default_schedule
from megapipe.trace.parameters import model_parameters

BAR_WIDTH = 48
MOST_BARS = 16
# letters of the bar, and the items of `plan.memory` that they represent; '*' represents all other items
LETTERS = {"W": "weights", "G": "gradients", "O": "optimizer", "A": "activations", "R": "recompute"}


@dataclass(frozen=True)
class SearchReport:
    """The report of a search, or of the searches on several numbers of accelerators."""

    found: Found  # the best result by the objective
    tried: Sequence[Found]
    objective: Objective
    hardware: Hardware
    configured: Candidate | str  # the layout of the configuration itself, or why it cannot run
    by_megatron: bool  # adds Megatron's memory estimate
    experiments: Sequence[Experiment] = ()

    def warnings(self) -> Iterator[str]:
        """Yield the warnings about the layout as configured."""
        if not isinstance(self.configured, str):
            yield from oddities(self.configured, next(iter(self.found.best), None), self.hardware)

    def reasons(self) -> Iterator[str]:
        """Yield why the best layout wins; with experts also why it is preferred to the one as configured."""
        yield from reasons(self.found, self.hardware)
        own = self.configured
        if isinstance(own, str) or own.layout.etp is None or not self.found.best:
            return
        best, before = self.found.best[0].time, own.time
        if own.peak_bytes > self.hardware.usable_bytes:
            yield f"as configured, {own.layout.grid}: {lack_of_memory(own, self.hardware)}"
        elif before.seconds > best.seconds:
            part = max(before.parts, key=lambda part: before.parts[part] - best.parts.get(part, 0.0))
            yield (
                f"as configured, {own.layout.grid} takes {before.seconds / best.seconds - 1:.1%} longer, most of it in "
                f"{part}: {before.parts[part]:.3g} s instead of {best.parts.get(part, 0.0):.3g}"
            )

    def text(self) -> str:
        lines = [*self._headline(), *self._sizes(), *self._layouts(), *self._winner()]
        lines += [f"  why      {reason}" for reason in self.reasons()]
        lines += [f"  sure     {line}" for line in certainty(self.found)]
        lines += [f"  try      {each.text}" for each in self.experiments]
        for miss in self.found.misses:
            lines.append(f"  miss     {miss.layout}, {miss.time.seconds:.3g} s: {lack_of_memory(miss, self.hardware)}")
        lines += [f"  warning  as configured: {warning}" for warning in self.warnings()]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Return the report as JSON data, in seconds, bytes and shares."""
        found, configured = self.found, self.configured
        tried = [
            {
                "num_gpus": each.num_gpus,
                "step_seconds": each.best[0].time.seconds if each.best else None,
                "tokens_per_second": each.best[0].time.tokens_per_second if each.best else None,
                "cost_of_a_billion_tokens": each.cost(self.objective.price_per_hour),
            }
            for each in self.tried
        ]
        return {
            "hardware": {"name": self.hardware.name, "usable_bytes": self.hardware.usable_bytes},
            "objective": dataclasses.asdict(self.objective),
            "num_gpus": found.num_gpus,
            "tried": tried,
            "num_layouts": found.num_tried,
            "num_predicted": found.num_predicted,
            "best": [self._data(candidate) for candidate in found.best],
            "why": list(self.reasons()),
            "certainty": list(certainty(found)),
            "experiments": [each._asdict() for each in self.experiments],
            "misses": [{**self._data(miss), "why": lack_of_memory(miss, self.hardware)} for miss in found.misses],
            "as_configured": {"refused": configured} if isinstance(configured, str) else self._data(configured),
            "warnings": list(self.warnings()),
        }

    def _data(self, candidate: Candidate) -> dict[str, Any]:
        layout, time, parallel = candidate.layout, candidate.time, candidate.plan.config.parallel
        shared = layout.context
        return {
            "tp": layout.tp,
            "pp": layout.pp,
            **({"cp": shared.ranks, "cp_comm_type": list(shared.kinds)} if shared.ranks > 1 else {}),
            **({} if layout.etp is None else {"ep": layout.ep, "etp": layout.etp}),
            "chunks": layout.chunks,
            "schedule": layout.schedule,
            "dp": candidate.plan.topology.dp,
            "micro_batch_size": layout.micro_batch_size,
            "recompute": dataclasses.asdict(layout.recompute),
            "sequence_parallel": parallel.sequence_parallel,
            "distributed_optimizer": parallel.use_distributed_optimizer,
            **({"sharding": layout.sharding, "units": layout.units} if layout.sharding else {}),
            **({"instances": layout.instances} if layout.instances > 1 else {}),
            **({"slices": layout.slices} if layout.slices > 1 else {}),
            **({} if layout.etp is None else {"overlap": layout.overlap, "flex": layout.flex}),
            **({} if layout.etp is None else {"expert_imbalance": candidate.plan.expert_imbalance}),
            "layers_of_stages": list(candidate.plan.partition.layer_counts),
            "step_seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            **utilisation(candidate),
            "fits": candidate.peak_bytes <= self.hardware.usable_bytes,
            **({} if self.found.best[:1] in ((), (candidate,)) else {"behind": behind(self.found.best[0], candidate)}),
            "seconds_by_part": dict(time.parts),
            "memory": [
                {"pp_rank": rank.pp_rank, "total_bytes": rank.device_bytes, **rank.items, "NCCL": rank.nccl_bytes}
                for rank in candidate.memory
            ],
            **({"megatron": dataclasses.asdict(megatron_memory(candidate.plan))} if self.by_megatron else {}),
        }

    def _headline(self) -> Iterator[str]:
        found, hardware = self.found, self.hardware
        yield (
            f"{found.num_tried:,} layouts on {found.num_gpus:,} {hardware.name}, {found.num_predicted:,} simulated; "
            f"usable memory {bytes_text(hardware.usable_bytes)} each"
        )
        yield "seconds are predicted from published benchmarks and steps, none of megapipe's (docs/time_model.md)"
        for best in (*found.best, *found.misses)[:1]:
            if best.plan.expert_load != BALANCED:
                yield f"experts, in the best layout: {load_text(best.plan)}"
        yield "MFU: the model's FLOPs without recompute, causal attention counted half | counted in full"

    def _sizes(self) -> Iterator[str]:
        """Yield the table of all numbers of accelerators tried, for objectives other than 'time'."""
        kind, wanted = self.objective.kind, self.objective.tokens_per_second
        if kind == "time":
            return
        rows = []
        for found in self.tried:
            cost = found.cost(self.objective.price_per_hour)
            for best in found.best[:1]:
                rows.append(
                    {
                        "gpus": f"{found.num_gpus:,}",
                        "step": f"{best.time.seconds:.3g} s",
                        "tokens/s": f"{best.time.tokens_per_second:,.0f}",
                        "MFU": f"{best.time.mfu:.1%}",
                        **({} if cost is None else {"a billion tokens": f"{cost:,.2f}"}),
                        "layout": best.layout.grid,
                    }
                )
        result = {"gpus": "fewest GPUs that fit", "cost": "lowest cost per token"}[kind]
        reach = f" and reach {wanted:,.0f} tokens/s" if wanted else ""
        yield f"objective {kind}: {self.found.num_gpus:,} GPUs ({result}{reach})"
        yield from _table(rows)

    def _layouts(self) -> Iterator[str]:
        """Yield the table of the best layouts and the configured one, or why that cannot run."""
        configured = self.configured
        shown = [(str(place), candidate) for place, candidate in enumerate(self.found.best, 1)]
        if not isinstance(configured, str):
            fits = "" if configured.peak_bytes <= self.hardware.usable_bytes else " (does not fit)"
            shown.append((f"as configured{fits}", configured))
        shows_cp = any(candidate.layout.context.ranks > 1 for _, candidate in shown)
        rows = [self._row(name, candidate, shows_cp) for name, candidate in shown]
        if rows:
            yield from _table(rows)
        if isinstance(configured, str):
            yield f"  as configured: {configured}"

    def _row(self, name: str, candidate: Candidate, shows_cp: bool) -> dict[str, str]:
        layout, time, share = candidate.layout, candidate.time, utilisation(candidate)
        megatron = {"by Megatron": bytes_text(megatron_memory(candidate.plan).total)} if self.by_megatron else {}
        return {
            "": name,
            "tp": str(layout.tp),
            **({"cp": str(layout.context)[3:]} if shows_cp else {}),
            "pp": str(layout.pp),
            **({} if layout.etp is None else {"ep": str(layout.ep), "etp": str(layout.etp)}),
            "chunks": str(layout.chunks),
            "schedule": layout.schedule,
            "dp": str(candidate.plan.topology.dp),
            "microbatch": str(layout.micro_batch_size),
            "step": f"{time.seconds:.3g} s",
            "slower": behind_text(self.found.best, candidate),
            "tokens/s": f"{time.tokens_per_second:,.0f}",
            "MFU": f"{share['mfu_causal']:.1%} | {share['mfu_full_attention']:.1%}",
            "memory": bytes_text(candidate.peak_bytes),
            **megatron,
            "options": ", ".join(layout.options),
        }

    def _winner(self) -> Iterator[str]:
        if not self.found.best:
            yield "no layout fits; the nearest misses:"
            return
        winner, time, share = self.found.best[0], self.found.best[0].time, utilisation(self.found.best[0])
        parts = {part: seconds / time.seconds for part, seconds in time.parts.items()}
        yield f"the best: {winner.layout}, {time.flops_per_second / TERA:.0f} TFLOP/s a GPU"
        shares = ", ".join(f"{part} {of_step:.1%}" for part, of_step in parts.items() if of_step > 0.0005)
        yield f"  time     on the rank with the most computation: {shares}"
        yield (
            f"  FLOPs    MFU {share['mfu_causal']:.1%}, HFU {share['hfu_causal']:.1%} with causal attention counted "
            f"half; {share['mfu_full_attention']:.1%} and {share['hfu_full_attention']:.1%} counted in full"
        )
        legend = ", ".join(f"{letter} {item}" for letter, item in LETTERS.items())
        yield f"  memory   of one rank for each pp_rank: {legend}, * other, . free"
        fullest_first = sorted(winner.memory, key=lambda rank: -rank.device_bytes)
        letters = {item: letter for letter, item in LETTERS.items()}
        for rank in sorted(fullest_first[:MOST_BARS], key=lambda rank: rank.pp_rank):
            # cumulative sums are rounded, so that the length of the bar matches the total
            bar, filled, held = "", 0, {**rank.items, "NCCL": rank.nccl_bytes}
            others = sum(size for item, size in held.items() if item not in letters)
            for item, size in [*((item, held[item]) for item in letters), ("", others)]:
                filled += size
                bar += letters.get(item, "*") * (round(BAR_WIDTH * filled / self.hardware.usable_bytes) - len(bar))
            yield f"           pp {rank.pp_rank:<4} {bar.ljust(BAR_WIDTH, '.')} {bytes_text(rank.device_bytes)}"
        if len(winner.memory) > MOST_BARS:
            yield f"           {len(winner.memory) - MOST_BARS} ranks with less memory are not shown"
        fullest = winner.fullest
        sizes = {**fullest.items, "NCCL (a model)": fullest.nccl_bytes}
        large = {item: size for item, size in sizes.items() if size >= 0.005 * fullest.device_bytes}
        items = ", ".join(f"{item} {bytes_text(size)}" for item, size in large.items())
        yield f"           the fullest rank, pp {fullest.pp_rank}: {items}"
        if self.by_megatron:
            yield megatron_text(winner.plan)


def behind(best: Candidate, other: Candidate) -> dict[str, Any]:
    """Return how much slower a layout is than the best, what the two differ in, and the error of such differences."""
    kind = difference(best.layout, other.layout)
    error, _ = SPREAD.get(kind, SPREAD["several"])
    return {"slower": other.time.seconds / best.time.seconds - 1, "differs_in": kind, "error": error}


def behind_text(best: Sequence[Candidate], other: Candidate) -> str:
    if other in best[:1] or not best:
        return ""
    found = behind(best[0], other)
    return f"{found['slower']:.1%} ± {found['error']:.0%}"


def certainty(found: Found) -> Iterator[str]:
    """Yield how closed forms compare with simulated seconds, what the errors of differences are from, and how many
    layouts are within them.
    """
    if found.shares:
        least, most = min(found.shares), max(found.shares)
        yield (
            f"layouts are ranked by closed forms, which are {least:.1%} to {most:.1%} of the seconds of the "
            f"{found.num_predicted:,} that were simulated"
        )
    others = [behind(found.best[0], each) for each in found.best[1:]]
    if not others:
        return
    near = sum(each["slower"] <= each["error"] for each in others)
    kinds = dict.fromkeys(each["differs_in"] if each["differs_in"] in SPREAD else "several" for each in others)
    errors = [f"{SPREAD[kind][0]:.1%} in {kind} ({SPREAD[kind][1]:,} pairs)" for kind in kinds]
    yield (
        f"± is the error of predicted differences of layouts that differ as these do, rms over published pairs: "
        f"{', '.join(errors)}"
    )
    yield f"{near} of the {len(others)} next best layouts are within that spread of the best"


def megatron_text(plan: RunPlan) -> str:
    """Return one line with Megatron's estimate."""
    estimate = megatron_memory(plan)
    return (
        f"  megatron {bytes_text(estimate.total)} on the first rank by Megatron-LM's estimate: weights and optimizer "
        f"{bytes_text(estimate.state_bytes)} of {estimate.parameters / 1e9:.3g} billion parameters, activations "
        f"{bytes_text(estimate.activation_bytes)}"
    )


def utilisation(candidate: Candidate) -> dict[str, float]:
    """Return MFU and HFU by both conventions; hardware FLOPs are the model's plus recomputed ones."""
    plan, config, time = candidate.plan, candidate.plan.config, candidate.time
    sequences = config.training.global_batch_size
    peak = time.seconds * time.world_size * time.peak_flops
    shares: dict[str, float] = {}
    own = [each for stage in range(plan.placement.num_stages) for each in plan.layer_recompute(stage)]
    own += [config.recompute.of_predictions] * len(plan.model.predictions)
    for name, causal in (("causal", True), ("full_attention", False)):
        model = step_flops(config.model, sequences, causal)
        again = recomputed_flops(config.model, own, sequences, causal)
        shares |= {f"mfu_{name}": model / peak, f"hfu_{name}": (model + again) / peak}
    return shares


def _table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the table of rows that all have the same columns; the last one is aligned to the left."""
    return text_table([list(rows[0]), *(list(row.values()) for row in rows)], left=(-1,))


REPORTED_BUBBLE = 0.10  # share of the step
REPORTED_MESSAGES = 0.10  # share of the step
BUBBLE_WANTED = 0.05
REPORTED_RANK_RATIO = 2  # ranks in a copy of the model, relative to the winner's
# part of the step time -> messages that do not overlap with computation, and a way out
MESSAGES = {
    "tp": ("tensor-parallel communication", "a smaller tp is slower or does not fit"),
    "cp": ("messages of context parallelism", "a smaller cp is slower or does not fit"),
    "ep": ("all-to-alls of experts", "a smaller ep is slower or does not fit"),
    "reduce": ("the reduction of gradients between replicas", "raise --global-batch-size to hide it"),
    "gather": ("the gather of parameters between replicas", "raise --global-batch-size to hide it"),
}


def reasons(found: Found, hardware: Hardware) -> Iterator[str]:
    """Yield why the winner wins; nothing if no layout fits."""
    if not found.best:
        return
    winner = found.best[0]
    yield from _pipeline(found, hardware)
    yield from _context(found, hardware)
    yield from _recompute(found, hardware)
    yield from _sharding(winner, hardware)
    yield from _slices(winner, hardware)
    yield from fill_the_pipeline(winner)
    for part, (messages, remedy) in MESSAGES.items():
        share = winner.time.parts.get(part, 0.0) / winner.time.seconds
        if share > REPORTED_MESSAGES:
            yield f"{share:.1%} of the step is {messages} that does not overlap with computation; {remedy}"


def _pipeline(found: Found, hardware: Hardware) -> Iterator[str]:
    layout, seconds = found.best[0].layout, found.best[0].time.seconds
    if layout.pp == 1:
        axes = [f"{name} {size}" for name, size in (("tp", layout.tp), ("cp", layout.context.ranks)) if size > 1]
        alone = f"{' x '.join(axes) or 'data parallelism'} alone"
        copy = "with sharded weights a copy of the model fits" if layout.sharding else "a copy of the model fits"
        place = "one node" if layout.tp > 1 else "one device"
        rival = next((each for each in found.best if each.layout.pp > 1), found.rival)
        costs = ""
        if rival is not None:
            costs = (
                f"; the best layout with a pipeline, {rival.layout.grid}, {rival.layout.schedule}, has a bubble of "
                f"{rival.time.bubble_share:.1%} and takes {rival.time.seconds / seconds - 1:.1%} longer"
            )
        yield f"{copy} {place}: {alone}{costs}"
        return
    shorter = {pp: least for pp, least in found.least_bytes.items() if pp < layout.pp}
    if not shorter:
        return
    least, most = min(shorter.values()), max(shorter)
    rival = next((each for each in found.best if each.layout.pp < layout.pp), None)
    if least > hardware.usable_bytes:
        need = bytes_text(least)
        yield f"pp {layout.pp} is the shortest pipeline that fits: with a shorter one a rank needs {need} or more"
    elif rival is not None:
        yield (
            f"pp {layout.pp}: the best layout with a shorter pipeline, {rival.layout.grid}, {rival.layout.schedule}, "
            f"takes {rival.time.seconds / seconds - 1:.1%} longer"
        )
    else:
        yield (
            f"pp {layout.pp}: with pp {most} a rank needs {bytes_text(shorter[most])} or more, and the layouts that "
            "fit are slower than the ten best"
        )


def _context(found: Found, hardware: Hardware) -> Iterator[str]:
    """Yield why the winner shares sequences between ranks, or why not where that was tried."""
    layout, seconds = found.best[0].layout, found.best[0].time.seconds
    smaller = {cp: least for cp, least in found.least_bytes_of_cp.items() if cp < layout.context.ranks}
    other = next(
        (
            each
            for each in found.best
            if (each.layout.context.ranks < layout.context.ranks) == bool(smaller)
            and each.layout.context.ranks != layout.context.ranks
        ),
        None,
    )
    if other is not None:
        yield f"{layout.context}: with {other.layout.grid} a step takes {other.time.seconds / seconds - 1:.1%} longer"
    elif smaller and min(smaller.values()) > hardware.usable_bytes:
        yield f"{layout.context}: with a smaller cp a rank needs {bytes_text(min(smaller.values()))} or more"
    elif smaller:
        yield f"{layout.context}: layouts with a smaller cp that fit are slower than the ten best"
    elif len(found.least_bytes_of_cp) > 1:
        yield "cp 1: layouts with context parallelism are slower than the ten best, or do not fit"


def _recompute(found: Found, hardware: Hardware) -> Iterator[str]:
    """Yield the time and memory of the winner without recompute, if that does not fit."""
    layout = found.best[0].layout
    if layout.recompute == RecomputeConfig() or found.steps is None:
        return
    try:
        without = found.steps.in_full(without_recompute(layout))
    except ConfigError:
        return
    if without.peak_bytes > hardware.usable_bytes:
        yield (
            f"{recompute_text(layout.recompute)}: without it a step would take {without.time.seconds:.3g} s, but "
            + lack_of_memory(without, hardware)
        )


def _sharding(winner: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield what sharded weights cost the winner, beside the same layout with only the optimizer sharded."""
    plan = winner.plan
    if not winner.layout.sharding:
        return
    rows = plan.schedule(plan.batch.num_microbatches).rows
    moved = max((row_bytes(plan, rank, row) for rank, row in enumerate(rows)), key=lambda each: each.gathered)
    exposed = winner.time.parts["gather"] + winner.time.parts["reduce"]
    gathers = f"gathers {bytes_text(moved.gathered * plan.shape.element)} and " if moved.gathered else ""
    text = (
        f"{'weights' if gathers else 'gradients'} sharded: a rank {gathers}reduces "
        f"{bytes_text(moved.reduced * plan.shape.gradient)} a step, under computation but for {exposed:.3g} s"
    )
    changes = {"data_parallel_sharding_strategy": "optim", "data_parallel_sharding_units": 1}
    without = _instead(winner, hardware, changes)
    if without is not None:
        text += f"; with the optimizer sharded alone a step would take {without.time.seconds:.3g} s"
        text += _but_lacks_memory(without, hardware)
    yield text


def _slices(winner: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the time and memory of the winner with whole sequences in the pipeline."""
    whole = _instead(winner, hardware, {"pipe_sp_splits": 1}) if winner.layout.slices > 1 else None
    if whole is not None:
        yield (
            f"slices {winner.layout.slices}: with whole sequences in the pipeline a step would take "
            f"{whole.time.seconds:.3g} s instead of {winner.time.seconds:.3g}{_but_lacks_memory(whole, hardware)}"
        )


def _but_lacks_memory(candidate: Candidate, hardware: Hardware) -> str:
    fits = candidate.peak_bytes <= hardware.usable_bytes
    return "" if fits else f", but {lack_of_memory(candidate, hardware)}"


def lack_of_memory(candidate: Candidate, hardware: Hardware) -> str:
    """Return the bytes that the fullest rank needs of those that it can use."""
    rank = candidate.fullest
    return f"pp_rank {rank.pp_rank} needs {bytes_text(rank.device_bytes)} of {bytes_text(hardware.usable_bytes)}"


def fill_the_pipeline(candidate: Candidate) -> Iterator[str]:
    """Yield how to reduce a large bubble: more microbatches, or more chunks if they divide the layers."""
    layout, bubble = candidate.layout, candidate.time.bubble_share
    if layout.pp == 1 or bubble <= REPORTED_BUBBLE:
        return
    batch, model = candidate.plan.batch, candidate.plan.config.model
    count = batch.num_microbatches
    wanted = math.ceil(count * (bubble / (1 - bubble)) / (BUBBLE_WANTED / (1 - BUBBLE_WANTED)) / layout.pp) * layout.pp
    chunked = next((n for n in range(layout.chunks + 1, 9) if model.num_layers % (layout.pp * n) == 0), None)
    of_slices = f" of {layout.slices} slices" if layout.slices > 1 else ""
    chunks = f", or use {chunked} chunks" if chunked and layout.schedule == default_schedule(layout.chunks) else ""
    yield (
        f"{bubble:.1%} of the step is bubble: {count} microbatches{of_slices} feed {layout.pp} pipeline ranks; raise "
        f"the microbatches to {wanted} (--global-batch-size {wanted * batch.samples_per_microbatch}){chunks}"
    )


def oddities(configured: Candidate, winner: Candidate | None, hardware: Hardware) -> Iterator[str]:
    """Yield warnings about the layout of a configuration: inverted axes, too few microbatches, missing options."""
    t, count = configured.plan.topology, configured.plan.batch.num_microbatches
    if t.tp > 1 and t.crosses_nodes("tp"):
        share = configured.time.parts["tp"] / configured.time.seconds
        inside = [name for name in ("pp", "dp") if t.size(name) > 1 and not t.crosses_nodes(name)]
        turned = f" while {' and '.join(inside)} stay inside a node: the axes are inverted" if inside else ""
        yield (
            f"tp {t.tp} crosses nodes of {hardware.ranks_per_node}{turned}; every layer waits for its messages "
            f"({share:.0%} of the step): put tp first in --rank-order and keep it at {hardware.ranks_per_node} or less"
        )
    elif t.pp > 1 and t.dp > 1 and t.crosses_nodes("replicas") and not t.crosses_nodes("pp"):
        yield (
            f"pp {t.pp} stays inside a node while gradients cross nodes (--rank-order {t.order}): a pipeline sends "
            "less, so the pipeline should cross nodes; use --rank-order tp-cp-dp-pp"
        )
    yield from _experts(configured, winner)
    if count * (slices := configured.plan.num_slices) < t.pp:
        of_slices = f" of {slices} slices" if slices > 1 else ""
        yield (
            f"{count} microbatches{of_slices} cannot fill a pipeline of {t.pp} ranks: some ranks are always idle; "
            "raise --global-batch-size or lower pp"
        )
    else:
        yield from fill_the_pipeline(configured)
    if winner is not None:
        enough = winner.layout.tp * winner.layout.pp
        if t.tp * t.pp >= REPORTED_RANK_RATIO * enough:
            yield (
                f"a copy of the model takes {t.tp * t.pp} ranks where {enough} are enough ({winner.layout.grid}): dp "
                f"could be {t.world_size // enough} instead of {t.dp}"
            )
    yield from _switched_off(configured, hardware)


def _experts(configured: Candidate, winner: Candidate | None) -> Iterator[str]:
    """Yield a warning about all-to-alls over the network where a smaller ep is found to be faster."""
    t, time = configured.plan.topology, configured.time
    share = time.parts.get("ep", 0.0) / time.seconds
    if winner is None or t.ep == 1 or not t.crosses_nodes("ep") or share <= REPORTED_MESSAGES:
        return
    if winner.layout.ep < t.ep:
        yield (
            f"ep {t.ep} crosses nodes of {t.ranks_per_node}, {t.least_on_a_node('ep')} ranks of a group on each: "
            f"{share:.0%} of the step is all-to-alls; the best layout has ep {winner.layout.ep}"
        )


def _switched_off(configured: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the options that are off and would predict a better step."""
    t, need = configured.plan.topology, configured.peak_bytes
    for name, has_effect in (
        ("sequence_parallel", t.tp > 1),
        ("use_distributed_optimizer", t.num_replicas > 1),
        ("overlap_grad_reduce", t.num_replicas > 1),
    ):
        if not has_effect or getattr(configured.plan.config.parallel, name):
            continue
        other, flag = _instead(configured, hardware, {name: True}), "--" + name.replace("_", "-")
        if other is None:
            continue
        if other.peak_bytes <= need and other.time.seconds < configured.time.seconds * 0.995:
            yield (
                f"{flag} is off: with it a step takes {other.time.seconds:.3g} s instead of "
                f"{configured.time.seconds:.3g}, and the fullest rank needs {bytes_text(other.peak_bytes)} "
                f"instead of {bytes_text(need)}"
            )
        elif need > hardware.usable_bytes >= other.peak_bytes:
            yield f"{flag} is off: with it the fullest rank needs {bytes_text(other.peak_bytes)} and fits"


def _instead(candidate: Candidate, hardware: Hardware, changes: dict[str, Any]) -> Candidate | None:
    """Predict a candidate with other values of the section 'parallel'; return None if it cannot run with them."""
    config = candidate.plan.config
    try:
        training = convert(TrainingConfig, config.training, train_iters=None, train_samples=None)
        optimizer = convert(
            OptimizerConfig,
            config.optimizer,
            lr_decay_iters=None,
            lr_decay_samples=config.optimizer.lr_decay_samples or None,
            lr_warmup_samples=0,
            lr_wsd_decay_samples=None,
            decoupled_min_lr=None if config.optimizer.decoupled_lr is None else config.optimizer.decoupled_min_lr,
        )
        parallel = dataclasses.replace(config.parallel, **changes)
        changed = convert(Config, config, training=training, optimizer=optimizer, parallel=parallel)
        plan = resolve(changed, candidate.plan.topology.world_size, hardware.ranks_per_node)
        plan = dataclasses.replace(plan, expert_load=candidate.plan.expert_load)
        return predict_plan(candidate.layout, plan, hardware)
    except ConfigError:
        return None


# ----------------------------------------------------------------------------------------------- Megatron-LM's estimate

BYTES_OF_A_PARAMETER = 18.0
WHOLE = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "router")  # modules on every rank of tp
NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")
TABLES = ("word_embeddings", "position_embeddings", "output_layer")
OVERHEAD = 1.05  # on activations without sequence parallelism


@dataclass(frozen=True)
class MegatronMemory:
    """Megatron-LM's memory estimate (its report of theoretical memory footprints) for the first pipeline rank, for
    comparison with `plan.memory`. parameters: the number that the rank holds.

    Its conventions:
    - 18 bytes per parameter (bf16 weight, fp32 gradient, fp32 master and two moments), 6 + 12 / dp with the distributed
      optimizer
    - only the first pipeline rank, with 1 / pp of the layers and one embedding
    - attention, MLPs and shared experts are cut over tp, experts over ep and etp; norms, routers and gates are whole; a
      parameter of experts has edp in place of dp
    - activations by table 2 of Korthikanti et al. 2022 (arXiv:2205.05198): s b h 34 / t per layer (for an ffn of 4h)
      under sequence parallelism and selective recompute, else s b h (10 + 24 / t) plus 5 %

    It ignores the cut of the layers, grouped or gated activations, full recompute, schedules other than 1F1B and
    interleaving, messages, the head's activations in a pipeline, padding, biases of linears, norms of heads, and the
    activations of experts: a layer counts as one with an MLP of --ffn-hidden-size.
    """

    parameters: float
    state_bytes: float
    activation_bytes: float

    @property
    def total(self) -> float:
        return self.state_bytes + self.activation_bytes


def megatron_memory(plan: RunPlan) -> MegatronMemory:
    """Return the estimate for a plan of any schedule; chunks count as interleaving."""
    config, t, model = plan.config, plan.topology, plan.config.model
    h, vocabulary = model.hidden_size, model.padded_vocab_size
    block, embedding = block_parameters(model), h * vocabulary
    if model.untie_embeddings_and_output_weights and t.pp == 1:
        embedding *= 2
    dense = (block["sharded"] / t.pp + embedding) / t.tp + block["replicated"] / t.pp
    experts = block["experts"] / t.pp / (t.ep * t.etp)

    def of_each(copies: int) -> float:
        return 6.0 + 12.0 / copies if config.parallel.use_distributed_optimizer else BYTES_OF_A_PARAMETER

    state = dense * of_each(t.dp) + experts * of_each(t.edp)
    tokens = float(model.seq_length * config.training.micro_batch_size)
    is_short = config.parallel.sequence_parallel and config.recompute.recompute_granularity == "selective"
    layer = tokens * h * (18.0 + 4.0 * model.ffn_hidden_size / h) if is_short else tokens * h * (10.0 + 24.0 / t.tp)
    # plus token ids and the embedding's dropout of pp microbatches
    kept = model.num_layers * layer + tokens * (8.0 + h) * t.pp
    # microbatches in flight on the first rank, divided by pp
    if plan.num_chunks > 1:
        kept *= 1.0 + (t.pp - 1) / (t.pp * plan.num_chunks)
    else:
        kept *= min(1.0, plan.batch.num_microbatches / t.pp)
    if is_short:
        activations = (kept + (4.0 * tokens * (h + vocabulary) if t.pp == 1 else 0.0)) / t.tp
    else:
        activations = OVERHEAD * (kept + (2.0 * tokens * (h + vocabulary / t.tp) if t.pp == 1 else 0.0))
    return MegatronMemory(dense + experts, state, activations)


def block_parameters(model: ResolvedModelConfig) -> Counter[str]:
    """Return the parameters of all layers and the final norm, as Megatron counts them, by how ranks hold them.

    'sharded': over tp; 'experts': over ep and etp; 'replicated'.
    """
    counts = Counter[str]()
    for spec in model_parameters(model, sequence_parallel=False):
        module, _, name = spec.name.rpartition(".")
        is_whole = module.endswith(WHOLE) or name == "gate_weight"
        is_of_heads = module.endswith(NORMS_OF_HEADS) and not model.multi_latent_attention
        is_bias = name.startswith("bias") and not is_whole
        if not is_bias and not is_of_heads and name != "softmax_offset" and not module.endswith(TABLES):
            counts["experts" if spec.is_expert else "replicated" if is_whole else "sharded"] += spec.num_elements
    return counts

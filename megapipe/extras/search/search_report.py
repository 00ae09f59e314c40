"""The report of a search: the best layouts, the winner's time and memory, why it wins, near misses; as text or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megapipe.extras.search.megatron_memory import megatron_memory
from megapipe.extras.search.objective import Chosen, Objective
from megapipe.extras.search.reasons import gib, oddities, reasons
from megapipe.extras.search.search import Candidate, Found
from megapipe.formatting import text_table
from megapipe.plan.hardware import TERA, Hardware
from megapipe.plan.layer_costs import recomputed_flops, step_flops
from megapipe.plan.memory import RankMemory
from megapipe.plan.run_plan import RunPlan

BAR_WIDTH = 48
MOST_BARS = 16
# letters of the bar, and the items of `plan.memory` that they represent; '*' represents all other items
LETTERS = {"W": "weights", "G": "gradients", "O": "optimizer", "A": "activations", "R": "recompute"}


@dataclass(frozen=True)
class SearchReport:
    """The report of a search.

    configured: the layout of the configuration itself, or why it cannot run.
    by_megatron: adds Megatron's memory estimate.
    """

    chosen: Chosen
    objective: Objective
    hardware: Hardware
    configured: Candidate | str
    by_megatron: bool = False

    @property
    def found(self) -> Found:
        return self.chosen.best.found

    @property
    def why(self) -> tuple[str, ...]:
        return reasons(self.found, self.hardware)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about the layout as configured."""
        if isinstance(self.configured, str):
            return ()
        return oddities(self.configured, self.found.best[0] if self.found.best else None, self.hardware)

    def text(self) -> str:
        misses = (
            f"  miss     {miss.layout}, {miss.time.seconds:.3g} s: {_lack(miss, self.hardware)}"
            for miss in self.found.misses
        )
        warnings = (f"  warning  as configured: {warning}" for warning in self.warnings)
        return "\n".join([*self._headline(), *self._sizes(), *self._table(), *self._winner(), *misses, *warnings])

    def data(self) -> dict[str, Any]:
        """Return the report as JSON data, in seconds, bytes and shares."""
        found, configured = self.found, self.configured
        return {
            "hardware": {"name": self.hardware.name, "usable_bytes": self.hardware.usable_bytes},
            "objective": dataclasses.asdict(self.objective),
            "num_gpus": self.chosen.best.num_gpus,
            "tried": [_size_data(sized.num_gpus, sized.found, sized.cost) for sized in self.chosen.tried],
            "num_layouts": found.num_tried,
            "num_predicted": found.num_predicted,
            "best": [self._data(candidate) for candidate in found.best],
            "why": list(self.why),
            "misses": [{**self._data(miss), "why": _lack(miss, self.hardware)} for miss in found.misses],
            "as_configured": {"refused": configured} if isinstance(configured, str) else self._data(configured),
            "warnings": list(self.warnings),
        }

    def _data(self, candidate: Candidate) -> dict[str, Any]:
        layout, time = candidate.layout, candidate.time
        return {
            "tp": layout.tp,
            "pp": layout.pp,
            "chunks": layout.chunks,
            "schedule": layout.schedule,
            "dp": candidate.plan.topology.dp,
            "micro_batch_size": layout.micro_batch_size,
            "recompute": dataclasses.asdict(layout.recompute),
            "sequence_parallel": candidate.plan.config.parallel.sequence_parallel,
            "distributed_optimizer": candidate.plan.config.parallel.use_distributed_optimizer,
            "layers_of_stages": list(candidate.plan.partition.layer_counts),
            "step_seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            **utilisation(candidate),
            "seconds_by_part": dict(time.parts),
            "memory": [{"pp_rank": rank.pp_rank, "total_bytes": rank.total, **rank.items} for rank in candidate.memory],
            **({"megatron": dataclasses.asdict(megatron_memory(candidate.plan))} if self.by_megatron else {}),
        }

    def _headline(self) -> Iterator[str]:
        found, hardware = self.found, self.hardware
        yield (
            f"{found.num_tried:,} layouts on {self.chosen.best.num_gpus:,} {hardware.name}, {found.num_predicted:,} "
            f"simulated; usable memory {gib(hardware.usable_bytes)} each"
        )
        yield "predicted with efficiencies fitted to published step times (docs/planner.md)"
        yield "MFU: the model's FLOPs without recompute, causal attention counted half | counted in full"

    def _sizes(self) -> Iterator[str]:
        """Yield the table of all numbers of accelerators tried, for objectives other than 'time'."""
        kind, chosen = self.objective.kind, self.chosen
        if kind == "time":
            return
        priced = self.objective.price_per_hour is not None
        rows = [
            (
                f"{sized.num_gpus:,}",
                f"{best.time.seconds:.3g} s",
                f"{best.time.tokens_per_second:,.0f}",
                f"{best.time.mfu:.1%}",
                *([f"{sized.cost:,.2f}"] if sized.cost is not None else []),
                best.layout.grid,
            )
            for sized in chosen.tried
            for best in sized.found.best[:1]
        ]
        heads = ("gpus", "step", "tokens/s", "MFU", *(["a billion tokens"] if priced else []), "layout")
        result = {"gpus": "fewest GPUs that fit", "cost": "lowest cost per token"}[kind]
        wanted = self.objective.tokens_per_second
        reach = f" and reach {wanted:,.0f} tokens/s" if wanted else ""
        yield f"objective {kind}: {chosen.best.num_gpus:,} GPUs ({result}{reach})"
        yield from text_table([heads, *rows], left=(-1,))

    def _table(self) -> Iterator[str]:
        rows = [self._row(str(place), candidate) for place, candidate in enumerate(self.found.best, 1)]
        configured = self.configured
        if not isinstance(configured, str):
            fits = (
                "as configured"
                if configured.peak_bytes <= self.hardware.usable_bytes
                else "as configured (does not fit)"
            )
            rows.append(self._row(fits, configured))
        megatron = ["by Megatron"] if self.by_megatron else []
        heads = (
            "",
            "tp",
            "pp",
            "chunks",
            "schedule",
            "dp",
            "microbatch",
            "step",
            "tokens/s",
            "MFU",
            "memory",
            *megatron,
            "options",
        )
        if rows:
            yield from text_table([heads, *rows], left=(-1,))
        if isinstance(configured, str):
            yield f"  as configured: {configured}"

    def _row(self, name: str, candidate: Candidate) -> tuple[str, ...]:
        layout, time = candidate.layout, candidate.time
        share = utilisation(candidate)
        return (
            name,
            str(layout.tp),
            str(layout.pp),
            str(layout.chunks),
            layout.schedule,
            str(candidate.plan.topology.dp),
            str(layout.micro_batch_size),
            f"{time.seconds:.3g} s",
            f"{time.tokens_per_second:,.0f}",
            f"{share['mfu_causal']:.1%} | {share['mfu_full_attention']:.1%}",
            gib(candidate.peak_bytes),
            *([gib(megatron_memory(candidate.plan).total)] if self.by_megatron else []),
            ", ".join(layout.options),
        )

    def _winner(self) -> Iterator[str]:
        if not self.found.best:
            yield "no layout fits; the nearest misses:"
            return
        winner, time = self.found.best[0], self.found.best[0].time
        parts = ", ".join(
            f"{part} {seconds / time.seconds:.1%}"
            for part, seconds in time.parts.items()
            if seconds > 0.0005 * time.seconds
        )
        share = utilisation(winner)
        yield f"the best: {winner.layout}, {time.flops_per_second / TERA:.0f} TFLOP/s a GPU"
        yield f"  time     on the rank with the most computation: {parts}"
        yield (
            f"  FLOPs    MFU {share['mfu_causal']:.1%}, HFU {share['hfu_causal']:.1%} with causal attention counted "
            f"half; {share['mfu_full_attention']:.1%} and {share['hfu_full_attention']:.1%} counted in full"
        )
        yield from self._memory(winner)
        yield from (f"  why      {reason}" for reason in self.why)

    def _memory(self, winner: Candidate) -> Iterator[str]:
        legend = ", ".join(f"{letter} {item}" for letter, item in LETTERS.items())
        yield f"  memory   of one rank for each pp_rank: {legend}, * other, . free"
        ranks = (
            winner.memory
            if len(winner.memory) <= MOST_BARS
            else sorted(winner.memory, key=lambda rank: -rank.total)[:MOST_BARS]
        )
        for rank in sorted(ranks, key=lambda rank: rank.pp_rank):
            yield f"           pp {rank.pp_rank:<4} {_bar(rank, self.hardware.usable_bytes)} {gib(rank.total)}"
        if len(ranks) < len(winner.memory):
            yield f"           {len(winner.memory) - len(ranks)} ranks with less memory are not shown"
        fullest = max(winner.memory, key=lambda rank: rank.total)
        items = ", ".join(
            f"{item} {gib(size)}" for item, size in fullest.items.items() if size >= 0.005 * fullest.total
        )
        yield f"           the fullest rank, pp {fullest.pp_rank}: {items}"
        if self.by_megatron:
            yield megatron_text(winner.plan)


def megatron_text(plan: RunPlan) -> str:
    """Return one line with Megatron's estimate."""
    estimate = megatron_memory(plan)
    return (
        f"  megatron {gib(estimate.total)} on the first rank by Megatron-LM's estimate: weights and optimizer "
        f"{gib(estimate.state_bytes)} of {estimate.parameters / 1e9:.3g} billion parameters, activations "
        f"{gib(estimate.activation_bytes)}"
    )


def utilisation(candidate: Candidate) -> dict[str, float]:
    """Return MFU and HFU by both conventions; hardware FLOPs are the model's plus recomputed ones."""
    config, time = candidate.plan.config, candidate.time
    sequences = config.training.global_batch_size
    assert sequences
    shares: dict[str, float] = {}
    for name, causal in (("causal", True), ("full_attention", False)):
        model = step_flops(config.model, sequences, causal)
        again = recomputed_flops(config.model, config.recompute, sequences, causal)
        peak = time.seconds * time.world_size * time.peak_flops
        shares |= {f"mfu_{name}": model / peak, f"hfu_{name}": (model + again) / peak}
    return shares


def _bar(rank: RankMemory, usable: int) -> str:
    """Return the bar of one rank's memory; cumulative sums are rounded, so that its length matches the total."""
    letters = {item: letter for letter, item in LETTERS.items()}
    bar, filled, others = "", 0, sum(size for item, size in rank.items.items() if item not in letters)
    for item, size in [*((item, rank.items[item]) for item in letters), ("", others)]:
        filled += size
        bar += letters.get(item, "*") * (round(BAR_WIDTH * filled / usable) - len(bar))
    return bar + "." * (BAR_WIDTH - len(bar))


def _lack(miss: Candidate, hardware: Hardware) -> str:
    largest = max(miss.memory, key=lambda rank: rank.total)
    return f"pp_rank {largest.pp_rank} needs {gib(largest.total)} of {gib(hardware.usable_bytes)}"


def _size_data(num_gpus: int, found: Found, cost: float | None) -> dict[str, Any]:
    best = found.best[0] if found.best else None
    return {
        "num_gpus": num_gpus,
        "step_seconds": best and best.time.seconds,
        "tokens_per_second": best and best.time.tokens_per_second,
        "cost_of_a_billion_tokens": cost,
    }

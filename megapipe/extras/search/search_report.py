"""The report of a search: the best layouts, the winner's time and memory, why it wins, near misses; as text or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.extras.search.candidate import Candidate, Found, Objective
from megapipe.extras.search.megatron_memory import megatron_memory
from megapipe.extras.search.reasons import lack_of_memory, oddities, reasons
from megapipe.formatting import bytes_text, text_table
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
    """The report of a search, or of the searches on several numbers of accelerators."""

    found: Found  # the best result by the objective
    tried: Sequence[Found]
    objective: Objective
    hardware: Hardware
    configured: Candidate | str  # the layout of the configuration itself, or why it cannot run
    by_megatron: bool  # adds Megatron's memory estimate

    def warnings(self) -> Iterator[str]:
        """Yield the warnings about the layout as configured."""
        if not isinstance(self.configured, str):
            yield from oddities(self.configured, next(iter(self.found.best), None), self.hardware)

    def text(self) -> str:
        lines = [*self._headline(), *self._sizes(), *self._layouts(), *self._winner()]
        lines += [f"  why      {reason}" for reason in reasons(self.found, self.hardware)]
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
            "why": list(reasons(found, self.hardware)),
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
            **({"slices": layout.slices} if layout.slices > 1 else {}),
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
            f"{found.num_tried:,} layouts on {found.num_gpus:,} {hardware.name}, {found.num_predicted:,} simulated; "
            f"usable memory {bytes_text(hardware.usable_bytes)} each"
        )
        yield "predicted with efficiencies fitted to published step times (docs/planner.md)"
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
        fullest_first = sorted(winner.memory, key=lambda rank: -rank.total)
        for rank in sorted(fullest_first[:MOST_BARS], key=lambda rank: rank.pp_rank):
            yield f"           pp {rank.pp_rank:<4} {_bar(rank, self.hardware.usable_bytes)} {bytes_text(rank.total)}"
        if len(winner.memory) > MOST_BARS:
            yield f"           {len(winner.memory) - MOST_BARS} ranks with less memory are not shown"
        fullest = winner.fullest
        large = {item: size for item, size in fullest.items.items() if size >= 0.005 * fullest.total}
        items = ", ".join(f"{item} {bytes_text(size)}" for item, size in large.items())
        yield f"           the fullest rank, pp {fullest.pp_rank}: {items}"
        if self.by_megatron:
            yield megatron_text(winner.plan)


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


def _bar(rank: RankMemory, usable: int) -> str:
    """Return the bar of one rank's memory; cumulative sums are rounded, so that its length matches the total."""
    letters = {item: letter for letter, item in LETTERS.items()}
    bar, filled, others = "", 0, sum(size for item, size in rank.items.items() if item not in letters)
    for item, size in [*((item, rank.items[item]) for item in letters), ("", others)]:
        filled += size
        bar += letters.get(item, "*") * (round(BAR_WIDTH * filled / usable) - len(bar))
    return bar + "." * (BAR_WIDTH - len(bar))

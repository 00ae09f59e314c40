"""The days that a run takes with failures, checkpoints and restarts, and the best interval between checkpoints.

Failures come at random at a constant rate, during saves and restarts too, M seconds apart on average (Daly 2006, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3)). With a save after every t
seconds of computation that blocks training for d seconds, and restarts of R seconds, C seconds of computation take

    M exp((R + b) / M) (exp((t + d) / M) - 1) C / t

seconds on average. b are the seconds for which --async-save writes in the background: a failure meanwhile costs the
whole interval before, since only the checkpoint before that is complete (Vaidya 1997, IEEE Transactions on Computers
46(8)). The best t does not depend on b, unless b is longer: a save waits b - t for the one before it, and t takes the
place of b above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megapipe.config.options import number_with_suffix
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.errors import ConfigError
from megapipe.formatting import bytes_text, duration_text, seconds_text
from megapipe.plan.run_plan import RunPlan

DAY, HOUR = 86400.0, 3600.0
MOST = 1e15  # of any input


@dataclass(frozen=True)
class Failures:
    """Seconds between failures of a job, of a restart, and of a save: M, R, d and b of the formula."""

    between: float
    restart: float
    blocked: float
    background: float = 0.0

    def best_interval(self, computing: float) -> float:
        """Return the seconds of computation between saves with which a run of `computing` seconds ends first."""
        ratio = self.blocked / (2.0 * self.between)
        series = 1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0
        best = math.sqrt(2.0 * self.blocked * self.between) * series - self.blocked if ratio < 1.0 else self.between
        return min(max(best, self.background), computing)

    def expected(self, computing: float, interval: float) -> dict[str, float]:
        """Return the expected days of a run that saves after every `interval` seconds of computation, by their use.

        lost: on work since the last complete checkpoint. goodput: the share of computing.
        """
        num_saves = max(1.0, computing / interval)  # one at the end of a run that is shorter
        again = min(self.background, computing / num_saves)
        saving = num_saves * (self.blocked + self.background - again)
        exponent = min((computing + saving) / num_saves / self.between, 700.0)  # exp of more overflows
        running = num_saves * self.between * math.expm1(exponent) * math.exp(again / self.between)
        seconds = {"computing": computing, "saving": saving, "lost": max(0.0, running - computing - saving)}
        seconds["restarting"] = running * math.expm1(self.restart / self.between)
        whole = sum(seconds.values())
        days = {"days": whole / DAY} | {use: spent / DAY for use, spent in seconds.items()}
        return days | {"goodput": computing / whole, "failures": whole / self.between, "interval_seconds": interval}


def checkpoint_bytes(plan: RunPlan) -> tuple[int, int]:
    """Return the bytes of the tensors of a checkpoint, and of those that the rank with the most of them writes.

    Masters and moments are saved in at least fp32, also where a rank keeps them in fewer bits.
    """
    dtypes, wide = plan.state_dtypes, max(ELEMENT_BYTES["fp32"], plan.shape.element)
    element = {of_matrix: wide * (1 + len(dtypes.moments(of_matrix))) for of_matrix in (False, True)}
    if plan.config.checkpoint.no_save_optim:
        element = dict.fromkeys(element, plan.shape.element)
    whole = sum(  # vocabulary padding is not saved
        (element[spec.matrix is not None] if spec.trainable else plan.shape.element)
        * (spec.num_elements // spec.shape[0])
        * (spec.true_rows or spec.shape[0])
        for spec in plan.specs
    )
    shards = (plan.shard_elements(plan.placement.stages_of(rank)) for rank in range(plan.topology.pp))
    return whole, max(sum(element[kind] * count for kind, count in shard.items()) for shard in shards)


def parse_tokens(text: str) -> float:
    """Return a number of tokens such as 15.6T, 300B or 1.5e13. Raises ConfigError."""
    if (tokens := number_with_suffix(text)) is None:
        raise ConfigError(f"--days {text}: expected a number of tokens, such as 15.6T, 300B or 1.5e13")
    return tokens


def run_days(
    plan: RunPlan, step_seconds: float, tokens: float, failures: Failures, price: float | None, watts: float | None
) -> dict[str, Any]:
    """Return the days of a run in steps of full size, its best --save-interval and its costs, as JSON data.

    price: of a GPU and hour. Raises ConfigError for too few or too many tokens, or where failures leave no progress.
    """
    step_tokens, saves = plan.batch.full * plan.config.model.seq_length, plan.config.checkpoint
    if not step_tokens <= tokens <= MOST:
        raise ConfigError(
            f"--days for {tokens:.12g} tokens: expected {step_tokens:,}, those of one step, to {MOST:g}; give "
            "--days 15.6T or such a number, or --train-iters or --train-samples"
        )
    needed = failures.restart + failures.blocked + failures.background + step_seconds
    if needed >= failures.between:
        raise ConfigError(
            f"--gpu-hours-per-failure: a failure every {failures.between:,.4g} s, but a restart, a step and a save "
            f"take {needed:,.4g} s: the run would not advance; raise it, or lower --restart-seconds or the save's time"
        )
    computing = tokens / step_tokens * step_seconds
    best = failures.best_interval(computing)
    save_interval = max(1, round(best / step_seconds))
    best_run = failures.expected(computing, save_interval * step_seconds)
    # at the end of a step
    configured = min((saves.save_interval or math.inf) * step_seconds, (saves.save_interval_minutes or math.inf) * 60.0)
    hours = best_run["days"] * 24.0 * plan.topology.world_size
    return {
        "tokens": tokens,
        "checkpoint_bytes": checkpoint_bytes(plan)[0],
        "seconds": asdict(failures),
        "best_interval_seconds": best,
        "save_interval": save_interval,
        "expected": best_run,
        "as_configured": failures.expected(computing, max(configured, step_seconds)) if configured < math.inf else None,
        "gpu_hours": hours,
        "money": None if price is None else hours * price,
        "megawatt_hours": None if watts is None else hours * watts / 1e6,
    }


def days_text(days: Mapping[str, Any]) -> str:
    """Return what `run_days` found as text for a terminal."""
    run, seconds = days["expected"], days["seconds"]
    uses = ", ".join(f"{use} {run[use]:,.3g}" for use in ("computing", "saving", "lost", "restarting"))
    behind = f", {seconds_text(seconds['background'])} in the background" if seconds["background"] else ""
    lines = [
        f"  days     {run['days']:,.3g} for {days['tokens']:,.0f} tokens: {uses}; goodput {run['goodput']:.1%}",
        f"           {run['failures']:,.3g} failures, one every {duration_text(seconds['between'])}; a checkpoint of "
        f"{bytes_text(days['checkpoint_bytes'])} blocks training for {seconds_text(seconds['blocked'])}{behind}",
        f"           best interval: {duration_text(days['best_interval_seconds'])} of computation, --save-interval "
        f"{days['save_interval']}",
    ]
    if (other := days["as_configured"]) is not None:
        late = ", longer than the run" if other["interval_seconds"] > run["computing"] * DAY else ""
        name = f"as configured, {duration_text(other['interval_seconds'])}{late}"
        lines.append(f"           {name}: {other['days']:,.3g} days, goodput {other['goodput']:.1%}")
    units = {"gpu_hours": "{} GPU hours", "money": "a price of {}", "megawatt_hours": "{} MWh"}
    known = {unit: days[cost] for cost, unit in units.items() if days[cost] is not None}
    costs = ", ".join(unit.format(f"{cost:,.{0 if cost >= 100 else 3}f}") for unit, cost in known.items())
    return "\n".join([*lines, f"           {costs}"])

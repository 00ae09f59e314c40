#!/usr/bin/env python3
"""Write docs/recipes.md: published runs at their real sizes, planned, and counted by the dry run of the fullest rank.

python tools/write_recipes_page.py            # counts all recipes of tools/recipes.yaml, which takes minutes
python tools/write_recipes_page.py GPT-OSS    # counts this one, and keeps what the page says of the others

Tests plan every recipe again, and count some, and compare them with the page.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from megapipe.api.config import Config  # noqa: E402
from megapipe.api.planning import make_plan  # noqa: E402
from megapipe.extras.dry_run.rank import count_rank  # noqa: E402
from megapipe.extras.dry_run.run import difference_text  # noqa: E402
from megapipe.formatting import bytes_text  # noqa: E402
from megapipe.plan.hardware import hardware_named  # noqa: E402
from megapipe.plan.memory import RankMemory, all_rank_memory  # noqa: E402
from megapipe.plan.run_plan import RunPlan  # noqa: E402
from megapipe.topology import all_coordinates  # noqa: E402
from tests.extras.dry_run.grids import read_for  # noqa: E402
from tools.write_flags_page import markdown_table  # noqa: E402

SOURCE, PAGE = REPOSITORY / "tools" / "recipes.yaml", REPOSITORY / "docs" / "recipes.md"
RANKS_PER_NODE = 8
RUN = "--device cuda --mock-data --train-iters 100000 --lr 1e-4"
HEADER = (
    *("recipe", "GPUs", "grid", "parameters (active)", "published", "rank", "planned", "seconds"),
    *("counted", "difference", "seconds"),
)
PLANNED, COUNTED = slice(0, 7), slice(8, 10)  # columns, without the seconds
HEAD = """# Published runs at their real sizes

The recipes of [composition.md](composition.md) with the models, numbers of GPUs and grids of public sources. Planned is
the memory of the fullest rank by `megapipe plan`, counted that of the real code of this rank in a dry run: tensors have
shapes and no values, and are kept as CUDA's kernels keep them ([planner.md](planner.md)). The seconds are those of plan
and dry run, on one core of a busy machine (AMD EPYC). Nothing of this page has run on these GPUs.

The page is generated: `python tools/write_recipes_page.py`; the recipes are `tools/recipes.yaml`. Tests plan and count
them again.

"""


@dataclass(frozen=True)
class RealRun:
    """A recipe at its real size: the fields of tools/recipes.yaml."""

    name: str
    ranks: int
    gpu: str
    arguments: tuple[str, ...]  # the model and the run
    published: tuple[float, ...]  # billions of parameters: all, and in a mixture those that a token sees
    source: str
    grid: str
    note: str = ""

    def plan(self) -> RunPlan:
        return make_plan(Config.from_flags([*self.arguments, *RUN.split()]), self.ranks, RANKS_PER_NODE)


def real_runs() -> list[RealRun]:
    """Read tools/recipes.yaml."""
    given = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    return [_real_run(given["llama"], **fields) for fields in given["recipes"]]


def _real_run(llama: str, flags: str, published: list[float], config: str | None = None, **fields: Any) -> RealRun:
    base = shlex.split(llama) if config is None else ["--config", config]
    return RealRun(arguments=(*base, *shlex.split(flags)), published=tuple(published), **fields)


def fullest_rank(plan: RunPlan) -> tuple[int, RankMemory]:
    """Return the first global rank of the pp_rank with the most memory, and its memory."""
    memory = max(all_rank_memory(plan), key=lambda each: each.total)
    return next(rank for rank, place in all_coordinates(plan.topology) if place.pp_rank == memory.pp_rank), memory


def planned_cells(run: RealRun, plan: RunPlan, rank: int, memory: RankMemory) -> tuple[str, ...]:
    """Return the columns of the plan."""
    sizes = {axis: getattr(plan.topology, axis) for axis in ("tp", "cp", "pp", "ep", "dp")}
    grid = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    counts = [sum(spec.num_elements for spec in plan.specs), plan.active_parameters]
    found, published = ([_billions(count) for count in of] for of in (counts, [1e9 * each for each in run.published]))
    of_tokens = f" ({found[1]})" if plan.model.has_experts else ""
    return (
        run.name,
        f"{run.ranks:,} {run.gpu}",
        ", ".join([*grid, plan.schedule_name] if plan.topology.pp > 1 else grid),
        f"{found[0]}{of_tokens}",
        published[0] + "".join(f" ({each})" for each in published[1:]),
        f"{rank:,}",
        bytes_text(memory.total),
    )


def _billions(count: float) -> str:
    return f"{count / 1e9:.4g} B"


def counted_cells(plan: RunPlan, rank: int, memory: RankMemory) -> tuple[str, ...]:
    """Return the columns of the dry run."""
    counted = count_rank(plan, rank, read_for(plan)).peak
    return bytes_text(counted), difference_text(memory.total, counted)


def rows_of_page() -> dict[str, tuple[str, ...]]:
    """Return the cells of every recipe on the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines if line.startswith("|")]
    return {row[0]: row for row in rows if len(row) == len(HEADER)}


def main(names: Sequence[str]) -> None:
    """Plan all recipes, count those of these names, or all, and write the page."""
    runs, known, rows = real_runs(), rows_of_page(), []
    for run in runs:
        if names and run.name not in names:
            rows.append(known[run.name])
            continue
        started = time.perf_counter()
        plan = run.plan()
        rank, memory = fullest_rank(plan)
        planned, planned_at = planned_cells(run, plan, rank, memory), time.perf_counter()
        counted = counted_cells(plan, rank, memory)
        seconds = planned_at - started, time.perf_counter() - planned_at
        rows.append((*planned, f"{seconds[0]:.1f}", *counted, f"{seconds[1]:.0f}"))
        print(*rows[-1], sep=" | ", flush=True)
    PAGE.write_text(page(runs, rows), encoding="utf-8")


def page(runs: Sequence[RealRun], rows: Sequence[tuple[str, ...]]) -> str:
    """Return docs/recipes.md."""
    memory = {run.gpu: bytes_text(hardware_named(run.gpu).memory_bytes) for run in runs}
    gpus = ", ".join(f"{name} {size}" for name, size in memory.items())
    notes = "\n".join(f"- {run.name}: {run.note}" for run in runs if run.note)
    flags = [(run.name, f"`{shlex.join(run.arguments)}`", run.source, run.grid) for run in runs]
    return (
        f"{HEAD}{markdown_table(HEADER, rows)}\nMemory of a GPU: {gpus}.\n\n{notes}\n\n## Flags and sources\n\n"
        f"`megapipe plan --world-size N --ranks-per-node {RANKS_PER_NODE}` with these flags and `{RUN}`.\n\n"
        f"{markdown_table(('recipe', 'flags', 'sizes', 'grid'), flags)}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

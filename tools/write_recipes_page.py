#!/usr/bin/env python3
"""Write docs/recipes.md: the shipped configurations as planned, and published runs as planned and counted.

python tools/write_recipes_page.py            # counts all recipes of tools/recipes.yaml, which takes minutes
python tools/write_recipes_page.py GPT-OSS    # counts this one, and keeps what the page says of the others
python tools/write_recipes_page.py configs    # plans configs/*.yaml in seconds, and keeps the published runs

Every form plans configs/*.yaml. Tests plan all of it again, count some recipes, and compare them with the page.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from megapipe.api.config import Config  # noqa: E402
from megapipe.api.planning import make_plan  # noqa: E402
from megapipe.config.parallel import strategy_of  # noqa: E402
from megapipe.errors import ConfigError  # noqa: E402
from megapipe.extras.dry_run.rank import count_rank, random_reader  # noqa: E402
from megapipe.extras.dry_run.run import difference_text  # noqa: E402
from megapipe.formatting import bytes_text  # noqa: E402
from megapipe.plan.hardware import hardware_named  # noqa: E402
from megapipe.plan.memory import RankMemory, all_rank_memory  # noqa: E402
from megapipe.plan.run_plan import RunPlan  # noqa: E402
from megapipe.plan.step_time import predict_step  # noqa: E402
from megapipe.topology import all_coordinates  # noqa: E402
from tools.write_flags_page import markdown_table  # noqa: E402

SOURCE, PAGE = REPOSITORY / "tools" / "recipes.yaml", REPOSITORY / "docs" / "recipes.md"
RANKS_PER_NODE = 8
GIB = 2**30
RUN = "--device cuda --mock-data --train-iters 100000 --lr 1e-4"
CONFIGS = REPOSITORY / "configs"
HEADER = ("recipe", "GPUs", "layout", "parameters (active)", "planned GiB", "difference", "source of the sizes")
PLANNED, DIFFERENCE = slice(0, 5), 5  # columns
SHIPPED_HEADER = (
    "configuration",
    "parameters",
    "GPUs",
    "layout",
    "GiB",
    "seconds a step",
    "tokens/s a GPU",
)
GPUS = {"deepseek_v3": "h800", "gpt3_175b": "a100-80", "quickstart": "cpu", "stdlib_llama": "cpu"}
OTHER_GPU = "h100"  # of the configurations that are not in GPUS
MORE_FLAGS = dict.fromkeys(("quickstart", "quickstart_gpu", "stdlib_llama"), ("--vocab-size", "2048"))
SHARDED = {"optim_grads": "ZeRO-2", "optim_grads_params": "ZeRO-3"}
HEAD = """# Recipes

Nothing on this page has run on a GPU. Read the plan of a configuration before you start it:

```bash
megapipe plan --world-size 8 --gpu h100 --device cuda --config configs/llama3_8b.yaml
```

## Shipped configurations

GiB are those of the fullest rank. Steps are predicted ([time_model.md](time_model.md)) for the batch of the file. They
are too short for gpt2_124m and quickstart_gpu, since the model leaves out the launches of small kernels.

"""
PUBLISHED = """
DeepSeek-V3 is planned for the H800 of its report and GPT-3 for the A100 of arXiv:2104.04473. The other kinds of GPU
are our choice.

## Published runs

These are published runs at the sizes of their sources; `tools/recipes.yaml` has the flags, all sources, and whether a
layout was published or is our choice. Planned is the memory of the fullest rank. A dry run counts the same rank with
the code that trains ([without_gpu.md](without_gpu.md)), and the difference is counted against planned. Parameters are
within 2 % of the published number, active ones within 7 %.

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


def planned_cells(run: RealRun, plan: RunPlan, memory: RankMemory) -> tuple[str, ...]:
    """Return the columns of the plan of a published run."""
    return run.name, f"{run.ranks:,} {run.gpu}", layout_text(plan), parameters_text(plan), gib_text(memory)


def layout_text(plan: RunPlan) -> str:
    """Return the axes of more than one rank, and what is sharded and which schedule runs where there is a choice."""
    sizes = {axis: getattr(plan.topology, axis) for axis in ("tp", "cp", "pp", "ep", "dp")}
    words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    words += filter(None, [SHARDED.get(strategy_of(plan.config.parallel))])
    return " ".join([*words, plan.schedule_name] if plan.topology.pp > 1 else words) or "one rank"


def parameters_text(plan: RunPlan) -> str:
    """Return the number of parameters, and with experts that of those that a token sees."""
    counts = [sum(spec.num_elements for spec in plan.specs), *[plan.active_parameters] * plan.model.has_experts]
    texts = [f"{count / 1e9:.4g}B" if count >= 1e9 else f"{count / 1e6:.4g}M" for count in counts]
    return texts[0] + "".join(f" ({text})" for text in texts[1:])


def gib_text(memory: RankMemory) -> str:
    """Return the memory of a rank in GiB, without the unit."""
    return f"{memory.total / GIB:.3g}"


def difference_cell(plan: RunPlan, rank: int, memory: RankMemory) -> str:
    """Return the difference of the dry run from the plan."""
    return difference_text(memory.total, count_rank(plan, rank, random_reader(plan)).peak)


def shipped_rows() -> list[tuple[str, ...]]:
    """Plan every file of configs/, and return its row."""
    return [shipped_row(path) for path in sorted(CONFIGS.glob("*.yaml"))]


def shipped_row(path: Path) -> tuple[str, ...]:
    """Return the row of a shipped configuration: planned for the ranks of its first line, predicted unless on a CPU."""
    name = path.stem
    world = re.match(r"# (\d+) ranks?(?:, (\d+) a node)?\b", path.read_text(encoding="utf-8"))
    if world is None:
        raise ConfigError(f"{path}: the first line has to begin with the ranks, as in '# 64 ranks, 8 a node: ...'")
    gpu, ranks, per_node = GPUS.get(name, OTHER_GPU), int(world[1]), int(world[2]) if world[2] else None
    files = [CONFIGS / "quickstart.yaml", path] if name == "quickstart_gpu" else [path]
    flags = [word for each in files for word in ("--config", str(each))]
    device = "cpu" if gpu == "cpu" else "cuda"
    config = Config.from_flags([*flags, *MORE_FLAGS.get(name, ()), "--device", device])
    plan = make_plan(config, ranks, per_node)
    speed = ("", "")
    if gpu != "cpu":
        time = predict_step(plan, hardware_named(gpu))
        speed = f"{time.seconds:.3g}", f"{time.tokens_per_second / ranks:,.0f}"
    return (
        *(name, parameters_text(plan), f"{ranks:,} {gpu}", layout_text(plan)),
        *(gib_text(fullest_rank(plan)[1]), *speed),
    )


def rows_of_page() -> dict[str, tuple[str, ...]]:
    """Return the cells of every published run on the page."""
    text = PAGE.read_text(encoding="utf-8").partition("## Published runs")[2] if PAGE.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines]
    return {row[0]: row for row in rows if len(row) == len(HEADER)}


def main(names: Sequence[str]) -> None:
    """Plan configs/*.yaml, plan and count the recipes of these names, or all, and write the page."""
    runs, known, rows = real_runs(), rows_of_page(), []
    if unknown := set(names) - {run.name for run in runs} - {CONFIGS.name}:
        raise SystemExit(f"error: {sorted(unknown)[0]!r} is no recipe; give {CONFIGS.name} or names of {SOURCE.name}")
    for run in runs:
        if names and run.name not in names:
            rows.append(known[run.name])
            continue
        plan = run.plan()
        rank, memory = fullest_rank(plan)
        cells = planned_cells(run, plan, memory)
        rows.append((*cells, difference_cell(plan, rank, memory), short_source(run)))
        print(*rows[-1], sep=" | ", flush=True)
    PAGE.write_text(page(runs, rows, shipped_rows()), encoding="utf-8")


def short_source(run: RealRun) -> str:
    """Return the first of the sources of a model's sizes."""
    return re.split(r"[,;]| and ", run.source)[0]


def page(runs: Sequence[RealRun], rows: Sequence[tuple[str, ...]], shipped: Sequence[tuple[str, ...]]) -> str:
    """Return docs/recipes.md."""
    gpus = {run.gpu for run in runs} | {OTHER_GPU, *GPUS.values()} - {"cpu"}
    sizes = ", ".join(f"{name} {bytes_text(hardware_named(name).memory_bytes)}" for name in sorted(gpus))
    notes = "\n".join(f"- {run.name}: {run.note}" for run in runs if run.note)
    return (
        f"{HEAD}{markdown_table(SHIPPED_HEADER, shipped)}\nMemory of a GPU: {sizes}.\n"
        f"{PUBLISHED}{markdown_table(HEADER, rows)}\n{notes}\n\n"
        "`python tools/write_recipes_page.py` writes this page.\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

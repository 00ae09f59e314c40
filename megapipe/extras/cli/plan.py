"""`megapipe plan`: the plan of a configuration on any number of ranks.

It is computed on a laptop in tenths of a second, without torch.
It is the same as `pretrain_gpt.py --plan --world-size N`, but the configuration may be incomplete.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megapipe.config.load import LoadedConfig, load_config
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli import layout_search
from megapipe.extras.cli.pretrain import with_vocabulary
from megapipe.extras.search.search_report import megatron_text
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan

HELP = """\
usage: megapipe plan --world-size N [--ranks-per-node M] [--config FILE.yaml] [flags of pretrain_gpt.py]

  megapipe plan --world-size 16384 --ranks-per-node 8 --config configs/llama3_405b.yaml

Shows the grid with its nodes, the layers and parameters of each stage and their sum, batch, FLOPs, the expected bubble
and the memory of every rank; or why it cannot run. Data, length and learning rate may be omitted. --ranks-per-node: by
default all ranks are on one node.

usage: megapipe plan --gpus N (--gpu NAME | --hardware FILE) [--objective time|gpus|cost] [--estimator megatron]
                     [--output FILE] [--json] [--config FILE.yaml] [flags of pretrain_gpt.py]

  megapipe plan --gpus 1024 --gpu a100-80 --config configs/gpt3_175b.yaml --output best.yaml

Searches for a layout instead and predicts its step time and memory; see docs/planner.md. Parallel sizes, schedule,
microbatch, recompute, sequence parallelism, distributed optimizer and partition that are given as flags are kept, those
in a YAML file are not.

  --objective time    the fastest step on N accelerators (default)
  --objective gpus    the fewest accelerators up to N that fit; with --tokens-per-second X the fewest that reach it
  --objective cost    the cheapest tokens on N, N / 2, ...; --price P: per accelerator and hour;
                      --tokens-per-second X as above
  --estimator megatron  also print Megatron-LM's estimate of the memory (also with --world-size)
  --output FILE       write the best layout as a configuration
  --json              print everything as JSON
"""


def main(arguments: Sequence[str]) -> int:
    """Print the plan and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if arguments else 2
    try:
        if layout_search.asks_for_search(arguments):
            return layout_search.run(arguments)
        by_megatron, rest = layout_search.take_estimator(arguments)
        loaded = load_config(["--plan", *rest], is_job=False)
        if loaded.requests.world_size is None:
            raise ConfigError("megapipe plan needs --world-size N, the number of ranks to plan for")
        plan = _resolved(loaded, loaded.requests.world_size, loaded.requests.ranks_per_node)
        print(plan_text(plan))
        if by_megatron:
            print(megatron_text(plan))
    except MegapipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def plan_for(arguments: Sequence[str], num_ranks: int, ranks_per_node: int | None = None) -> RunPlan:
    """Resolve flags and YAML files on that many ranks. Raises ConfigError."""
    return _resolved(load_config(arguments, is_job=False), num_ranks, ranks_per_node)


def _resolved(loaded: LoadedConfig, num_ranks: int, ranks_per_node: int | None) -> RunPlan:
    return resolve(with_vocabulary(loaded.config), num_ranks, ranks_per_node)

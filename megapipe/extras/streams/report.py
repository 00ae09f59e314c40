"""`check_and_report`: the smallest step of a loaded configuration under the checker, and what is printed of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.load import LoadedConfig
from megapipe.extras.streams.order import NeverBeginsError
from megapipe.extras.streams.ranks import Checked, check
from megapipe.extras.streams.smallest import smallest
from megapipe.formatting import text_table
from megapipe.plan.resolve import resolve

NUM_STEPS = 2
STEPS_OF_GRAPHS = 3  # CUDA graphs are captured in the steps before
EAGER = "compiled regions run uncompiled: what they launch is in the order of their source"


def check_and_report(loaded: LoadedConfig) -> bool:
    """Check the smallest step of a configuration on CUDA devices, print the result, and return True if there are races
    or a hang.
    """
    requests, gpu = loaded.requests, loaded.config.gpu
    assert requests.world_size is not None
    training, has_graphs = dataclasses.replace(loaded.config.training, device="cuda"), gpu.cuda_graph_impl != "none"
    if has_graphs:
        gpu = dataclasses.replace(gpu, cuda_graph_warmup_steps=1)
    config = dataclasses.replace(with_vocabulary(loaded.config), training=training, gpu=gpu)
    small, cut = smallest(config, resolve(config, requests.world_size, requests.ranks_per_node))
    if has_graphs:
        cut.append("1 step before CUDA graphs are captured")
    if small.config.kernels.compile_blocks != "off":
        cut.append(EAGER)
    try:
        found = check(small, STEPS_OF_GRAPHS if has_graphs else NUM_STEPS)
    except NeverBeginsError as error:
        print(f"HANG  {error}")
        return True
    print("\n".join(report(found, cut)))
    return bool(found.races)


def report(found: Checked, cut: list[str]) -> Iterator[str]:
    """Yield the lines that are printed."""
    yield (
        f"checked  {len(found.ranks)} ranks (the pipeline of rank 0), {found.num_operations:,} operations on "
        f"{found.num_queues} streams in {found.seconds:.1f} s"
    )
    for line in cut:
        yield f"  cut    {line}"
    rows = [("collective or message", "launched", "with products before its wait")]
    for place, products in sorted(found.overlaps.items()):
        rows.append((place, f"{len(products):,}", f"{sum(count > 0 for count in products):,}"))
    yield from text_table(rows, indent=2)
    if not found.races:
        yield "no race"
    for race in found.races:
        yield f"RACE  {race.earlier}\n  and {race.later}"

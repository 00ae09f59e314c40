"""Cheap runs on the user's own cluster that decide between the best layouts of a search."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megapipe.config.config import Config, fields_by_key
from megapipe.config.flags import flag_words
from megapipe.config.problems import divisors
from megapipe.errors import ConfigError
from megapipe.extras.search.search import Candidate, Found, ShortSteps
from megapipe.plan.hardware import Hardware

RUNS = 2  # layouts that are run, the best first
ITERATIONS = 12


class Experiment(NamedTuple):
    """A command, and what it decides."""

    command: str
    decides: str

    @property
    def text(self) -> str:
        return f"{self.decides}:\n             {self.command}"


def experiments(found: Found, config: Config, words: Sequence[str], hardware: Hardware) -> Iterator[Experiment]:
    """Yield the measurement of kernels and links, and short runs of the best layout and of the next one that differs in
    more than recompute. words: the flags of the configuration.
    """
    if len(found.best) < 2:
        return
    two_nodes = _launch(min(found.num_gpus, 2 * hardware.ranks_per_node), hardware)
    yield Experiment(
        f"{two_nodes} -m megapipe calibrate --output here.yaml",
        "kernels and links as they are here, for the same search with --hardware here.yaml instead of --gpu",
    )
    for place, candidate in enumerate(found.best[:RUNS], 1):
        small = _smallest(candidate, config, hardware)
        if small is not None:
            num_gpus, batch, seconds = small
            flags = layout_flags(config, candidate.layout.applied_to(config))
            run = ["--micro-batch-size", str(candidate.layout.micro_batch_size), "--global-batch-size", str(batch)]
            run += ["--mock-data", "--train-iters", str(ITERATIONS)]
            run += ["--lr-warmup-iters", "0"] if config.optimizer.lr_warmup_iters else []
            yield Experiment(
                f"{_launch(num_gpus, hardware)} pretrain {shlex.join([*words, *flags, *run])}",
                f"layout {place} on {num_gpus:,} GPUs, with as few replicas as fit, predicted {seconds:.3g} s a step",
            )


def _launch(num_gpus: int, hardware: Hardware) -> str:
    nodes, here = -(-num_gpus // hardware.ranks_per_node), min(num_gpus, hardware.ranks_per_node)
    several = f"--nnodes {nodes} --node-rank R --master-addr HOST " if nodes > 1 else ""
    return f"megapipe launch {several}--nproc-per-node {here}"


def _smallest(candidate: Candidate, config: Config, hardware: Hardware) -> tuple[int, int, float] | None:
    """Return the fewest accelerators on which the layout fits with fewer replicas and as many microbatches, the global
    batch and the predicted seconds; None if there are none.
    """
    layout, full = candidate.layout, candidate.plan.topology
    batch = config.training.global_batch_size
    assert batch is not None
    for dp in divisors(full.dp):
        num_gpus, own = full.world_size // full.dp * dp, batch // full.dp * dp
        training = config.training.with_batch(own)
        small = dataclasses.replace(config, training=training)
        try:
            steps = ShortSteps(small, num_gpus, hardware.on(num_gpus))
            seconds, need = steps.seconds(layout), steps.need(layout)
        except ConfigError:  # ep does not divide so few ranks
            continue
        if need <= hardware.usable_bytes:
            return num_gpus, own, seconds
    return None


def layout_flags(config: Config, changed: Config) -> list[str]:
    """Return the flags that change a configuration into another one."""
    words: list[str] = []
    for key, field in fields_by_key().items():
        section, name = key.split(".")
        before, after = (getattr(getattr(each, section), name) for each in (config, changed))
        if before != after and name != "micro_batch_size":
            words += flag_words(field, after)
    return words

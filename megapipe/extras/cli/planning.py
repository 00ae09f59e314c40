"""The plan of a configuration with the vocabulary of its tokenizer, and the options that name the hardware."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.changes import model_changes
from megapipe.checkpoint.folder import find_checkpoint, vocabulary_of
from megapipe.config.config import Config
from megapipe.config.flags import Requests
from megapipe.config.load import LoadedConfig, load_config
from megapipe.config.rules.check import Rule
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.frame import option
from megapipe.plan.hardware import Hardware, hardware_named, read_hardware
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.world_rules import world_rules

HARDWARE_OPTIONS = (
    option("--gpu", "the accelerator, by its name in the hardware table (docs/planner.md)", metavar="NAME"),
    option("--hardware", "the accelerator and its links, as a YAML file", type=Path),
)


def with_vocabulary(config: Config) -> Config:
    """Fill in the tokenizer's vocabulary size if it is not given. Raises ConfigError if the given size is too small."""
    tokenizer = tokenizer_of(config)
    if tokenizer is None:
        return config
    given = config.model.vocab_size
    if config.data.tokenizer_type == "NullTokenizer":  # it is built from --vocab-size, and has one more token
        given = None
    if given is not None and given < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {given} is smaller than the {tokenizer.vocab_size} tokens of the tokenizer "
            f"{config.data.tokenizer_model}; leave it out"
        )
    model = dataclasses.replace(config.model, vocab_size=given or tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def model_of_checkpoint(config: Config) -> Iterator[str]:
    """Yield how the model differs from the one in the checkpoint of --load, for a run that is refused anyway: layers
    that do not divide over the ranks may be layers that should be others.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is None or checkpoint.use_checkpoint_args or checkpoint.allow_changed_model:
        return
    if config.model.head_size() < 1:  # refused by a rule on its own
        return
    try:
        folder = find_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
        if folder is None:
            return
        vocabulary = vocabulary_of(folder)  # this run's may be unknown yet
        found = model_changes(folder, dataclasses.replace(config.model, vocab_size=vocabulary))
    except MegapipeError:  # another model is not what is wrong
        return
    for line in found:
        yield f"{line} ({folder.path}); --use-checkpoint-args takes the model from there"


def rules_of_world(requests: Requests) -> tuple[Rule, ...]:
    """Return the rules of the world that --world-size gives, none without."""
    if requests.world_size is None:
        return ()
    return world_rules(requests.world_size, requests.ranks_per_node)


def planned(loaded: LoadedConfig, num_ranks: int, ranks_per_node: int | None) -> RunPlan:
    """Resolve a loaded configuration on that many ranks. Raises ConfigError."""
    return resolve(with_vocabulary(loaded.config), num_ranks, ranks_per_node)


def plan_for(arguments: Sequence[str], num_ranks: int, ranks_per_node: int | None = None) -> RunPlan:
    """Resolve flags and YAML files on that many ranks; the job may be incomplete. Raises ConfigError."""
    return planned(load_config(arguments, is_job=False), num_ranks, ranks_per_node)


def hardware_given(own: argparse.Namespace) -> Hardware | None:
    """Return the hardware of HARDWARE_OPTIONS, None if neither is given. Raises ConfigError."""
    if own.gpu is not None and own.hardware is not None:
        raise ConfigError("--gpu and --hardware both give the accelerator; give one of the two")
    if own.hardware is not None:
        return read_hardware(own.hardware)
    return None if own.gpu is None else hardware_named(own.gpu)

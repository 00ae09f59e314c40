"""`pretrain_gpt.py`: flags and YAML -> plan -> training, or one of --print-config, --plan, --dry-run, --verify-grid.

Invalid configurations are refused before torch is imported and any process group is created.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.folder import checkpoint_config
from megapipe.config.config import Config
from megapipe.config.load import LoadedConfig, load_config, with_checkpoint_model
from megapipe.config.megatron_flags import differences_line
from megapipe.environment import Environment, read_environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.failure import end_at_once, guarded
from megapipe.extras.cli.orphan import end_with_launcher
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.schedule_choice import SCHEDULE_NAMES, check_schedule


def main(argv: Sequence[str] | None = None) -> int:
    """Run pretraining on this rank and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        found = read_environment()
    except ConfigError as error:  # the rank is unknown, so every rank prints
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    end_with_launcher(found)
    code = guarded(lambda: _pretrain(arguments, found), found.global_rank, found.world_size)
    if code and found.is_distributed:
        end_at_once(code)
    return code


def _pretrain(arguments: list[str], environment: Environment) -> int:
    loaded = load_config(arguments, schedules=SCHEDULE_NAMES)
    if loaded.config.checkpoint.use_checkpoint_args:
        loaded = _with_model_of_checkpoint(loaded)
    check_schedule(loaded.config)
    if loaded.requests.print_config:
        if environment.global_rank == 0:
            print(_config_text(loaded, *_world(loaded, environment)), end="")
        return 0
    if loaded.requests.dry_run and environment.is_distributed:
        raise ConfigError(
            "--dry-run needs no other ranks: start it without torchrun or srun, with --world-size N for the ranks "
            "there will be"
        )
    plan = resolve(with_vocabulary(loaded.config), *_world(loaded, environment))
    if environment.global_rank == 0:
        print("\n".join([*loaded.remarks, plan_text(plan), f"  flags    {differences_line()}"]), flush=True)
    if loaded.requests.plan:
        return 0
    if loaded.requests.dry_run:
        from megapipe.extras.dry_run.run import dry_run

        return dry_run(plan, loaded.requests.rank)
    if loaded.requests.verify_grid is not None:
        from megapipe.extras.verify.parity import verify

        return verify(plan, environment, loaded.requests.verify_grid)
    from megapipe.extras.cli.samples import print_samples
    from megapipe.train.run import pretrain

    return pretrain(plan, environment, loaded.text(plan.config), print_samples, loaded.remarks)


def _world(loaded: LoadedConfig, environment: Environment) -> tuple[int, int | None]:
    """Return (ranks, ranks per node or None for all): of the started ranks, or with --world-size of the plan."""
    if loaded.requests.world_size is not None:
        return loaded.requests.world_size, loaded.requests.ranks_per_node
    return environment.world_size, environment.local_world_size


def _config_text(loaded: LoadedConfig, world_size: int, ranks_per_node: int | None) -> str:
    """Return the configuration as YAML, with derived values if it fits this number of ranks."""
    try:
        return loaded.text(resolve(with_vocabulary(loaded.config), world_size, ranks_per_node).config)
    except ConfigError:
        return loaded.text()


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
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=given or tokenizer.vocab_size)
    )


def _with_model_of_checkpoint(loaded: LoadedConfig) -> LoadedConfig:
    root = loaded.config.checkpoint.load
    if root is None:
        raise ConfigError("--use-checkpoint-args takes the model from a checkpoint; give it with --load DIR")
    saved, folder = checkpoint_config(Path(root), loaded.config.checkpoint.ckpt_step)
    return with_checkpoint_model(loaded, saved, str(folder))

"""A model from a checkpoint on a grid of ranks, for `generate` and `evaluate`: common flags, plan, runtime."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.folder import TOKENIZER_NAME, find_checkpoint, saved_config
from megapipe.config.config import Config
from megapipe.config.fields import nearest
from megapipe.config.files import TOKENIZER_TYPES, DataConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import DEVICES, TrainingConfig
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment, read_environment
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.failure import end_at_once, guarded
from megapipe.extras.cli.orphan import end_with_launcher
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megapipe.assembly.runtime import InferenceRuntime


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint, planned on the ranks of this process. folder: of the checkpoint."""

    folder: Path
    plan: RunPlan
    tokenizer: Tokenizer | None
    environment: Environment
    device: str

    def runtime(self) -> InferenceRuntime:
        """Join the other ranks, build the stages and load the weights."""
        from megapipe.assembly.runtime import InferenceRuntime
        from megapipe.checkpoint.folder import open_folder
        from megapipe.comm.bootstrap import start
        from megapipe.comm.groups import build_process_groups

        world = start(self.environment, "auto", device=self.device)
        groups = build_process_groups(self.plan.topology, world.global_rank, world.backend, world.timeout_seconds)
        runtime = InferenceRuntime(self.plan, groups, world.device)
        runtime.load_weights(open_folder(self.folder))
        return runtime


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and its grid."""
    model = parser.add_argument_group("model")
    model.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints, as pretraining's --save")
    model.add_argument(
        "--ckpt-step", type=int, metavar="N", help="step to load (default: the newest complete checkpoint)"
    )
    model.add_argument(
        "--dtype", choices=TENSOR_DTYPES, help="weights and activations (default: as the model was trained)"
    )
    model.add_argument("--device", choices=DEVICES, default="auto", help="default: cuda if there is a GPU")
    model.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, help="default: the tokenizer saved with the checkpoint"
    )
    model.add_argument("--tokenizer-model", metavar="PATH", help="file or folder of that tokenizer")
    grid = parser.add_argument_group("grid; start the ranks with `megapipe launch` or torchrun")
    grid.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="TP", help="default: 1")
    grid.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="PP", help="default: 1")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse flags with - or _. Raises ConfigError for an unknown flag, with the nearest one."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            if flag not in flags:
                raise ConfigError(f"{flag} is not a flag of {parser.prog}{nearest(flag, flags) or '; see --help'}")
        words.append(flag + equals + value)
    try:
        return parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None


def open_model(
    arguments: argparse.Namespace, environment: Environment, micro_batch_size: int, seq_length: int | None = None
) -> SavedModel:
    """Plan a saved model on the ranks that were started. seq_length: instead of the trained one.

    Raises ConfigError, CheckpointError, DataError.
    """
    found = find_checkpoint(Path(arguments.load), arguments.ckpt_step)
    if found is None:
        raise CheckpointError(f"--load {arguments.load} holds no checkpoint")
    saved = saved_config(found)
    model = saved.model if seq_length is None else _of_length(saved.model, seq_length)
    data = _tokenizer_flags(arguments, saved.data, found.path)
    config = Config(
        model=model,
        parallel=ParallelConfig(
            tensor_model_parallel_size=arguments.tensor_model_parallel_size,
            pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        ),
        training=TrainingConfig(micro_batch_size=micro_batch_size, train_iters=1, device=arguments.device),
        precision=PrecisionConfig(dtype=arguments.dtype or saved.precision.dtype),
        data=data,
    )
    tokenizer = tokenizer_of(config, is_resolved=True)
    if tokenizer is not None and tokenizer.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"--tokenizer-type {tokenizer.name} has {tokenizer.vocab_size} tokens, the model {found.path} only "
            f"{model.vocab_size}; give the tokenizer that it was trained with"
        )
    plan = resolve(config, environment.world_size, environment.local_world_size)
    return SavedModel(found.path, plan, tokenizer, environment, arguments.device)


def run_on_all_ranks(name: str, body: Callable[[Environment], int]) -> int:
    """Run a subcommand on this rank and return the exit code; an error of all ranks is printed once.

    With several ranks, an error ends the process at once.
    """
    try:
        environment = read_environment()
    except ConfigError as error:
        print(f"{name} cannot run: {error}", file=sys.stderr)
        return error.exit_code
    end_with_launcher(environment)
    code = guarded(lambda: body(environment), environment.global_rank, environment.world_size)
    if environment.is_distributed:
        if code:
            end_at_once(code)
        from megapipe.comm.bootstrap import shutdown

        shutdown(0)
    return code


def _of_length(model: ModelConfig, seq_length: int) -> ModelConfig:
    positions = model.max_position_embeddings or model.seq_length
    if not 1 <= seq_length <= positions:
        raise ConfigError(
            f"--seq-length {seq_length} must be in 1 .. {positions}, the positions that the model was trained for"
        )
    return dataclasses.replace(model, seq_length=seq_length, max_position_embeddings=positions)


def _tokenizer_flags(arguments: argparse.Namespace, saved: DataConfig, folder: Path) -> DataConfig:
    """Return the tokenizer's files: from the flags, else the copy in the checkpoint, else those of the training run."""
    if arguments.tokenizer_type is not None:
        return DataConfig(tokenizer_type=arguments.tokenizer_type, tokenizer_model=arguments.tokenizer_model)
    beside = folder / TOKENIZER_NAME
    model = arguments.tokenizer_model or (str(beside) if beside.exists() else saved.tokenizer_model)
    files = (None, None) if model is not None else (saved.vocab_file, saved.merge_file)
    return DataConfig(
        tokenizer_type=saved.tokenizer_type, tokenizer_model=model, vocab_file=files[0], merge_file=files[1]
    )

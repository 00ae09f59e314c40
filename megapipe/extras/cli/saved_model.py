"""A model from a checkpoint on a grid of ranks, for `generate` and `evaluate`: common options, plan, runtime."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.folder import TOKENIZER_NAME, find_checkpoint, saved_config
from megapipe.config.config import Config
from megapipe.config.files import TOKENIZER_TYPES, DataConfig
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import DEVICES, TrainingConfig
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.frame import option
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megapipe.assembly.runtime import InferenceRuntime

MODEL_OPTIONS = (
    "model",
    option("--load", required=True, metavar="DIR", help="directory of checkpoints, as pretraining's --save"),
    option("--ckpt-step", type=int, metavar="N", help="step to load (default: the newest complete checkpoint)"),
    option("--dtype", choices=TENSOR_DTYPES, help="weights and activations (default: as the model was trained)"),
    option("--device", choices=DEVICES, default="auto", help="default: cuda if there is a GPU"),
    option("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: the tokenizer saved with the checkpoint"),
    option("--tokenizer-model", metavar="PATH", help="file or folder of that tokenizer"),
    "grid; start the ranks with `megapipe launch` or torchrun",
    option("--tensor-model-parallel-size", type=int, default=1, metavar="TP", help="default: 1"),
    option("--pipeline-model-parallel-size", type=int, default=1, metavar="PP", help="default: 1"),
)


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint, planned on the ranks of this process. folder: of the checkpoint."""

    folder: Path
    plan: RunPlan
    tokenizer: Tokenizer | None
    environment: Environment
    device: str

    def required_tokenizer(self, instead: str = "") -> Tokenizer:
        """Return the tokenizer. instead: what could be given in place of one. Raises ConfigError without one."""
        if self.tokenizer is None:
            flags = f"--tokenizer-type and --tokenizer-model{instead}"
            raise ConfigError(f"{self.folder} was trained without a tokenizer: give {flags}")
        return self.tokenizer

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


def open_model(
    own: argparse.Namespace, environment: Environment, micro_batch_size: int, seq_length: int | None = None
) -> SavedModel:
    """Plan a saved model on the ranks that were started. seq_length: instead of the trained one.

    Raises ConfigError, CheckpointError, DataError.
    """
    found = find_checkpoint(Path(own.load), own.ckpt_step)
    if found is None:
        raise CheckpointError(f"--load {own.load} holds no checkpoint")
    saved = saved_config(found)
    model = saved.model
    if seq_length is not None:
        positions = model.max_position_embeddings or model.seq_length
        if not 1 <= seq_length <= positions:
            raise ConfigError(
                f"--seq-length {seq_length} must be in 1 .. {positions}, the positions that the model was trained for"
            )
        model = dataclasses.replace(model, seq_length=seq_length, max_position_embeddings=positions)
    config = Config(
        model=model,
        parallel=ParallelConfig(
            tensor_model_parallel_size=own.tensor_model_parallel_size,
            pipeline_model_parallel_size=own.pipeline_model_parallel_size,
        ),
        training=TrainingConfig(micro_batch_size=micro_batch_size, train_iters=1, device=own.device),
        precision=PrecisionConfig(dtype=own.dtype or saved.precision.dtype),
        data=_tokenizer_files(own, saved.data, found.path),
    )
    tokenizer = tokenizer_of(config, is_resolved=True)
    if tokenizer is not None and tokenizer.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"--tokenizer-type {tokenizer.name} has {tokenizer.vocab_size} tokens, the model {found.path} only "
            f"{model.vocab_size}; give the tokenizer that it was trained with"
        )
    plan = resolve(config, environment.world_size, environment.local_world_size)
    return SavedModel(found.path, plan, tokenizer, environment, own.device)


def _tokenizer_files(own: argparse.Namespace, saved: DataConfig, folder: Path) -> DataConfig:
    """Return the tokenizer's files: from the flags, else the copy in the checkpoint, else those of the training run."""
    if own.tokenizer_type is not None:
        return DataConfig(tokenizer_type=own.tokenizer_type, tokenizer_model=own.tokenizer_model)
    copy = folder / TOKENIZER_NAME
    model = own.tokenizer_model or (str(copy) if copy.exists() else saved.tokenizer_model)
    if model is not None:
        return DataConfig(tokenizer_type=saved.tokenizer_type, tokenizer_model=model)
    return DataConfig(tokenizer_type=saved.tokenizer_type, vocab_file=saved.vocab_file, merge_file=saved.merge_file)

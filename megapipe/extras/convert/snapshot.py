"""`Snapshot`: a model or a whole run, which every format is read into and written from. Tensors are read when
needed.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.rules.check import check
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.errors import CheckpointError
from megapipe.plan.resolve import resolve_model

DTYPES = {dtype.name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read from disk when needed. read: returns it as [shape] on the CPU and keeps nothing.

    Has the few methods of a Tensor that megapipe's writers call; only `detach` reads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def detach(self) -> Tensor:
        values = self.read()
        if tuple(values.shape) != self.shape or values.dtype != self.dtype:
            raise ValueError(f"read {values.dtype} {list(values.shape)}, expected {self.dtype} {list(self.shape)}")
        return values.contiguous()

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Return the tensor in another dtype, still unread."""
        return self if dtype == self.dtype else LazyTensor(self.shape, dtype, lambda: self.read().to(dtype))


@dataclass(frozen=True)
class Snapshot:
    """A run in megapipe's terms.

    config: its model section has vocab_size. tensors: by `key/parameter`, without vocabulary padding; 'master/'
    always, optimizer state if there is any. state: as in a manifest. files: tokenizer and other files to copy.
    extra_settings: of config.json, without effect on the model (such as ids of special tokens). remarks: for the
    user.
    """

    config: Config
    tensors: Mapping[str, LazyTensor]
    state: dict[str, Any]
    files: tuple[Path, ...] = ()
    extra_settings: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return int(self.state["training"]["step"])

    @property
    def weights(self) -> dict[str, LazyTensor]:
        """The weights by parameter name."""
        masters = ((name, tensor) for name, tensor in self.tensors.items() if name.startswith("master/"))
        return {name.removeprefix("master/"): tensor for name, tensor in masters}

    def cast(self, dtype: torch.dtype) -> Snapshot:
        """Return the snapshot with weights in another dtype; optimizer state keeps its dtype."""
        tensors = {
            name: tensor.to(dtype) if name.startswith("master/") else tensor for name, tensor in self.tensors.items()
        }
        name = DTYPE_NAMES[dtype]
        config = dataclasses.replace(self.config, precision=dataclasses.replace(self.config.precision, dtype=name))
        return dataclasses.replace(self, tensors=tensors, config=config, state=self.state | {"precision": name})

    def with_seq_length(self, seq_length: int) -> Snapshot:
        """Set the sequence length to train with. Raises ConfigError if it exceeds the model's positions."""
        config = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, seq_length=seq_length))
        check(config)
        return dataclasses.replace(self, config=config)


def unpadded(model: ModelConfig) -> ResolvedModelConfig:
    """Return the model with all derived sizes and no vocabulary padding: its shapes are those of a Snapshot's
    tensors.
    """
    return resolve_model(dataclasses.replace(model, padded_vocab_size=model.vocab_size), 1)


def fresh_state(precision: str) -> dict[str, Any]:
    """Return the manifest state of weights at step 0."""
    training = {"step": 0, "consumed_samples": 0, "consumed_tokens": 0, "skipped_steps": 0}
    grid = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "chunks": 1}
    return {
        "training": training,
        "optimizer": None,
        "random": None,
        "schedules": None,
        "precision": precision,
        "grid": grid,
    }


def check_tied(where: Path, name: str, head: LazyTensor, embedding: LazyTensor) -> None:
    """Raise CheckpointError unless the head, stored as `name`, equals the embedding to which it is tied."""
    if head.shape != embedding.shape or not torch.equal(head.detach(), embedding.detach()):
        raise CheckpointError(f"{where}: {name} differs from the word embedding, but the configuration ties them")


def check_nothing_left(where: Path, names: Sequence[str], model: str) -> None:
    """Raise CheckpointError if tensors of a checkpoint have no counterpart in the model. model: how to call it."""
    if names:
        raise CheckpointError(f"{where}: the tensor {first_of(names)} has no place in {model}")


def first_of(names: Sequence[str]) -> str:
    """Return the first name and how many follow."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


@contextmanager
def new_folder(folder: Path) -> Iterator[tuple[Disk, Path]]:
    """Create a folder atomically: yield a temporary one to write into, renamed at the end or removed on failure.

    Raises CheckpointError if `folder` exists or cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; converting never overwrites: choose another target")
    disk, temporary = Disk(), folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        disk.make_folder(temporary)
        try:
            yield disk, temporary
            disk.sync_folder(temporary)
            disk.rename(temporary, folder)
        except BaseException:
            with suppress(OSError):  # report the first failure
                disk.remove(temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror} (errno {error.errno})") from None

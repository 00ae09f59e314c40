"""`Snapshot`: a model or a whole run as every format is read into and written from; tensors are read when they are needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.resolved import ResolvedModelConfig
from megapipe.config.rules.check import check
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.plan.resolve import resolve_model

DTYPES = {dtype.name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk, or made of some there. read: gives it as [shape], contiguous, on the CPU, and keeps nothing.

    Has the few methods by which megapipe's writers look at values, of which `detach` alone reads.
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
            raise ValueError(f"read {values.dtype} {list(values.shape)}, announced {self.dtype} {list(self.shape)}")
        return values.contiguous()

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same in another dtype."""
        return self if dtype == self.dtype else LazyTensor(self.shape, dtype, lambda: self.read().to(dtype))


@dataclass(frozen=True)
class Snapshot:
    """tensors: by our `key/parameter` names without vocabulary padding; 'master/' always, moments where there are some.

    state: of a megapipe manifest. config: whose model section says vocab_size. files: tokenizer and other files to carry along.
    extra_settings: of config.json, that mean nothing to the model (ids of special tokens, say).
    remarks: what a person should know.
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
        """The weights alone, by parameter name."""
        return {
            name.removeprefix("master/"): tensor for name, tensor in self.tensors.items() if name.startswith("master/")
        }

    def cast(self, dtype: torch.dtype) -> Snapshot:
        """Weights in another dtype; moments stay as they are."""
        tensors = {
            name: tensor.to(dtype) if name.startswith("master/") else tensor for name, tensor in self.tensors.items()
        }
        precision = dataclasses.replace(self.config.precision, dtype=DTYPE_NAMES[dtype])
        config = dataclasses.replace(self.config, precision=precision)
        return dataclasses.replace(
            self, tensors=tensors, config=config, state=self.state | {"precision": DTYPE_NAMES[dtype]}
        )

    def with_seq_length(self, seq_length: int) -> Snapshot:
        """To be trained with another length of sequences. Raises ConfigError where the model's positions do not reach so far."""
        config = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, seq_length=seq_length))
        check(config)
        return dataclasses.replace(self, config=config)


def unpadded(model: ModelConfig) -> ResolvedModelConfig:
    """The model with all derived sizes and no vocabulary padding: the shapes of a Snapshot's tensors."""
    return resolve_model(dataclasses.replace(model, padded_vocab_size=model.vocab_size), 1)


def fresh_state(precision: str) -> dict[str, Any]:
    """The manifest's state of weights that no run of ours has trained."""
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

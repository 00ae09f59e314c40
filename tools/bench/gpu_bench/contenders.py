"""The contenders: each trains the same Llama on the same tokens, on one device.

A contender has `gradients` (forward and backward of all microbatches of a step; returns the mean loss as a tensor,
without waiting for it) and `update` (the optimizer, clipping included; returns the norm of the gradients). megapipe's
peers keep everything in `dtype`, moments too: less to move than megapipe's fp32 masters and gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gpu_bench.plain import PlainLlama
from gpu_bench.shapes import CLIP, LR, WEIGHT_DECAY, Shape, configuration
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups
from megapipe.config.config import Config
from megapipe.data.batch import Batch, DocumentRules
from megapipe.extras.convert.families import FAMILIES
from megapipe.extras.convert.tables import map_tensors
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.sharding.spec import ParamSpec
from megapipe.train.step import TrainStep

SEED = 1234


class Contender(Protocol):
    def gradients(self) -> Tensor: ...
    def update(self) -> float: ...


def draw_rows(shape: Shape) -> np.ndarray:
    """Return one global batch of random tokens, [sequences, s + 1]."""
    return np.random.default_rng(SEED).integers(0, shape.vocab, (shape.step_sequences, shape.seq + 1))


def draw_weights(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Return fp32 weights on the device under transformers' names; the same for all contenders."""
    torch.manual_seed(SEED)
    with device:
        model = PlainLlama(shape)
    for parameter in model.parameters():
        if parameter.ndim == 2:  # large enough for every part of the model to matter to the loss
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return {name: value.detach() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class Options:
    """Options of megapipe's contenders beyond dtype: fp8, and the functions that torch.compile fuses."""

    fp8_format: str | None = None
    fp8_recipe: str = "delayed"
    compile_pointwise: bool = False
    compiles: bool = True  # what a run compiles by default

    def applied_to(self, config: Config) -> Config:
        precision = config.precision
        if self.fp8_format is not None:
            precision = dataclasses.replace(precision, fp8_format=self.fp8_format, fp8_recipe=self.fp8_recipe)
        kernels = dataclasses.replace(config.kernels, compile_pointwise=self.compile_pointwise)
        if not self.compiles:
            kernels = dataclasses.replace(kernels, compile_loss=False, optimizer_impl="torch")
        return dataclasses.replace(config, precision=precision, kernels=kernels)

    def __str__(self) -> str:
        fp8 = "no fp8" if self.fp8_format is None else f"--fp8-format {self.fp8_format} --fp8-recipe {self.fp8_recipe}"
        off = "" if self.compiles else " --no-compile-loss --optimizer-impl torch"
        return fp8 + " --compile-pointwise" * self.compile_pointwise + off


class Megapipe:
    """megapipe as pretrain_gpt.py runs it: TrainingRuntime and TrainStep from a resolved configuration."""

    def __init__(
        self, shape: Shape, dtype: str, device: torch.device, weights: Mapping[str, Tensor], options: Options
    ) -> None:
        self.plan = resolve(options.applied_to(configuration(shape, dtype, device.type)), 1)
        rows = FAMILIES["LlamaForCausalLM"].rows
        placed = {entry.spec.name: entry for entry in map_tensors(rows, self.plan.config.model, "the benchmark")}

        def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
            entry = placed[spec.name]
            return entry.layout.join([weights[name] for name in entry.theirs]).clone()

        self.runtime = TrainingRuntime(self.plan, ProcessGroups.alone(), device, draw_slice=slice_of)
        self._step = TrainStep(self.runtime)
        self._shape, self._rows, self._number = shape, draw_rows(shape), 0

    def gradients(self) -> Tensor:
        return torch.tensor(self._step.gradients(self._microbatches()).sum().loss)

    def update(self) -> float:
        """Update as the training step does, after `gradients`."""
        self.runtime.optimizer.start(1.0 / self._shape.microbatches, Rates(LR, WEIGHT_DECAY))
        return self.runtime.optimizer.settle().grad_norm

    def _microbatches(self) -> Microbatches:
        micro = self._shape.micro_batch

        def read(k: int) -> Batch:
            first = k * micro
            return Batch.of(self._rows[first : first + micro], tuple(range(first, first + micro)), DocumentRules())

        self._number += 1
        return Microbatches(self._shape.microbatches, read, Keys(SEED, self._number, 0, 1), self.runtime.device)


class Peer:
    """A model of (tokens, labels) -> mean loss under a plain loop: gradients summed over microbatches, clipped, fused
    AdamW."""

    def __init__(
        self, shape: Shape, device: torch.device, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._model, self._loss, self._shape = model, loss, shape
        rows = torch.from_numpy(draw_rows(shape)).to(device)
        self._batches = [
            (part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows.split(shape.micro_batch)
        ]
        self._parameters = list(model.parameters())
        decayed = [p for p in self._parameters if p.ndim == 2]
        others = [p for p in self._parameters if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)

    def gradients(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for tokens, labels in self._batches:
            loss = self._loss(tokens, labels) / self._shape.microbatches
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def update(self) -> float:
        norm = nn.utils.clip_grad_norm_(self._parameters, CLIP, foreach=True)
        self._optimizer.step()
        return float(norm)


def plain(
    shape: Shape, dtype: torch.dtype, device: torch.device, weights: Mapping[str, Tensor], compiled: bool
) -> Peer:
    """Return the plain Llama, compiled as a whole if requested."""
    with device:
        model = PlainLlama(shape)
    model.load_state_dict(weights)
    model = model.to(device, dtype)
    forward: Callable[[Tensor, Tensor], Tensor] = torch.compile(model) if compiled else model
    return Peer(shape, device, model, forward)


def transformers_llama(shape: Shape, dtype: torch.dtype, device: torch.device, weights: Mapping[str, Tensor]) -> Peer:
    """Return transformers' LlamaForCausalLM with SDPA. Raises ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",  # type: ignore[call-arg]  # an argument of the base class
        use_cache=False,
        tie_word_embeddings=False,
    )
    with device:
        model = LlamaForCausalLM(config)
    model.load_state_dict(dict(weights))
    model.to(device)  # type: ignore[arg-type]  # a decorator hides the method's type
    # not the buffers: rotary frequencies in bf16 are off by whole turns at position 4096
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.float().view(-1, shape.vocab), labels.reshape(-1))

    return Peer(shape, device, model, loss)

"""The contenders: each trains the same Llama on the same tokens, on one device.

A contender has `gradients` (forward and backward of all microbatches of a step; returns the mean loss as a tensor,
without waiting for it) and `update` (the optimizer, clipping included; returns the norm of the gradients). megapipe's
peers keep everything in `dtype`, moments too: less to move than megapipe's fp32 masters and gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
from megapipe.extras.convert.families import FAMILIES, choose_family
from megapipe.extras.convert.tables import map_tensors
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.train.compiled_blocks import choose_blocks
from megapipe.train.step import train_step

SEED = 1234
TRACED = partial(torch.compile, backend="eager")


class BatchShape(Protocol):
    """The tokens of a step: `step_sequences` of `seq` tokens below `vocab`, `micro_batch` at a time."""

    @property
    def vocab(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def step_sequences(self) -> int: ...


class Contender(Protocol):
    def gradients(self) -> Tensor: ...
    def update(self) -> float: ...


def draw_rows(vocab: int, sequences: int, seq: int) -> np.ndarray:
    """Return one global batch of random tokens, [sequences, s + 1]."""
    return np.random.default_rng(SEED).integers(0, vocab, (sequences, seq + 1))


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
    fp8_recipe: str = "tensorwise"
    compile_pointwise: bool = False
    compiles: bool = True  # loss and AdamW, which a run compiles by default
    compile_blocks: str = "auto"

    def applied_to(self, config: Config) -> Config:
        precision = config.precision
        if self.fp8_format is not None:
            precision = dataclasses.replace(precision, fp8_format=self.fp8_format, fp8_recipe=self.fp8_recipe)
        kernels = dataclasses.replace(config.kernels, compile_pointwise=self.compile_pointwise)
        if not self.compiles:
            kernels = dataclasses.replace(kernels, compile_loss=False, optimizer_impl="torch")
        kernels = dataclasses.replace(kernels, compile_blocks=self.compile_blocks if self.compiles else "off")
        return dataclasses.replace(config, precision=precision, kernels=kernels)

    def __str__(self) -> str:
        fp8 = "no fp8" if self.fp8_format is None else f"--fp8-format {self.fp8_format} --fp8-recipe {self.fp8_recipe}"
        off = "" if self.compiles else " --no-compile-loss --optimizer-impl torch"
        blocks = self.compile_blocks if self.compiles else "off"
        blocks_flag = "" if blocks == "auto" else f" --compile-blocks {blocks}"
        return fp8 + " --compile-pointwise" * self.compile_pointwise + off + blocks_flag


def whole_step(contender: Contender) -> None:
    contender.gradients()
    contender.update()


class Job:
    """A plan on one rank as pretrain_gpt.py runs it, TrainingRuntime and TrainStep, on random tokens.

    draw_slice: initial values, those of training if None. choice: what --compile-blocks decided, in words. On a CPU
    blocks run through the compiler's front end alone.
    """

    def __init__(
        self, plan: RunPlan, device: torch.device, draw_slice: Callable[[ParamSpec, int, int], Tensor] | None = None
    ) -> None:
        model, training = plan.config.model, plan.config.training
        assert model.vocab_size is not None
        self.plan = plan
        self.runtime = TrainingRuntime(plan, ProcessGroups.alone(), device, draw_slice=draw_slice)
        said: list[str] = []
        choose_blocks(self.runtime, None, said.append, None if device.type == "cuda" else TRACED)
        self.choice = "".join(said)
        self._step, self._number = train_step(self.runtime), 0
        self._count, self._micro = plan.batch.num_microbatches, training.micro_batch_size
        self._rows = draw_rows(model.vocab_size, self._count * self._micro, model.seq_length)

    def gradients(self) -> Tensor:
        return torch.tensor(self._step.gradients(self._microbatches()).summed.loss)

    def update(self) -> float:
        """Update as the training step does, after `gradients`."""
        return self.runtime.optimizer.step(1.0 / self._count, Rates(LR, WEIGHT_DECAY)).grad_norm

    def _microbatches(self) -> Microbatches:
        def read(k: int) -> Batch:
            first = k * self._micro
            rows = self._rows[first : first + self._micro]
            return Batch.of(rows, tuple(range(first, first + self._micro)), DocumentRules())

        self._number += 1
        return Microbatches(self._count, read, Keys(SEED, self._number, 0, 1), self.runtime.device)


class Megapipe(Job):
    """megapipe on the shape and the weights of the other contenders."""

    def __init__(
        self, shape: Shape, dtype: str, device: torch.device, weights: Mapping[str, Tensor], options: Options
    ) -> None:
        plan = resolve(options.applied_to(configuration(shape, dtype, device.type)), 1)
        rows = FAMILIES["LlamaForCausalLM"].rows
        placed = {entry.spec.name: entry for entry in map_tensors(rows, plan.config.model, "the benchmark")}

        def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
            entry = placed[spec.name]
            return entry.layout.join([weights[name] for name in entry.theirs]).clone()

        super().__init__(plan, device, slice_of)


class Peer:
    """A model of (tokens, labels) -> mean loss under a plain loop: gradients summed over microbatches, clipped, fused
    AdamW."""

    def __init__(
        self, batch: BatchShape, device: torch.device, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._model, self._loss = model, loss
        rows = torch.from_numpy(draw_rows(batch.vocab, batch.step_sequences, batch.seq)).to(device)
        self._batches = [
            (part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows.split(batch.micro_batch)
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
            loss = self._loss(tokens, labels) / len(self._batches)
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
    settings = choose_family(configuration(shape, "bf16", device.type).model, "LlamaForCausalLM")[1]
    return transformers_model(settings, shape, dtype, device, weights)


def transformers_model(
    settings: Mapping[str, Any],
    batch: BatchShape,
    dtype: torch.dtype,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
) -> Peer:
    """Return transformers' model of a config.json, with SDPA. weights: random if None.

    Raises ImportError without transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**settings, use_cache=False, attn_implementation="sdpa")
    with device:
        theirs = AutoModelForCausalLM.from_config(config)
    if weights is not None:
        theirs.load_state_dict(dict(weights))
    theirs.to(device)
    # not the buffers: rotary frequencies in bf16 are off by whole turns at position 4096
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = theirs(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.float().view(-1, batch.vocab), labels.reshape(-1))

    return Peer(batch, device, theirs, loss)

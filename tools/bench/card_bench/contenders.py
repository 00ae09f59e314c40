"""The contenders: each trains the same Llama on the same tokens, on one device.

A contender has `gradients` (forward and backward of all microbatches of a step; returns the mean loss as a tensor,
without waiting for it) and `update` (the optimizer, clipping included; returns the norm of the gradients). megapipe's
peers keep everything in `dtype`, moments too: less to move than megapipe's fp32 masters and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from card_bench.plain import PlainLlama
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data.batch import Batch, DocumentRules
from megapipe.extras.convert.families import FAMILIES, choose_family
from megapipe.extras.convert.tables import map_tensors
from megapipe.optimizer.schedule import Rates
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.train.compiled_blocks import choose_blocks
from megapipe.train.stream import train_step

SEED = 1234
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0
TRACED = partial(torch.compile, backend="eager")


class Contender(Protocol):
    def gradients(self) -> Tensor: ...
    def update(self) -> float: ...


def draw_rows(plan: RunPlan) -> np.ndarray:
    """Return one global batch of random tokens, [sequences, s + 1]."""
    model = plan.config.model
    return np.random.default_rng(SEED).integers(0, model.vocab_size, (plan.batch.full, model.seq_length + 1))


def draw_weights(plan: RunPlan, device: torch.device) -> dict[str, Tensor]:
    """Return fp32 weights of a Llama on the device under transformers' names; the same for all contenders."""
    torch.manual_seed(SEED)
    with device:
        model = PlainLlama(plan.config.model)
    for parameter in model.parameters():
        if parameter.ndim == 2:  # large enough for every part of the model to matter to the loss
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return {name: value.detach() for name, value in model.state_dict().items()}


def whole_step(contender: Contender) -> None:
    contender.gradients()
    contender.update()


class Job:
    """A plan on a rank as pretrain_gpt.py runs it, TrainingRuntime and TrainStep, on random tokens.

    draw_slice: initial values, those of training if None. groups: of one rank if None. choice: what --compile-blocks
    decided, in words. On a CPU blocks run through the compiler's front end alone.
    """

    def __init__(
        self,
        plan: RunPlan,
        device: torch.device,
        draw_slice: Callable[[ParamSpec, int, int], Tensor] | None = None,
        groups: ProcessGroups | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.plan, groups = plan, groups or ProcessGroups.alone()
        self.runtime = TrainingRuntime(plan, groups, device, draw_slice=draw_slice, tracer=tracer)
        said: list[str] = []
        choose_blocks(self.runtime, None, said.append, None if device.type == "cuda" else TRACED)
        self.choice = "".join(said)
        self._step, self._number = train_step(self.runtime), 0
        self._count, self._micro = plan.batch.num_microbatches, plan.config.training.micro_batch_size
        self._rows = draw_rows(plan)

    def gradients(self) -> Tensor:
        return torch.tensor(self._step.gradients(self._microbatches()).summed.loss)

    def update(self) -> float:
        """Update as the training step does, after `gradients`."""
        return self.runtime.optimizer.step(1.0 / self._count, Rates(LR, WEIGHT_DECAY)).grad_norm

    def step(self) -> tuple[float, float]:
        """Make one optimizer step on this rank's part of the batch; return (mean loss, gradient norm)."""
        result = self._step.run(self._microbatches(), Rates(LR, WEIGHT_DECAY))
        return result.loss, result.update.grad_norm

    def _microbatches(self) -> Microbatches:
        dp, dp_rank = self.plan.topology.dp, self.runtime.coordinates.dp_rank

        def read(k: int) -> Batch:
            first = (k * dp + dp_rank) * self._micro
            rows = self._rows[first : first + self._micro]
            return Batch.of(rows, tuple(range(first, first + self._micro)), DocumentRules())

        self._number += 1
        return Microbatches(self._count, read, Keys(SEED, self._number, dp_rank, dp), self.runtime.device)


def job_with(plan: RunPlan, device: torch.device, weights: Mapping[str, Tensor]) -> Job:
    """Return the job of a Llama that starts from the weights of the other contenders."""
    rows = FAMILIES["LlamaForCausalLM"].rows
    placed = {entry.spec.name: entry for entry in map_tensors(rows, plan.config.model, "the benchmark")}

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        entry = placed[spec.name]
        return entry.layout.join([weights[name] for name in entry.theirs]).clone()

    return Job(plan, device, slice_of)


class Peer:
    """A model of (tokens, labels) -> mean loss under a plain loop: gradients summed over microbatches, clipped, fused
    AdamW."""

    def __init__(
        self, plan: RunPlan, device: torch.device, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._model, self._loss = model, loss
        rows = torch.from_numpy(draw_rows(plan)).to(device).split(plan.config.training.micro_batch_size)
        self._batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]
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


def dtype_of(plan: RunPlan) -> torch.dtype:
    """Return the dtype of a plan's products."""
    return torch.bfloat16 if plan.config.precision.dtype == "bf16" else torch.float32


def plain(plan: RunPlan, device: torch.device, weights: Mapping[str, Tensor]) -> Peer:
    """Return the plain Llama, compiled as a whole."""
    with device:
        model = PlainLlama(plan.config.model)
    model.load_state_dict(weights)
    return Peer(plan, device, model.to(device, dtype_of(plan)), torch.compile(model))


def transformers_llama(plan: RunPlan, device: torch.device, weights: Mapping[str, Tensor]) -> Peer:
    """Return transformers' LlamaForCausalLM. Raises ImportError without transformers."""
    settings = choose_family(plan.config.model, "LlamaForCausalLM")[1]
    return transformers_model(settings, plan, device, weights)


def transformers_model(
    settings: Mapping[str, Any], plan: RunPlan, device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> Peer:
    """Return transformers' model of a config.json, with SDPA, on the batches of a plan. weights: random if None.

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
        parameter.data = parameter.data.to(dtype_of(plan))

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = theirs(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.reshape(-1))

    return Peer(plan, device, theirs, loss)

"""The loss of a stream of tokens under a model, window by window, on any grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.comm.channels import MessageSpec
from megapipe.comm.collectives import all_reduce
from megapipe.errors import ConfigError
from megapipe.extras.inference.generate import without_sequence_parallelism
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.pipeline.engine import Step

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Window:
    """Tokens [start, start + length + 1): `length` inputs and their labels, of which the last `scored` count."""

    start: int
    length: int
    scored: int


@dataclass(frozen=True)
class Perplexity:
    """The result: loss in nats per token over num_tokens scored tokens, all of the stream but the first."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def total_bits(self) -> float:
        return self.loss * self.num_tokens / math.log(2.0)


def windows(num_tokens: int, seq: int, stride: int) -> Iterator[Window]:
    """Yield windows of `seq` inputs that score each token but the first exactly once, `stride` per later window.

    A token is scored with at least seq - stride tokens before it (fewer in the first window). The last window starts
    earlier, so that all are full; a stream of fewer than seq + 1 tokens is one shorter window. Raises ConfigError for
    a stride outside 1 .. seq, or fewer than two tokens.
    """
    if not 1 <= stride <= seq:
        raise ConfigError(f"--stride {stride} must be in 1 .. {seq}, the length of a window")
    if num_tokens < 2:
        raise ConfigError(
            f"{num_tokens} tokens cannot be scored: a token is scored by those before it; give two or more"
        )
    length = min(seq, num_tokens - 1)
    stop = length + 1  # end of the scored tokens
    yield Window(0, length, length)
    while stop < num_tokens:
        following = min(stop + stride, num_tokens)
        yield Window(following - length - 1, length, following - stop)
        stop = following


@torch.no_grad()
def score(runtime: InferenceRuntime, tokens: Tokens, stride: int | None = None) -> Perplexity:
    """Return the loss of a stream of tokens, the same on all ranks; all call it with the same tokens.

    Replicas share the windows, micro_batch_size of them in a microbatch. stride: as in `windows`; None: seq.
    """
    plan = runtime.plan
    seq, size, replicas = plan.config.model.seq_length, plan.config.training.micro_batch_size, plan.topology.dp
    all_windows = list(windows(len(tokens), seq, stride or seq))
    length = all_windows[0].length
    at_once = 2 * plan.topology.pp * size * replicas  # windows in one run of the pipeline
    sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    message = (MessageSpec((length, size, plan.config.model.hidden_size), runtime.parameter_dtype),)
    with without_sequence_parallelism(runtime.stages.values()):  # tp need not divide the length of a window
        for first in range(0, len(all_windows), at_once):
            chosen = all_windows[first : first + at_once]
            share = chosen[runtime.coordinates.dp_rank :: replicas]
            starts = range(0, -(-len(chosen) // replicas), size)  # the same number of microbatches on every replica
            microbatches = [_microbatch(tokens, share[i : i + size], size, length, runtime.device) for i in starts]
            step = Step(microbatches, lambda boundary: message, _sums)
            reports = runtime.forward_engine(len(microbatches)).run(step)
            if runtime.reports_loss:
                sums += torch.stack(reports).sum(0)
    all_reduce(sums, runtime.groups.world)
    loss_sum, num_tokens = sums.tolist()
    return Perplexity(loss_sum / num_tokens, round(num_tokens))


def _microbatch(tokens: Tokens, chosen: Sequence[Window], size: int, length: int, device: torch.device) -> Microbatch:
    """Build a microbatch of `size` windows, filled up with the first tokens, which do not count."""
    rows = np.tile(tokens[: length + 1].astype(np.int64), (size, 1))
    mask = np.zeros((size, length), dtype=np.float32)
    for row, window in enumerate(chosen):
        rows[row] = tokens[window.start : window.start + length + 1]
        mask[row, length - window.scored :] = 1.0
    text = torch.from_numpy(rows).to(device)
    inputs, labels, weights = text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.from_numpy(mask).to(device)
    is_filler = torch.arange(size, device=device)[:, None].expand(size, length) >= len(chosen)
    return Microbatch(inputs, labels, weights, padding=is_filler if len(chosen) < size else None)


def _sums(output: StageLoss, payload: Any) -> tuple[Tensor, Tensor]:
    return output.loss_sum, torch.stack([output.loss_sum.double(), output.num_tokens.double()])

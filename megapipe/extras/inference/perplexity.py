"""The loss of a stream of tokens under a model, window by window, on any grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapipe.assembly.inference_runtime import InferenceRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.errors import ConfigError
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.pipeline.engine import Step

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Window:
    """Tokens [start, start + length + 1): `length` inputs with the tokens after them as labels, of which the last `scored` count."""

    start: int
    length: int
    scored: int


@dataclass(frozen=True)
class Perplexity:
    """loss: nats a token, over num_tokens scored tokens: all of the stream but the first."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def total_bits(self) -> float:
        return self.loss * self.num_tokens / math.log(2.0)


def windows(num_tokens: int, seq: int, stride: int) -> Iterator[Window]:
    """Windows of `seq` inputs that score each token but the first exactly once, `stride` of them in each window after the first.

    A token is scored with at least seq - stride tokens before it (fewer in the first window). The last window reaches back, so that all
    are full; a stream of fewer than seq + 1 tokens is one shorter window. Raises ConfigError for a stride outside 1 .. seq, or fewer than
    two tokens.
    """
    if not 1 <= stride <= seq:
        raise ConfigError(f"--stride {stride} must lie in 1 .. {seq}, the length of a window")
    if num_tokens < 2:
        raise ConfigError(f"{num_tokens} tokens cannot be scored: each needs one before it")
    length = min(seq, num_tokens - 1)
    stop = length + 1  # behind the last token that has been scored
    yield Window(0, length, length)
    while stop < num_tokens:
        following = min(stop + stride, num_tokens)
        yield Window(following - length - 1, length, following - stop)
        stop = following


class Evaluator:
    """Scores streams of tokens on the grid of `runtime`: windows are dealt to the replicas, microbatches of micro_batch_size windows."""

    def __init__(self, runtime: InferenceRuntime) -> None:
        self._runtime = runtime
        self._num_microbatches = 2 * runtime.plan.topology.pp  # in one run of the pipeline

    @torch.no_grad()
    def score(self, tokens: Tokens, stride: int | None = None) -> Perplexity:
        """Called by all ranks with the same tokens; the same on all. stride: as in `windows`; None: the whole window."""
        runtime, plan = self._runtime, self._runtime.plan
        if plan.topology.tp > 1 and plan.config.parallel.sequence_parallel:
            raise ValueError("windows of any length cannot be sliced: evaluate without sequence parallelism")
        seq = plan.config.model.seq_length
        mine = list(windows(len(tokens), seq, stride or seq))
        length, replicas, size = mine[0].length, plan.topology.dp, plan.config.training.micro_batch_size
        at_once = self._num_microbatches * size
        sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)
        for first in range(0, len(mine), at_once * replicas):
            share = mine[first : first + at_once * replicas][runtime.coordinates.dp_rank :: replicas]
            count = min(self._num_microbatches, -(-min(at_once * replicas, len(mine) - first) // (size * replicas)))
            reports = runtime.forward_engine(count).run(
                Step(
                    _Batches(tokens, share, count, size, length, runtime.device),
                    partial(runtime.message, seq=length),
                    _sums,
                )
            )
            if runtime.reports_loss:
                sums += torch.stack(reports).sum(0)
        all_reduce(sums, runtime.groups.world)
        loss_sum, num_tokens = sums.tolist()
        return Perplexity(loss_sum / num_tokens, round(num_tokens))


class _Batches(Sequence[Microbatch]):
    """Windows as microbatches, each made when it is asked for; missing windows are filled up with some whose tokens do not count."""

    def __init__(
        self, tokens: Tokens, share: list[Window], count: int, size: int, length: int, device: torch.device
    ) -> None:
        self._tokens, self._share, self._count, self._size, self._device = tokens, share, count, size, device
        self._filler = Window(0, length, 0)
        self._made: dict[int, Microbatch] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            self._made[index] = self._make(self._share[index * self._size : (index + 1) * self._size])
        return self._made[index]

    def _make(self, chosen: list[Window]) -> Microbatch:
        chosen = chosen + [self._filler] * (self._size - len(chosen))
        rows = np.stack([self._tokens[w.start : w.start + w.length + 1] for w in chosen]).astype(np.int64)
        mask = np.zeros((self._size, rows.shape[1] - 1), dtype=np.float32)
        for row, window in enumerate(chosen):
            mask[row, window.length - window.scored :] = 1.0
        text = torch.from_numpy(rows).to(self._device)
        return Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.from_numpy(mask).to(self._device))


def _sums(output: StageLoss, payload: Any) -> tuple[Tensor, Tensor]:
    return output.loss_sum, torch.stack([output.loss_sum.double(), output.num_tokens.double()])

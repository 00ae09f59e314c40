"""`Generator`: texts from prompts, on any grid: prompts through the pipeline once, then a token at a time with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megapipe.comm.channels import MessageSpec
from megapipe.comm.collectives import all_gather, broadcast
from megapipe.comm.groups import ProcessGroups
from megapipe.errors import ConfigError
from megapipe.extras.inference.sampling import Sampling
from megapipe.model.microbatch import KVCache, Microbatch
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.run_plan import RunPlan
from megapipe.topology import Coordinates

OnToken = Callable[[int, int], None]  # (number of the prompt, token)


class Stages(Protocol):
    """What generation needs of this rank: an `InferenceRuntime` or a `TrainingRuntime`."""

    plan: RunPlan
    groups: ProcessGroups
    device: torch.device
    parameter_dtype: torch.dtype
    coordinates: Coordinates
    stages: Any
    channels: Any

    def finish_parameters(self) -> None:
        """Return when all parameters are up to date."""


@dataclass(frozen=True)
class Limits:
    """max_new_tokens: a text ends after as many. stop_tokens: a text ends before the first of them."""

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()


@dataclass
class _Batch:
    """Prompts that go through the pipeline together, aligned at their ends. numbers: which prompts; padding rows repeat the last one."""

    numbers: list[int]
    room: list[int]  # of each row: the most tokens its text may get
    newest: Tensor  # [b, s]: what the next forward reads
    cache: KVCache
    texts: list[list[int]]
    open: list[bool] = field(default_factory=list)


class Generator:
    """Continues prompts; called by all ranks of one replica of the model (dp = 1), each of which returns the same texts.

    batch_size: prompts that go through the pipeline as one microbatch. As many batches are under way as the pipeline has ranks. Sequence
    parallelism is left out: one token cannot be sliced.
    """

    def __init__(self, runtime: Stages, sampling: Sampling, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise ConfigError(f"--batch-size {batch_size}: at least one prompt must go through the model at a time")
        self._runtime, self._sampling, self._batch_size = runtime, sampling, batch_size
        self._runners = {stage: StageRunner(_with_logits(module)) for stage, module in runtime.stages.items()}
        self._engines: dict[int, Engine] = {}
        placement = runtime.plan.placement
        # on a placement with two directions every second microbatch ends on another rank
        self._num_under_way = placement.num_ranks if placement.second_direction is None else 1

    @torch.no_grad()
    def continue_prompts(
        self, prompts: Sequence[Sequence[int]], limits: Limits, on_token: OnToken | None = None
    ) -> list[list[int]]:
        """The tokens that follow each prompt, stop tokens left out. on_token: called on every rank as the tokens come, batch by batch.

        Raises ConfigError for an empty prompt, a token outside the vocabulary, and a prompt that leaves no room before
        --max-position-embeddings; a text also ends there.
        """
        for number, prompt in enumerate(prompts):
            self._check(number, prompt)
        self._runtime.finish_parameters()
        at_once = self._batch_size * self._num_under_way
        texts: list[list[int]] = []
        with _whole_sequences(self._runtime.stages.values()):
            for first in range(0, len(prompts), at_once):
                numbers = list(range(first, min(first + at_once, len(prompts))))
                texts += self._continue([numbers, [list(prompts[n]) for n in numbers]], limits, on_token)
        return texts

    def _continue(self, chosen: list[Any], limits: Limits, on_token: OnToken | None) -> list[list[int]]:
        numbers, prompts = chosen
        longest = max(map(len, prompts))
        room = [min(limits.max_new_tokens, self._num_positions - len(prompt)) for prompt in prompts]
        batches = self._batches(numbers, prompts, room, longest)
        for position in range(max(room)):
            if not any(any(batch.open) for batch in batches):
                break
            tokens = self._next(batches, position)
            for batch, drawn in zip(batches, tokens, strict=True):
                self._take(batch, drawn, limits, on_token)
        return [text for batch in batches for text in batch.texts][: len(numbers)]

    def _batches(self, numbers: list[int], prompts: list[list[int]], room: list[int], longest: int) -> list[_Batch]:
        size = min(self._batch_size, len(prompts))
        batches = []
        for first in range(0, len(prompts), size):
            members = list(range(first, min(first + size, len(prompts))))
            padded = members + [members[-1]] * (
                size - len(members)
            )  # every batch has one shape: messages are declared for all
            tokens = torch.zeros(size, longest, dtype=torch.int64)
            for row, member in enumerate(padded):
                tokens[row, longest - len(prompts[member]) :] = torch.tensor(prompts[member])
            starts = torch.tensor([longest - len(prompts[member]) for member in padded], device=self._runtime.device)
            cache = KVCache(longest + max(room), starts if bool(starts.any()) else None)
            batches.append(
                _Batch(
                    numbers=[numbers[member] for member in padded],
                    room=[room[member] for member in padded],
                    newest=tokens.to(self._runtime.device),
                    cache=cache,
                    texts=[[] for _ in padded],
                    open=[row < len(members) for row in range(size)],
                )
            )
        return batches

    def _next(self, batches: list[_Batch], position: int) -> list[list[int]]:
        """One forward of every batch: the token after its newest, for each row; the same on every rank."""
        seq, size = batches[0].newest.shape[1], len(batches[0].numbers)
        hidden = self._runtime.plan.config.model.hidden_size
        message = (MessageSpec((seq, size, hidden), self._runtime.parameter_dtype),)
        batch_of = {id(batch.cache): batch for batch in batches}

        def choose(logits: Tensor, payload: Microbatch) -> tuple[Tensor, Tensor]:
            return logits, self._sampling.choose(self._whole(logits[-1]), batch_of[id(payload.cache)].numbers, position)

        microbatches = [
            Microbatch(batch.newest, position_ids=self._position_ids(batch), cache=batch.cache) for batch in batches
        ]
        drawn = self._engine(len(batches)).run(Step(microbatches, lambda boundary: message, choose))
        for batch in batches:
            batch.cache.advance(seq)
        chosen = (
            torch.stack(drawn)
            if drawn
            else torch.zeros(len(batches), size, dtype=torch.int64, device=self._runtime.device)
        )
        broadcast(chosen, self._runtime.groups.world, source=self._source)
        for batch, row in zip(batches, chosen, strict=True):
            batch.newest = row[:, None]
        as_lists: list[list[int]] = chosen.tolist()
        return as_lists

    def _take(self, batch: _Batch, tokens: list[int], limits: Limits, on_token: OnToken | None) -> None:
        for row, token in enumerate(tokens):
            if not batch.open[row]:
                continue
            if token in limits.stop_tokens:
                batch.open[row] = False
                continue
            batch.texts[row].append(token)
            if on_token is not None:
                on_token(batch.numbers[row], token)
            batch.open[row] = len(batch.texts[row]) < batch.room[row]

    def _engine(self, num_batches: int) -> Engine:
        runtime = self._runtime
        if num_batches not in self._engines:
            schedule = runtime.plan.forward_schedule(num_batches)
            self._engines[num_batches] = Engine(schedule, runtime.coordinates.pp_rank, self._runners, runtime.channels)
        return self._engines[num_batches]

    def _whole(self, logits: Tensor) -> Tensor:
        """[batch, V / tp] -> [batch, V], padding cut off."""
        tp = self._runtime.groups.tp
        mine = logits.t().contiguous()
        whole = mine.new_empty(mine.shape[0] * tp.size, mine.shape[1])
        all_gather(whole, mine, tp)
        return whole[: self._runtime.plan.config.model.vocab_size].t()

    def _check(self, number: int, prompt: Sequence[int]) -> None:
        vocab_size = self._runtime.plan.config.model.vocab_size
        assert vocab_size is not None
        if not prompt:
            raise ConfigError(f"prompt {number} has no tokens: a text must begin with at least one")
        if len(prompt) >= self._num_positions:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens: the model has --max-position-embeddings {self._num_positions}, which must "
                "leave room for at least one more"
            )
        if not all(0 <= token < vocab_size for token in prompt):
            raise ConfigError(
                f"prompt {number} holds tokens outside the vocabulary of {vocab_size}: is this the model's tokenizer?"
            )

    def _position_ids(self, batch: _Batch) -> Tensor:
        """[b, s]: of the newest tokens; some valid number for padding and for texts that have ended."""
        cache, (size, seq) = batch.cache, batch.newest.shape
        positions = torch.arange(cache.length, cache.length + seq, device=batch.newest.device).expand(size, seq)
        return (positions if cache.starts is None else positions - cache.starts[:, None]).clamp(
            0, self._num_positions - 1
        )

    @property
    def _num_positions(self) -> int:
        positions = self._runtime.plan.config.model.max_position_embeddings
        assert positions is not None
        return positions

    @property
    def _source(self) -> int:
        """The global rank whose draws count: first tp rank of the last stage, of the first replica."""
        plan = self._runtime.plan
        return plan.topology.global_rank(Coordinates(0, 0, 0, plan.placement.rank_of_stage[-1]))


def _with_logits(module: Any) -> Any:
    return partial(module, return_logits=True, last_position=True) if module.stage_layers.has_head else module


@contextmanager
def _whole_sequences(stages: Any) -> Iterator[None]:
    """Stages without sequence parallelism, for a while."""
    sliced: list[nn.Module] = [
        part for stage in stages for part in stage.modules() if getattr(part, "sequence_parallel", False)
    ]
    for part in sliced:
        part.sequence_parallel = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in sliced:
            part.sequence_parallel = True  # type: ignore[assignment]

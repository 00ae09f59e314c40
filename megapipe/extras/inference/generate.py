"""`Generator`: continues prompts on any grid, token by token with a key/value cache; `Sampling`: the choice of the next
token; `TextStream`: tokens to text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.comm.channels import MessageSpec
from megapipe.comm.collectives import all_gather, all_reduce, broadcast
from megapipe.config.layers import layer_configs
from megapipe.errors import CheckpointError, ConfigError
from megapipe.model.microbatch import KVCache, Microbatch, StageLoss
from megapipe.monitor.progress import reported
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.topology import Coordinates

MOST_EXPONENT = 700.0  # of a perplexity that is a finite number
OnToken = Callable[[int, int], None]  # (index of the prompt, token)
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def ignore(*values: object) -> None:
    """Do nothing with the values."""


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    temperature: 0 takes the most likely token. top_k: draw among the k most likely; 0: all. top_p: draw among the
    fewest most likely tokens that together reach this probability (nucleus sampling, Holtzman et al. 2020,
    arXiv:1904.09751), after top_k. A draw depends only on (seed, index of the prompt, index of the token), not on the
    grid or the rest of the batch. Raises ConfigError for values out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature {self.temperature} must be 0 or a positive number; 0 takes the most likely token, "
                "1 samples as trained"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} is negative; 0 draws among all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"--top-p {self.top_p} must be above 0 and at most 1; 1 draws among all tokens")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed {self.seed} must be in 0 .. 2^63 - 1")

    def choose(self, logits: Tensor, prompts: Sequence[int], position: int) -> Tensor:
        """Return the next token of each row, [batch] int64, on the logits' device.

        logits: [batch, vocabulary]. prompts: the index of each row's prompt. position: tokens generated so far.
        """
        if self.temperature < sys.float_info.min:  # 0, or so small that its inverse is infinite
            return logits.argmax(-1)
        probabilities, tokens = self.candidates(logits)
        sums = probabilities.cumsum(-1)
        draws = torch.empty(len(prompts), 1, dtype=torch.float64)
        for row, prompt in enumerate(prompts):
            key = np.array([self.seed, prompt], dtype=np.uint64)
            bits = np.random.Philox(key=key, counter=np.array([position, 0, 0, 0], dtype=np.uint64))
            draws[row] = np.random.Generator(bits).random()
        total = sums[:, -1:]
        # below the total, so that rounding cannot step past the last candidate
        below = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(sums, below, right=True)
        return tokens.gather(-1, chosen)[:, 0].to(logits.device)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities in falling order (0 beyond top_p, not renormalised) and their tokens, [batch, n]."""
        count = min(self.top_k or logits.shape[-1], logits.shape[-1])
        values, tokens = logits.double().cpu().sort(dim=-1, descending=True, stable=True)
        # below the largest before the division, which then overflows at most to -infinity
        probabilities = ((values[:, :count] - values[:, :1]) / self.temperature).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        return probabilities.masked_fill(before >= self.top_p, 0.0), tokens[:, :count]


@dataclass(frozen=True)
class Limits:
    """The end of a text: after max_new_tokens, or before the first of stop_tokens."""

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()


@dataclass
class _Batch:
    """Prompts that go through the pipeline together, aligned at their ends; padding rows repeat the last prompt."""

    numbers: list[int]  # index of each row's prompt
    max_tokens: list[int]  # the most tokens that each row's text may get
    newest: Tensor  # [b, s], the input of the next forward
    cache: KVCache
    texts: list[list[int]]
    is_open: list[bool]


class Generator:
    """Continues prompts. All ranks call it, and each returns the same texts; the first replica's draws count.

    batch_size: prompts that go through the pipeline as one microbatch. As many batches are in flight as the pipeline
    has ranks. Sequence parallelism is switched off meanwhile, since one token cannot be split.
    """

    def __init__(self, runtime: InferenceRuntime, sampling: Sampling, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise ConfigError(f"--batch-size {batch_size} must be at least 1")
        mixers = {layer.mixer for layer in layer_configs(runtime.plan.config.model)} - {None}
        if mixers:
            names = " or ".join(map(str, mixers))
            raise ConfigError(
                f"--attention-kind {names} keeps no state between tokens, so it cannot continue a text; its model can "
                "be trained, and evaluated with `megapipe evaluate`"
            )
        self._runtime, self._sampling, self._batch_size = runtime, sampling, batch_size
        self._vocab_size = runtime.plan.config.model.vocab_size
        self._num_positions = runtime.plan.config.model.max_position_embeddings
        self._runners: dict[int, StageRunner] = {}
        for stage, module in runtime.stages.items():
            forward: Any = module
            if module.stage_layers.has_head:
                forward = partial(module, return_logits=True, last_position=True)
            self._runners[stage] = StageRunner(forward)
        self._engines: dict[int, Engine] = {}
        placement = runtime.plan.placement
        # with two directions, every second microbatch would end on another rank
        self._num_in_flight = placement.num_ranks if placement.second_direction is None else 1

    @torch.no_grad()
    def continue_prompts(
        self, prompts: Sequence[Sequence[int]], limits: Limits, on_token: OnToken = ignore
    ) -> list[list[int]]:
        """Return the tokens that follow each prompt, without stop tokens.

        on_token: called on every rank for each new token. Raises ConfigError for an empty prompt, a token outside the
        vocabulary, and a prompt that fills all --max-position-embeddings positions; a text also ends there. Raises
        CheckpointError for logits that are NaN or infinite. All ranks raise.
        """
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ConfigError(f"prompt {number} has no tokens; give at least one")
            if len(prompt) >= self._num_positions:
                raise ConfigError(
                    f"prompt {number} has {len(prompt)} tokens, which leaves no position for a new one: the model has "
                    f"--max-position-embeddings {self._num_positions}; shorten the prompt"
                )
            if not all(0 <= token < self._vocab_size for token in prompt):
                outside = f"outside the vocabulary of {self._vocab_size}"
                raise ConfigError(f"prompt {number} has tokens {outside}; use the model's tokenizer")
        self._runtime.stores.finish_weights()
        at_once = self._batch_size * self._num_in_flight
        texts: list[list[int]] = []
        with without_sequence_parallelism(self._runtime.stages.values()):
            for first in range(0, len(prompts), at_once):
                # the prompts that are in flight together
                numbers = list(range(first, min(first + at_once, len(prompts))))
                given = [list(prompts[number]) for number in numbers]
                max_tokens = [min(limits.max_new_tokens, self._num_positions - len(prompt)) for prompt in given]
                batches = self._batches(numbers, given, max_tokens)
                for position in range(max(max_tokens)):
                    if not any(any(batch.is_open) for batch in batches):
                        break
                    for batch, tokens in zip(batches, self._next_tokens(batches, position), strict=True):
                        _append(batch, tokens, limits, on_token)
                texts += [text for batch in batches for text in batch.texts][: len(numbers)]
        return texts

    def _batches(self, numbers: list[int], prompts: list[list[int]], max_tokens: list[int]) -> list[_Batch]:
        size, longest = min(self._batch_size, len(prompts)), max(map(len, prompts))
        batches = []
        for first in range(0, len(prompts), size):
            members = list(range(first, min(first + size, len(prompts))))
            # every batch has the same shape, since messages are declared once for all
            padded = members + [members[-1]] * (size - len(members))
            tokens = torch.zeros(size, longest, dtype=torch.int64)
            for row, member in enumerate(padded):
                tokens[row, longest - len(prompts[member]) :] = torch.tensor(prompts[member])
            starts = torch.tensor([longest - len(prompts[member]) for member in padded], device=self._runtime.device)
            batches.append(
                _Batch(
                    numbers=[numbers[member] for member in padded],
                    max_tokens=[max_tokens[member] for member in padded],
                    newest=tokens.to(self._runtime.device),
                    cache=KVCache(longest + max(max_tokens), starts if bool(starts.any()) else None),
                    texts=[[] for _ in padded],
                    is_open=[row < len(members) for row in range(size)],
                )
            )
        return batches

    def _next_tokens(self, batches: list[_Batch], position: int) -> list[list[int]]:
        """Run one forward of every batch; return the next token of each row, the same on every rank: -1 for logits that
        are not finite.
        """
        runtime, plan = self._runtime, self._runtime.plan
        size, seq = batches[0].newest.shape
        message = (MessageSpec((seq, size, plan.config.model.hidden_size), runtime.parameter_dtype),)

        def choose(logits: Tensor, payload: Microbatch) -> tuple[Tensor, Tensor]:
            batch = next(batch for batch in batches if batch.cache is payload.cache)
            mine = logits[0].t().contiguous()  # [V / tp, batch]
            whole = mine.new_empty(mine.shape[0] * runtime.groups.tp.size, mine.shape[1])
            all_gather(whole, mine, runtime.groups.tp)
            rows = whole[: self._vocab_size].t()
            new = self._sampling.choose(rows.nan_to_num(), batch.numbers, position)
            return logits, new.where(rows.isfinite().all(-1), -1)

        microbatches = []
        for batch in batches:
            cache = batch.cache
            positions = torch.arange(cache.length, cache.length + seq, device=runtime.device).expand(size, seq)
            if cache.starts is not None:
                positions = positions - cache.starts[:, None]
            # experts with a capacity give no place to padding, nor to rows that have ended
            is_open = torch.tensor(batch.is_open, device=runtime.device)[:, None]
            is_full = all(batch.is_open) and (cache.starts is None or cache.length > 0)
            padding = None if is_full else (positions < 0) | ~is_open
            # any valid number for padding and ended texts
            positions = positions.clamp(0, self._num_positions - 1)
            microbatches.append(Microbatch(batch.newest, position_ids=positions, cache=cache, padding=padding))
        drawn = self._engine(len(batches)).run(Step(microbatches, lambda boundary: message, choose))
        chosen = torch.zeros(len(batches), size, dtype=torch.int64, device=runtime.device)
        if drawn:  # this rank has the last stage
            chosen = torch.stack(drawn)
        # the draws of one rank count: the first tp rank of the last stage of the first replica
        source = plan.topology.global_rank(Coordinates(0, 0, 0, plan.placement.rank_of_stage[-1]))
        broadcast(chosen, runtime.groups.world, source=source)
        for batch, row in zip(batches, chosen, strict=True):
            batch.cache.advance(seq)
            batch.newest = row[:, None].clamp(min=0)
        as_lists: list[list[int]] = chosen.tolist()
        return as_lists

    def _engine(self, num_batches: int) -> Engine:
        runtime = self._runtime
        if num_batches not in self._engines:
            schedule = runtime.plan.forward_schedule(num_batches)
            pp_rank, around = runtime.coordinates.pp_rank, runtime.around(schedule)
            engine = Engine(schedule, pp_rank, self._runners, runtime.channels, runtime.handlers, around)
            self._engines[num_batches] = engine
        return self._engines[num_batches]


def _append(batch: _Batch, tokens: list[int], limits: Limits, on_token: OnToken) -> None:
    """Append the next token of each row that is open, and close those that end. Raises CheckpointError."""
    for row, (number, token) in enumerate(zip(batch.numbers, tokens, strict=True)):
        if not batch.is_open[row]:
            continue
        if token < 0:
            place = f"token {len(batch.texts[row])} after prompt {number}"
            way = "load an earlier checkpoint, or choose a wider --dtype"
            raise CheckpointError(f"{place}: the model computes NaN or infinite logits; {way}")
        if token in limits.stop_tokens:
            batch.is_open[row] = False
            continue
        batch.texts[row].append(token)
        on_token(number, token)
        batch.is_open[row] = len(batch.texts[row]) < batch.max_tokens[row]


@contextmanager
def without_sequence_parallelism(stages: Any) -> Iterator[None]:
    """Switch sequence parallelism off in all modules of the stages inside the block."""
    parallel: list[nn.Module] = [
        part for stage in stages for part in stage.modules() if getattr(part, "sequence_parallel", False)
    ]
    for part in parallel:
        part.sequence_parallel = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in parallel:
            part.sequence_parallel = True  # type: ignore[assignment]


class TextStream:
    """Decodes a growing list of tokens and writes the new text; a character with missing bytes is held until `close`.

    decode: tokens -> text. prompt: the tokens before the first new one, since some tokenizers decode a token
    differently at the start of a text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], write: Callable[[str], None]
    ) -> None:
        self._decode, self._write = decode, write
        self._tokens = list(prompt)
        self._written = len(decode(self._tokens))

    def add(self, token: int) -> None:
        """Append a token and write the text that it completes."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(INCOMPLETE_CHARACTER):
            self._write_new(text)

    def close(self) -> None:
        """Write the text held back."""
        self._write_new(self._decode(self._tokens))

    def _write_new(self, text: str) -> None:
        new, self._written = text[self._written :], max(self._written, len(text))
        if new:
            self._write(new)


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
        return math.exp(self.loss) if self.loss < MOST_EXPONENT else math.inf


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
def score(
    runtime: InferenceRuntime,
    tokens: Tokens,
    stride: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Perplexity:
    """Return the loss of a stream of tokens, the same on all ranks; all call it with the same tokens.

    Replicas share the windows, micro_batch_size of them in a microbatch. stride: as in `windows`; None: seq. say: gets
    a line with the time left now and then.
    """
    plan = runtime.plan
    seq, size, replicas = plan.config.model.seq_length, plan.config.training.micro_batch_size, plan.topology.dp
    all_windows = list(windows(len(tokens), seq, stride or seq))
    length = all_windows[0].length
    at_once = 2 * plan.topology.pp * size * replicas  # windows in one run of the pipeline
    sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)

    def report(number: int, left: str) -> None:
        say(f"{number * at_once:,} of {len(all_windows):,} windows | {left} left")

    message = (MessageSpec((length, size, plan.config.model.hidden_size), runtime.parameter_dtype),)
    with without_sequence_parallelism(runtime.stages.values()):  # tp need not divide the length of a window
        for first in reported(range(0, len(all_windows), at_once), report):
            chosen = all_windows[first : first + at_once]
            share = chosen[runtime.coordinates.dp_rank :: replicas]
            starts = range(0, -(-len(chosen) // replicas), size)  # the same number of microbatches on every replica
            microbatches = [_microbatch(tokens, share[i : i + size], size, length, runtime.device) for i in starts]
            step = Step(microbatches, lambda boundary: message, _sums)
            reports = runtime.forward_engine(len(microbatches)).run(step)
            # one rank, of all that compute the loss of a microbatch
            if plan.placement.num_stages - 1 in runtime.stages and runtime.coordinates.tp_rank == 0:
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

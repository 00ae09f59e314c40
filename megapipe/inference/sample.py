"""Plain sampling: the stages of training, forwards only, once for every new token; all ranks take part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.build.machines import Machines
from megapipe.comm.collectives import all_gather, broadcast
from megapipe.errors import ConfigError
from megapipe.model.microbatch import Microbatch
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.topology import Coordinates


class Sampler:
    """Continues prompts. Deterministic in `seed`.

    temperature: 0 takes the most likely token. top_k: draw among the k most likely; 0: all.
    """

    def __init__(self, machines: Machines, temperature: float = 0.8, top_k: int = 40, seed: int = 0) -> None:
        self._machines = machines
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        runners = {stage: StageRunner(_with_logits(module)) for stage, module in machines.stages.items()}
        schedule = machines.plan.forward_schedule(1)
        self._engine = Engine(schedule, machines.coordinates.pp_rank, runners, machines.channels)

    @torch.no_grad()
    def continue_prompts(self, prompts: Sequence[Sequence[int]], num_tokens: int, stop_token: int | None = None) -> list[list[int]]:
        """Each prompt with up to num_tokens more tokens, as many as fit into the sequence length; the same on every rank.

        prompts: any number, of at least one token each; as many as the micro batch size go through the pipeline at once. stop_token: ends
        a text and is not part of it.
        """
        batch, seq = self._machines.plan.config.training.micro_batch_size, self._machines.plan.config.model.seq_length
        for prompt in prompts:
            if not 0 < len(prompt) <= seq:
                raise ConfigError(f"a prompt of {len(prompt)} tokens cannot be continued: it must have 1 to --seq-length {seq} tokens")
        self._machines.gather.finish()
        texts: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            texts += self._continue_batch(prompts[first : first + batch], num_tokens)
        return [_until(text, stop_token, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]

    def _continue_batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        config, device = self._machines.plan.config, self._machines.device
        tokens = torch.zeros(config.training.micro_batch_size, config.model.seq_length, dtype=torch.int64, device=device)
        lengths = torch.ones(len(tokens), dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
            lengths[row] = len(prompt)
        rows = torch.arange(len(tokens), device=device)
        stops = (lengths + num_tokens).clamp(max=tokens.shape[1])
        while bool((lengths < stops)[: len(prompts)].any()):
            chosen = self._next(tokens, lengths - 1)
            open_rows = lengths < stops
            tokens[rows[open_rows], lengths[open_rows]] = chosen[open_rows]
            lengths += open_rows
        return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)][: len(prompts)]

    def _next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The token after `positions` [batch] of every row: [batch], the same on every rank."""
        machines, plan = self._machines, self._machines.plan

        def pick(logits: Tensor, payload: Any) -> tuple[Tensor, Tensor]:
            return logits, self._draw(self._whole(logits[positions, torch.arange(len(positions), device=logits.device)]))

        drawn = self._engine.run(Step([Microbatch(tokens)], machines.message, pick))
        chosen = drawn[0] if drawn else torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        source = plan.topology.global_rank(Coordinates(0, 0, 0, plan.placement.rank_of_stage[-1]))
        broadcast(chosen, machines.groups.world, source=source)
        return chosen

    def _whole(self, logits: Tensor) -> Tensor:
        """[batch, V / tp] -> [batch, V], padding cut off."""
        tp = self._machines.groups.tp
        mine = logits.t().contiguous()
        whole = mine.new_empty(mine.shape[0] * tp.size, mine.shape[1])
        all_gather(whole, mine, tp)
        return whole[: self._machines.plan.config.model.vocab_size].t()

    def _draw(self, logits: Tensor) -> Tensor:
        if self._temperature == 0.0:
            return logits.argmax(-1)
        logits = logits.double().cpu() / self._temperature
        if 0 < self._top_k < logits.shape[-1]:
            least = logits.topk(self._top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=self._generator)[:, 0].to(self._machines.device)


def _until(text: list[int], stop_token: int | None, start: int) -> list[int]:
    """The text up to the first stop_token after its prompt."""
    if stop_token is None or stop_token not in text[start:]:
        return text
    return text[: text.index(stop_token, start)]


def _with_logits(module: Any) -> Any:
    return partial(module, return_logits=True) if module.stage_layers.has_head else module

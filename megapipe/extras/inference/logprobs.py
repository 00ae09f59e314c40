"""Log probabilities of tokens under a model, as a generator reports them: `Scoring` asks for them, `Scored` is one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK_ROWS = 256  # rows of logits that are raised to fp64 at a time


@dataclass(frozen=True)
class Scoring:
    """Asks for the log probabilities of new tokens. num_top: also those of the most likely tokens. with_prompt: also
    those of the prompt's tokens but the first.
    """

    num_top: int = 0
    with_prompt: bool = False


@dataclass(frozen=True)
class Scored:
    """A token and its log probability in nats before temperature, top-k and top-p; None for the first of a text.

    top: the most likely tokens in its place, in falling order, each with its log probability.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def scores(logits: Tensor, tokens: Tensor, num_top: int) -> list[Scored]:
    """Return the scores of tokens, [n]. logits: [n, vocabulary]."""
    found = []
    for some, chosen in zip(logits.split(BLOCK_ROWS), tokens.split(BLOCK_ROWS), strict=True):
        logprobs = some.double().log_softmax(-1)
        top = logprobs.topk(min(num_top, logprobs.shape[-1]))
        own = logprobs.gather(-1, chosen[:, None])[:, 0]
        lists = (each.tolist() for each in (chosen, own, top.indices, top.values))
        found += [Scored(token, own, tuple(zip(*top, strict=True))) for token, own, *top in zip(*lists, strict=True)]
    return found

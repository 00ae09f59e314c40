"""`Sampling`: the choice of the next token from the logits: greedy, temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megapipe.errors import ConfigError


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
        if self.temperature < 0.0:
            raise ConfigError(
                f"--temperature {self.temperature} is negative; 0 takes the most likely token, 1 samples as trained"
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
        if self.temperature == 0.0:
            return logits.argmax(-1)
        probabilities, tokens = self.candidates(logits)
        sums = probabilities.cumsum(-1)
        draws = torch.tensor([[_uniform(self.seed, prompt, position)] for prompt in prompts], dtype=torch.float64)
        total = sums[:, -1:]
        # below the total, so that rounding cannot step past the last candidate
        below = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(sums, below, right=True)
        return tokens.gather(-1, chosen)[:, 0].to(logits.device)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities in falling order (0 beyond top_p, not renormalised) and their tokens, [batch, n]."""
        count = min(self.top_k or logits.shape[-1], logits.shape[-1])
        values, tokens = (logits.double().cpu() / self.temperature).sort(dim=-1, descending=True, stable=True)
        probabilities = values[:, :count].softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        return probabilities.masked_fill(before >= self.top_p, 0.0), tokens[:, :count]


def _uniform(seed: int, prompt: int, position: int) -> float:
    bits = np.random.Philox(
        key=np.array([seed, prompt], dtype=np.uint64), counter=np.array([position, 0, 0, 0], dtype=np.uint64)
    )
    return float(np.random.Generator(bits).random())

"""A converted model against transformers' own on the same tokens: the difference of their logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.convert.snapshot import Snapshot
from megapipe.extras.convert.tables import unpadded
from megapipe.model.init import replace_parameter
from megapipe.model.microbatch import Microbatch
from megapipe.model.stage import GPTStage
from megapipe.plan.resolve import resolve_model
from megapipe.schedule.partition import StageLayers

BATCH, LONGEST = 2, 128
TOLERANCE = 1e-4  # of the largest logit, in fp32: sums of thousands of products in different orders


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of logits."""

    largest_difference: float  # of any two logits
    largest_logit: float  # of transformers' model
    same_choice: float  # share of positions at which both models have the same argmax
    num_tokens: int

    @property
    def agree(self) -> bool:
        return self.largest_difference <= TOLERANCE * max(self.largest_logit, 1.0)

    def __str__(self) -> str:
        verdict = "the models agree" if self.agree else "THE MODELS DIFFER"
        return (
            f"{verdict}: largest logit difference {self.largest_difference:.3g} over {self.num_tokens} tokens in fp32 "
            f"(largest logit {self.largest_logit:.3g}), the same choice at {self.same_choice:.1%} of positions"
        )


def compare(snapshot: Snapshot, folder: Path) -> Comparison:
    """Compare a snapshot's model with that of a Hugging Face folder on random tokens, in fp32 on the CPU."""
    assert snapshot.config.model.vocab_size is not None
    tokens = random_tokens(snapshot, snapshot.config.model.vocab_size)
    theirs = hugging_face_logits(folder, tokens)
    ours = stage_logits(snapshot, tokens)
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return Comparison((ours - theirs).abs().max().item(), theirs.abs().max().item(), same, tokens.numel())


def random_tokens(snapshot: Snapshot, vocab_size: int) -> Tensor:
    length = min(LONGEST, unpadded(snapshot.config.model).max_position_embeddings or LONGEST)
    return torch.randint(vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(1))


def loss_of_padding(snapshot: Snapshot, vocab_size: int) -> tuple[float, int]:
    """Return how much of the loss is due to rows from vocab_size on in the softmax, and the tokens it was measured on.

    This is the mean of -log(1 - p), p: the probability of all those rows.
    """
    tokens = random_tokens(snapshot, vocab_size)
    logits = stage_logits(snapshot, tokens).double()
    change = logits.logsumexp(-1) - logits[..., :vocab_size].logsumexp(-1)
    return change.mean().item(), tokens.numel()


@torch.no_grad()
def stage_logits(snapshot: Snapshot, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of the model that trains: one stage on a grid of one rank."""
    config = resolve_model(unpadded(snapshot.config.model), tp=1)
    layers = StageLayers(0, config.num_layers, True, True)
    stage = GPTStage(
        config, layers, Group.alone("tp"), sequence_parallel=False, recompute=RecomputeConfig(), loss=TrainingConfig()
    )
    weights = snapshot.weights
    for name, parameter in list(stage.named_parameters()):
        replace_parameter(stage, parameter, nn.Parameter(weights[name].detach().float(), requires_grad=False))
    for name, state in list(stage.named_buffers()):
        state.copy_(weights[name].detach())
    logits = stage(Microbatch(tokens), return_logits=True)
    assert isinstance(logits, Tensor)
    return logits.transpose(0, 1)


@torch.no_grad()
def hugging_face_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of transformers with its eager attention in fp32."""
    import transformers

    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()
    logits: Tensor = model(tokens, use_cache=False).logits
    return logits

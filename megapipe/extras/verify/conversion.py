"""A converted model against transformers' own: the difference of their logits, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.config import resolve_model
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.convert.snapshot import Snapshot
from megapipe.extras.convert.tables import unpadded
from megapipe.model.microbatch import Microbatch
from megapipe.model.stage import GPTStage
from megapipe.schedule.partition import StageLayers
from megapipe.tokenizers.hugging_face import end_ids

BATCH, LONGEST = 2, 128
TOLERANCE = 1e-4  # of the largest logit, in fp32: sums of thousands of products in different orders


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of logits, and of the tokens that end a text here and by transformers."""

    largest_difference: float  # of any two logits
    largest_logit: float  # of transformers' model
    same_choice: float  # share of positions at which both models have the same argmax
    num_tokens: int
    ends: tuple[set[int], set[int]] | None  # None: not compared

    @property
    def agree(self) -> bool:
        is_close = self.largest_difference <= TOLERANCE * max(self.largest_logit, 1.0)
        return is_close and (self.ends is None or self.ends[0] == self.ends[1])

    def __str__(self) -> str:
        ends = ""
        if self.ends is not None:
            ours, theirs = (", ".join(map(str, sorted(found))) or "no token" for found in self.ends)
            ends = f", texts end at {ours}" + ("" if ours == theirs else f", by transformers at {theirs}")
        return (
            f"{'the models agree' if self.agree else 'THE MODELS DIFFER'}: largest logit difference "
            f"{self.largest_difference:.3g} over {self.num_tokens} tokens in fp32 (largest logit "
            f"{self.largest_logit:.3g}), the same choice at {self.same_choice:.1%} of positions{ends}"
        )


def compare(snapshot: Snapshot, folder: Path, ends: Collection[int] | None = None) -> Comparison:
    """Compare a snapshot's model with that of a Hugging Face folder on random tokens, in fp32 on the CPU, with eager
    attention.

    ends: tokens that end a text here, compared with those of transformers' generation; None: only logits are compared.
    """
    import transformers

    model = unpadded(snapshot.config.model)
    length = min(LONGEST, model.max_position_embeddings or LONGEST)
    tokens = torch.randint(model.vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(1))
    named = transformers.AutoConfig.from_pretrained(str(folder)).architectures or ["AutoModelForCausalLM"]
    kind: Any = getattr(transformers, named[0], transformers.AutoModelForCausalLM)  # not all have an automatic class
    theirs = kind.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected: Tensor = theirs(tokens, use_cache=False).logits
    of_texts = None if ends is None else (set(ends), set(end_ids(theirs.generation_config.to_dict())))
    del theirs
    found = stage_logits(snapshot, tokens)
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    difference = (found - expected).abs().max().item()
    return Comparison(difference, expected.abs().max().item(), same, tokens.numel(), of_texts)


@torch.no_grad()
def stage_logits(snapshot: Snapshot, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of the model that trains."""
    logits = whole_stage(snapshot)(Microbatch(tokens), return_logits=True)
    assert isinstance(logits, Tensor)
    return logits.transpose(0, 1)


@torch.no_grad()
def whole_stage(snapshot: Snapshot) -> GPTStage:
    """Return the model that trains, in fp32: one stage on a grid of one rank."""
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
    return stage


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter in every submodule that holds it: a tied weight is in two."""
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            if parameter is old:
                setattr(owner, attribute, new)

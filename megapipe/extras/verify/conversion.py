"""A converted model against transformers' own: the difference of their logits, and where both end texts."""

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

BATCH, LONGEST = 2, 128
TOLERANCE = 1e-4  # of the largest logit, in fp32: sums of thousands of products in different orders
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 4, 8
CANDIDATES = 6  # random candidates for the next token; few, so that tokens that end a text are chosen, too


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of logits."""

    largest_difference: float  # of any two logits
    largest_logit: float  # of transformers' model
    same_choice: float  # share of positions at which both models have the same argmax
    num_tokens: int
    stops: tuple[tuple[int, int], ...]  # tokens of each text before its end, here and by transformers

    @property
    def agree(self) -> bool:
        is_close = self.largest_difference <= TOLERANCE * max(self.largest_logit, 1.0)
        return is_close and all(ours == theirs for ours, theirs in self.stops)

    def __str__(self) -> str:
        verdict = "the models agree" if self.agree else "THE MODELS DIFFER"
        same = sum(ours == theirs for ours, theirs in self.stops)
        ended = sum(theirs < NEW_TOKENS for _, theirs in self.stops)
        stops = f", {same} of {len(self.stops)} texts stop at the same token ({ended} before the limit)"
        return (
            f"{verdict}: largest logit difference {self.largest_difference:.3g} over {self.num_tokens} tokens in fp32 "
            f"(largest logit {self.largest_logit:.3g}), the same choice at {self.same_choice:.1%} of positions"
            f"{stops if self.stops else ''}"
        )


def compare(snapshot: Snapshot, folder: Path, ends: Collection[int] | None = None) -> Comparison:
    """Compare a snapshot's model with that of a Hugging Face folder on random tokens, in fp32 on the CPU, with eager
    attention.

    ends: tokens that end a text here, compared with transformers' own ends; None: only logits are compared.
    """
    import transformers

    assert snapshot.config.model.vocab_size is not None
    tokens = random_tokens(snapshot, snapshot.config.model.vocab_size)
    named = transformers.AutoConfig.from_pretrained(str(folder)).architectures or ["AutoModelForCausalLM"]
    kind: Any = getattr(transformers, named[0], transformers.AutoModelForCausalLM)  # not all have an automatic class
    model = kind.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs: Tensor = model(tokens, use_cache=False).logits
    longest = snapshot.config.model.max_position_embeddings or LONGEST
    can_write = ends is not None and longest >= PROMPT_TOKENS + NEW_TOKENS
    texts = hugging_face_texts(model, snapshot.config.model.vocab_size, ends or ()) if can_write else None
    del model
    stage = whole_stage(snapshot)
    ours = logits_of(stage, tokens)
    stops: tuple[tuple[int, int], ...] = ()
    if texts is not None:
        logits = logits_of(stage, texts.tokens)
        stops = tuple((_stop(logits[row], texts, row, ends or ()), texts.lengths[row]) for row in range(PROMPTS))
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return Comparison((ours - theirs).abs().max().item(), theirs.abs().max().item(), same, tokens.numel(), stops)


@dataclass(frozen=True)
class Texts:
    """Texts that transformers wrote, each from a few tokens that it could choose from at every position.

    tokens: [texts, PROMPT_TOKENS + NEW_TOKENS] int64, arbitrary after an end; lengths: new tokens of each before
    its end; candidates: of each.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]


@torch.no_grad()
def hugging_face_texts(model: Any, vocab_size: int, ends: Collection[int]) -> Texts:
    """Let transformers continue random prompts greedily, with its own rules for ends. ends: also candidates."""
    generator = torch.Generator().manual_seed(2)
    named = model.generation_config.eos_token_id
    theirs = set(named if isinstance(named, list) else [] if named is None else [named])
    prompts = torch.randint(vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator)
    drawn = torch.randint(vocab_size, (PROMPTS, CANDIDATES), generator=generator).tolist()
    possible = {end for end in theirs | set(ends) if end < vocab_size}
    candidates = tuple(tuple(sorted(possible | set(row))) for row in drawn)
    whole = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda row, tokens: list(candidates[row]),
    )
    tokens = torch.zeros(PROMPTS, PROMPT_TOKENS + NEW_TOKENS, dtype=torch.int64)
    tokens[:, : whole.shape[1]] = whole
    new = whole[:, PROMPT_TOKENS:].tolist()
    found = (next((n for n, token in enumerate(row) if token in theirs), NEW_TOKENS) for row in new)
    return Texts(tokens, tuple(found), candidates)


def _stop(logits: Tensor, texts: Texts, row: int, ends: Collection[int]) -> int:
    """Return the new tokens of a text before its end, as the model with these logits [s, V] would end it.

    A token that transformers chose is also the choice here if its logit is the largest but for rounding.
    """
    length, candidates = texts.lengths[row], texts.candidates[row]
    for number in range(min(length + 1, NEW_TOKENS)):
        scores = logits[PROMPT_TOKENS + number - 1].tolist()
        chosen, best = int(texts.tokens[row, PROMPT_TOKENS + number]), max(candidates, key=scores.__getitem__)
        is_choice = scores[best] - scores[chosen] <= TOLERANCE * max(1.0, *map(abs, scores))
        if (chosen if is_choice else best) in ends or (not is_choice and number < length):
            return number
    return NEW_TOKENS


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


def stage_logits(snapshot: Snapshot, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of the model that trains."""
    return logits_of(whole_stage(snapshot), tokens)


@torch.no_grad()
def logits_of(stage: GPTStage, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, V] of a whole model."""
    logits = stage(Microbatch(tokens), return_logits=True)
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

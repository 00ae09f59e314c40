"""`load`: a trained model as one torch.nn.Module in one process, with its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.checkpoint.folder import read_newest
from megapipe.comm.bootstrap import choose_backend
from megapipe.comm.groups import ProcessGroups
from megapipe.config.config import Config
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import TrainingConfig
from megapipe.errors import ConfigError
from megapipe.extras.cli.convert import HUGGING_FACE, OWN, guess
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.snapshot import DTYPES, Snapshot, read_checkpoint
from megapipe.extras.convert.special_tokens import tokenizer_of_snapshot
from megapipe.extras.inference.generate import Generator, Limits, Sampling
from megapipe.model.microbatch import Microbatch
from megapipe.plan.resolve import resolve
from megapipe.sharding.spec import ParamSpec
from megapipe.tokenizers.tokenizer import Tokenizer, end_tokens


def load(
    checkpoint: str | PathLike[str], *, step: int | None = None, dtype: str | None = None, device: str = "auto"
) -> tuple[LanguageModel, Tokenizer | None]:
    """Load a trained model and its tokenizer into this process; the tokenizer is None if the model was saved without::

        model, tokenizer = load("runs/quickstart/checkpoints")
        logits = model(torch.tensor([tokenizer.encode("Once upon a time")]))
        texts = model.generate([tokenizer.encode("Once upon a time")], max_new_tokens=50)

    checkpoint: a directory given to --save, the folder of one step, or a Hugging Face folder of a family that `megapipe
    convert` knows; of any grid. step: of the first kind, None for the newest complete one. dtype: 'fp32', 'bf16',
    'fp16' or 'fp64', None for that of the checkpoint. device: 'auto', 'cpu' or 'cuda'. Both are chosen here, not
    with model.to(). Raises CheckpointError, ConfigError.
    """
    folder = Path(checkpoint)
    kind = guess(folder)
    if kind not in (OWN, HUGGING_FACE):
        raise ConfigError(f"{folder} is a {kind} checkpoint; convert it first: megapipe convert {folder} NEW_FOLDER")
    if step is not None and kind != OWN:
        raise ConfigError(f"step {step}: {folder} is a {kind} folder, which holds one model; leave step out")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    # a run that saves there may remove the checkpoint before all of it is read
    return read_newest(lambda: None, lambda _: _load(folder, kind, step, dtype, device))


def _load(
    folder: Path, kind: str, step: int | None, dtype: str | None, device: str
) -> tuple[LanguageModel, Tokenizer | None]:
    snapshot = read_checkpoint(folder, step) if kind == OWN else hugging_face.read(folder)
    if dtype is not None:
        snapshot = snapshot.cast(DTYPES[dtype])
    tokenizer = _tokenizer(snapshot)
    _, torch_device = choose_backend("auto", device, 0)
    config = Config(
        # a vocabulary without padding: logits have one column for each token
        model=dataclasses.replace(snapshot.config.model, make_vocab_size_divisible_by=1, padded_vocab_size=None),
        training=TrainingConfig(micro_batch_size=1, train_iters=1, device=torch_device.type),
        precision=PrecisionConfig(dtype=snapshot.config.precision.dtype),
    )
    weights = snapshot.weights

    def value(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return weights[spec.name].detach()

    runtime = InferenceRuntime(resolve(config, 1), ProcessGroups.alone(), torch_device, value)
    for name, state in runtime.stages[0].named_buffers():
        state.copy_(weights[name].detach())
    return LanguageModel(runtime, () if tokenizer is None else end_tokens(tokenizer)), tokenizer


class LanguageModel(nn.Module):
    """A GPT in one process, made by `load`. Its parameters have Megatron's names under `stage`.

    vocab_size: tokens it knows. max_positions: the longest text. There is no dropout, and gradients reach the
    parameters as usual.
    """

    def __init__(self, runtime: InferenceRuntime, ends: Collection[int]) -> None:
        super().__init__()
        model = runtime.plan.config.model
        self.vocab_size, self.max_positions = model.vocab_size, model.max_position_embeddings
        self.stage = runtime.stages[0]
        self._runtime, self._ends = runtime, ends

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, vocab_size] of the token that follows each position, in the model's dtype.

        tokens: [b, s] int64; s is at most max_positions. Raises ConfigError for another shape or type, and for tokens
        outside the vocabulary.
        """
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            given = f"{str(tokens.dtype).removeprefix('torch.')}{list(tokens.shape)}"
            raise ConfigError(f"tokens {given}: give int64 [batch, sequence], with at least one token")
        if tokens.shape[1] > self.max_positions:
            raise ConfigError(f"a text of {tokens.shape[1]} tokens: the model has {self.max_positions} positions")
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            outside = low if low < 0 else high
            raise ConfigError(f"token {outside} is outside 0 .. {self.vocab_size - 1}; use the model's tokenizer")
        logits = self.stage(Microbatch(tokens.to(self._runtime.device)), return_logits=True)
        assert isinstance(logits, Tensor)
        return logits.transpose(0, 1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1234,
        stop_tokens: Collection[int] | None = None,
        batch_size: int = 8,
    ) -> list[list[int]]:
        """Return the tokens that follow each prompt, without the stop token, with a key/value cache.

        temperature: 0 takes the most likely token. top_k: draw among the k most likely tokens, 0 among all. top_p: draw
        among the most likely tokens whose probabilities sum to p. seed: of the draws; a text depends neither on the
        batch nor on other prompts. stop_tokens: None for those at which the tokenizer ends a text. Raises ConfigError
        for a value out of range, and for a prompt without tokens, with unknown ones, or that fills all positions.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {max_new_tokens} must be at least 1")
        if stop_tokens is None:
            stop_tokens = self._ends
        generator = Generator(self._runtime, Sampling(temperature, top_k, top_p, seed), batch_size)
        return generator.continue_prompts(prompts, Limits(max_new_tokens, frozenset(stop_tokens)))


def _tokenizer(snapshot: Snapshot) -> Tokenizer | None:
    """Return the tokenizer of a model, if it has one. Raises ConfigError, DataError if its files are gone or it does
    not belong to the model.
    """
    tokenizer = tokenizer_of_snapshot(snapshot)
    size = snapshot.config.model.vocab_size or 0
    if tokenizer is not None and tokenizer.vocab_size > size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {size}: they do not match")
    return tokenizer

"""`load` gives the model that was trained, as one module: logits, loss, gradients and texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from megapipe.api.config import Config
from megapipe.api.language_model import load
from megapipe.api.trainer import Trainer
from megapipe.assembly.datasets import build_data
from megapipe.errors import CheckpointError, ConfigError
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.train.jobs import TINY, job_on_rank

GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"


def test_a_checkpoint_of_a_grid_has_the_loss_of_its_evaluation(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    flags = f"--train-iters 3 --save {tmp_path / 'run'} --eval-iters 1 --vocab-size 30 {GRID} --swiglu"
    for said, kind, text in rank_pools(4).run(job_on_rank, flags):
        assert kind == "", f"{said}\n{text}"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (tested,) = (line["loss"] for line in lines if line.get("split") == "test")
    model, tokenizer = load(tmp_path / "run", dtype="fp64")
    assert tokenizer is None and model.vocab_size == 30
    data = build_data(resolve(Config.from_flags(f"{TINY} {flags}").values, 4))
    assert data.test is not None
    batch = data.test.microbatch(0, 0, 0, 1, 8)
    logits = model(torch.from_numpy(batch.tokens))
    assert logits.shape == (8, 8, 30) and logits.dtype is torch.float64
    loss = cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
    assert loss.item() == pytest.approx(tested, rel=1e-5)


def test_a_hugging_face_folder_computes_what_transformers_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'megapipe[transformers]'")
    from tests.extras.convert.models import CASES, make, save

    theirs = make(CASES["llama"]).double()
    model, tokenizer = load(save(theirs, tmp_path / "theirs"), dtype="fp64")
    assert tokenizer is None
    tokens = torch.arange(20).view(2, 10) % 7
    logits, expected = model(tokens), theirs(tokens, use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()  # theirs was saved in fp32
    for one in (logits, expected):
        one.square().sum().backward()
    embedding = dict(model.named_parameters())["stage.embedding.word_embeddings.weight"]
    (theirs_embedding,) = (p for name, p in theirs.named_parameters() if name.endswith("embed_tokens.weight"))
    assert (embedding.grad - theirs_embedding.grad).abs().max() <= 1e-4 * theirs_embedding.grad.abs().max()
    text = tokens[:1]
    for _ in range(6):
        text = torch.cat([text, theirs(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert model.generate([tokens[0].tolist()], 6, temperature=0.0) == text[:, 10:].tolist()


def test_a_model_comes_with_the_tokenizer_of_its_run(tmp_path: Path) -> None:
    options = Config.from_flags(TINY).replace(
        train_iters=2, save=tmp_path, tokenizer_type="ByteTokenizer", vocab_size=260, seq_length=16
    )
    Trainer(options).run()
    model, tokenizer = load(tmp_path)
    assert tokenizer is not None
    prompts = [tokenizer.encode("ab"), tokenizer.encode("Thames")]
    texts = model.generate(prompts, 5, seed=3, stop_tokens=())
    assert texts == model.generate(prompts, 5, seed=3, stop_tokens=(), batch_size=1)
    assert [len(text) for text in texts] == [5, 5]
    assert load(tmp_path, step=2)[0].vocab_size == model.vocab_size == 260
    assert load(tmp_path / "step_00000002")[0].max_positions == 16
    for tokens, message in (
        (torch.zeros(3, dtype=torch.int64), r"tokens int64\[3\]: give int64 \[batch, sequence\]"),
        (torch.zeros(1, 3), r"tokens float32\[1, 3\]"),
        (torch.full((1, 2), 260), r"token 260 is outside 0 .. 259"),
        (torch.zeros(1, 17, dtype=torch.int64), "a text of 17 tokens: the model has 16 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            model(tokens)
    with pytest.raises(ConfigError, match="max_new_tokens 0 must be at least 1"):
        model.generate(prompts, 0)
    with pytest.raises(ConfigError, match="dtype 'float8': choose one of"):
        load(tmp_path, dtype="float8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="looks like none of"):
        load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        load(tmp_path / "nowhere")

"""A small run that was finetuned on conversations until it knows them by heart, with its own tokenizer."""

from __future__ import annotations

import dataclasses
import json
import math
import sysconfig
from pathlib import Path

import torch

from megapipe.extras.convert.snapshot import read_checkpoint, write_checkpoint
from megapipe.extras.preprocess.tokenizer_training import train_tokenizer
from tests.train.jobs import job

ANSWERS = {"What comes after one?": "Two.", "What comes after two?": "Three comes next.", "Who are you?": "A model."}
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 96 "
    "--position-embedding-type rope --normalization RMSNorm --micro-batch-size 2 --global-batch-size 2 "
    "--num-workers 0 --eval-iters 0 --device cpu --hidden-dropout 0 --attention-dropout 0 "
    "--tokenizer-type HuggingFaceTokenizer"
)


def write_tokenizer(folder: Path) -> Path:
    """Train a tokenizer of 400 tokens on code."""
    train_tokenizer([(Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text("utf-8")], folder, 400)
    return folder


def train_chat_run(folder: Path) -> Path:
    """Train a model on ANSWERS, and return the folder of its checkpoints."""
    folder.mkdir(exist_ok=True)
    tokenizer = write_tokenizer(folder / "tokenizer")
    chats = folder / "chats.jsonl"
    lines = [json.dumps({"prompt": asked, "completion": answer}) + "\n" for asked, answer in ANSWERS.items()]
    chats.write_text("".join(lines * 4))
    code, said = job(
        f"--tokenizer-model {tokenizer} --sft --train-data-path {chats} --lr 5e-3 --train-iters 60 --lr-warmup-iters 5 "
        f"--save {folder / 'checkpoints'}",
        MODEL,
    )
    assert code == 0, said
    return folder / "checkpoints"


def nan_run(run: Path, folder: Path) -> Path:
    """Write the checkpoint of a run with NaN in all weights, and return its folder."""
    snapshot = read_checkpoint(run)
    weights = {
        f"master/{name}": tensor.map(lambda values: torch.full_like(values, math.nan))
        for name, tensor in snapshot.weights.items()
    }
    write_checkpoint(dataclasses.replace(snapshot, tensors=dict(snapshot.tensors) | weights), folder)
    return folder

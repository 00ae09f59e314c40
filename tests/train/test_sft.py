"""Finetuning on conversations: gradients of packed ones on any grid, from and to a Hugging Face folder, resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.assembly.datasets import planned
from megapipe.comm.groups import build_process_groups
from megapipe.config.load import load_config
from megapipe.data.chat_dataset import ChatDataset
from megapipe.data.loader import Loader
from megapipe.environment import read_environment
from megapipe.extras.cli.command import main as megapipe
from megapipe.extras.convert.hugging_face import start_from
from megapipe.extras.convert.snapshot import read_checkpoint
from megapipe.extras.verify.compare import FP64
from megapipe.extras.verify.oracle import GlobalBatch, Oracle, drawn_slices, whole_weights
from megapipe.extras.verify.parity import compare_with_oracle
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.train import run as run_module
from megapipe.train.run import Job, pretrain
from tests.data.chats import random_chats
from tests.harness import RankPool
from tests.tiny import LLAMA, tiny_config
from tests.train.jobs import furthest, job, steps_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RATES = Rates(0.05, 0.1)
MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 zero": (2, {"zero": True}),
    "tp2 pp2 dp2 zero": (8, {"tp": 2, "pp": 2, "sp": True, "zero": True}),
    "zb-v pp2 dp2": (4, {"pp": 2, "num_layers": 4, "pipeline_schedule": "zb-v"}),
}


def chats(packs: bool) -> ChatDataset:
    """Return 20 conversations of 2 to 16 tokens, which take 12 sequences of 16 if they are packed."""
    lengths = [2 + (7 * i + i * i) % 16 for i in range(20)]
    return ChatDataset(random_chats(lengths, 20), (0, 20), num_samples=1, seq_length=16, seed=(1, 0), packs=packs)


def global_batch(plan: RunPlan, found: ChatDataset) -> GlobalBatch:
    """Return one epoch as a global batch of the plan's grid."""
    micro, dp = plan.config.training.micro_batch_size, plan.topology.dp
    loader = Loader(found)
    return [loader.microbatch(0, k, d, dp, micro) for k in range(len(found) // micro // dp) for d in range(dp)]


def plan_of(world_size: int, grid: dict[str, Any], num_samples: int) -> RunPlan:
    data = {"sft": True, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "unread"}
    sizes = {"seq_length": 16, "global_batch_size": num_samples, "clip_grad": 0.0, "dtype": "fp64"}
    return resolve(tiny_config(**sizes | data | grid), world_size)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_packed_conversations_have_the_gradients_of_single_ones(model: dict[str, Any]) -> None:
    """The reference model in fp64: conversations in 12 sequences, and each in its own, padded."""
    found, slices = [], drawn_slices(3, torch.float64)
    for packs in (True, False):
        samples = chats(packs)
        plan = plan_of(1, model, len(samples))
        found.append(Oracle(plan.config, whole_weights(plan.specs, slices)).step(global_batch(plan, samples), 0, RATES))
        assert len(samples) == (12 if packs else 20)
    packed, single = found
    assert packed.loss == pytest.approx(single.loss, rel=1e-12)
    for name, gradient in single.gradients.items():
        assert (packed.gradients[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


def grid_differs(rank: int, world_size: int, grid: dict[str, Any]) -> list[str]:
    """Return the differences of a step on a grid from the reference's, on packed conversations."""
    samples = chats(True)
    plan = plan_of(world_size, grid, len(samples))
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    slices, batch = drawn_slices(3, torch.float64), global_batch(plan, samples)
    assert len({int(part.loss_mask.sum()) for part in batch if part.loss_mask is not None}) > 1, "equal counts"
    (step,) = compare_with_oracle(plan, groups, torch.device("cpu"), slices, [batch], [RATES], FP64)
    return [] if step.passes else [str(step)]


@pytest.mark.parametrize(("ranks", "grid"), GRIDS.values(), ids=GRIDS)
def test_a_grid_has_the_gradients_of_one_process(
    rank_pools: Callable[[int], RankPool], ranks: int, grid: dict[str, Any]
) -> None:
    """With another number of trained tokens in every microbatch."""
    for wrong in rank_pools(ranks).run(grid_differs, {**LLAMA, "micro_batch_size": 2} | grid):
        assert wrong == []


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights, whose sequence of 256 a conversation of three turns fits in."""
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("model") / "tiny"
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "tiny_chat_model.py"))["main"](EXAMPLES / "chat.jsonl", made)
    return made


def flags(folder: Path, tmp_path: Path, more: str = "") -> str:
    return (
        f"--load {folder} --finetune --sft --data-path {EXAMPLES / 'chat.jsonl'} --split 80,20,0 "
        f"--data-cache-path {tmp_path / 'cache'} --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 4 "
        f"--log-interval 1 --eval-interval 2 --eval-iters 1 --num-workers 0 --device cpu {more}"
    )


def test_one_command_trains_a_hugging_face_folder_and_exports_it(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    code, said = job(flags(folder, tmp_path, f"--save {tmp_path / 'run'}"), base="")
    assert code == 0, said
    assert "train: " in said and "22 conversations of" in said
    losses = [step["loss"] for step in steps_of(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert megapipe(["convert", str(tmp_path / "run"), str(tmp_path / "export"), "--no-check"]) == 0, printed
    from megapipe.extras.convert.special_tokens import ends_of
    from megapipe.extras.verify.conversion import compare

    ends = ends_of(read_checkpoint(tmp_path / "run"))
    comparison = compare(read_checkpoint(tmp_path / "run"), tmp_path / "export", ends)
    assert comparison.largest_difference <= 1e-5 and comparison.agree and comparison.ends == ({*ends}, {*ends})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(folder).chat_template
    # the end of an answer and that of a document
    assert set(ends) == {tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id}


def test_the_first_loss_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Over the trained tokens of the batch, with each conversation alone in transformers."""
    transformers = pytest.importorskip("transformers")
    code, said = job(flags(folder, tmp_path, f"--save {tmp_path} --train-iters 1 --eval-iters 0"), base="")
    assert code == 0, said
    from megapipe.assembly.datasets import dataset_request
    from megapipe.data.chat_dataset import build_chat_datasets
    from megapipe.tokenizers.chat import chat_tokenizer
    from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer

    loaded, _ = start_from(load_config(flags(folder, tmp_path, "--train-iters 1 --eval-iters 0").split()))
    request = dataset_request(planned(loaded, 1, None))
    found, _ = build_chat_datasets(request, chat_tokenizer(HuggingFaceTokenizer(folder)))
    assert isinstance(found.train, ChatDataset)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    total, count, file = 0.0, 0, found.train.file
    for number, _ in (member for index in range(4) for member in found.train.members(index)):
        span = slice(int(file.starts[number]), int(file.starts[number + 1]))
        tokens = torch.from_numpy(file.tokens[span].astype("i8"))
        labels = torch.where(torch.from_numpy(file.trained[span].copy()), tokens, -100)
        with torch.no_grad():
            kept = int((labels[1:] != -100).sum())
            total += model(tokens[None], labels=labels[None]).loss.item() * kept
        count += kept
    (step,) = steps_of(tmp_path / "metrics.jsonl")
    assert step["loss"] == pytest.approx(total / count, rel=1e-5)


def finetune_on_rank(rank: int, world_size: int, words: str) -> str:
    """Run a job from a Hugging Face folder on a rank of the harness and return its output."""
    run_module.shutdown = lambda code=0: None  # type: ignore[assignment]
    loaded, weights = start_from(load_config(words.split()))
    plan = planned(loaded, world_size, None)
    environment = dataclasses.replace(
        read_environment({}), global_rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
    )
    with contextlib.redirect_stdout(io.StringIO()) as said:
        pretrain(Job(plan, environment, loaded.text(plan.config), weights=weights))
    return said.getvalue()


def test_a_grid_finetunes_to_the_same_weights(
    rank_pools: Callable[[int], RankPool], folder: Path, tmp_path: Path
) -> None:
    more = "--fp64 --clip-grad 0 --save {}"
    assert job(flags(folder, tmp_path, more.format(tmp_path / "one")), base="")[0] == 0
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    words = flags(folder, tmp_path, more.format(tmp_path / "four") + f" {grid} --sequence-parallel")
    rank_pools(4).run(finetune_on_rank, words)
    assert furthest(tmp_path / "one", tmp_path / "four") < 1e-9


def test_a_run_that_is_resumed_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """Over an epoch's end, with evaluation; the model and the tokenizer come from the checkpoint."""
    saved = "--save {0} --train-iters {1} --lr-decay-iters 6 {2}"
    assert job(flags(folder, tmp_path, saved.format(tmp_path / "whole", 6, "")), base="")[0] == 0
    stopped = saved.format(tmp_path / "parts", 6, "--exit-interval 3")
    assert job(flags(folder, tmp_path, stopped), base="")[0] == 0
    resumed = saved.format(tmp_path / "parts", 6, "")
    words = flags(tmp_path / "parts", tmp_path, resumed).replace("--finetune ", "")
    code, said = job(words, base="")
    assert code == 0 and "changed since" not in said, said
    assert f"{tmp_path}/parts/step_00000003\n" in said and "\ntokenizer from" in said
    assert furthest(tmp_path / "whole", tmp_path / "parts") == 0.0
    code, said = job(words + " --sft-tokenizer-prompt-format plain --train-iters 8", base="")
    assert code == 1 and "  data:\n" in said


def test_frozen_weights_of_a_folder_stay_as_they_are(folder: Path, tmp_path: Path) -> None:
    words = flags(
        folder, tmp_path, f"--save {tmp_path / 'run'} --train-iters 1 --freeze embedding.* decoder.layers.0.*"
    )
    code, said = job(words, base="")
    assert code == 0, said
    _, before = start_from(load_config(words.split()))
    for name, after in read_checkpoint(tmp_path / "run").weights.items():
        is_frozen = name.startswith(("embedding.", "decoder.layers.0."))
        assert torch.equal(after.detach(), before[f"master/{name}"].detach().to(after.dtype)) == is_frozen, name


REFUSED = {
    "conflict": (
        "--num-layers 3 --hidden-size 32",
        ["num_layers is 3 by flag --num-layers, but 2", "hidden_size"],
    ),
    "mock": ("--mock-data", ["--mock-data"]),
    "mean": ("--no-calculate-per-token-loss", ["calculate_per_token_loss is false by flag", "--sft averages the loss"]),
    "tokenizer": ("--tokenizer-type ByteTokenizer", ["the tokenizer is not the one that", "ByteTokenizer (257 tokens"]),
    "no sft": ("--no-sft --sft-overlong drop", ["--sft-overlong drop needs --sft"]),
    "too long": ("--seq-length 32", ["conversations are longer than --seq-length 32"]),
    "no special tokens": ("--sft-tokenizer-prompt-format llama3", ["writes the special token <|begin_of_text|>"]),
    "no finetune": ("--no-finetune", ["is a Hugging Face folder", "add --finetune"]),
}


@pytest.mark.parametrize(("more", "messages"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, more: str, messages: list[str]) -> None:
    code, said = job(flags(folder, tmp_path, more), base="")
    assert code in (1, 2)
    assert all(message in said for message in messages), said
    assert "Traceback" not in said


def test_flags_that_weights_do_not_decide_win_over_the_folder(folder: Path, tmp_path: Path) -> None:
    more = "--seq-length 200 --attention-dropout 0.1 --make-vocab-size-divisible-by 64"
    loaded, weights = start_from(load_config(flags(folder, tmp_path, more).split()))
    model = loaded.config.model
    assert (model.seq_length, model.attention_dropout, model.num_layers) == (200, 0.1, 2)
    assert loaded.config.data.tokenizer_type == "HuggingFaceTokenizer"
    assert len(weights) == 15
    config = json.loads((folder / "config.json").read_text())
    assert model.vocab_size == config["vocab_size"]

"""`megapipe generate` and `evaluate`: a model from a checkpoint on a grid of ranks, its texts and its perplexity."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.changes import check_tokenizer
from megapipe.checkpoint.folder import (
    LATEST_NAME,
    STEP_FOLDER,
    CheckpointFolder,
    find_checkpoint,
    open_folder,
    read_newest,
    saved_config,
    saved_tokenizer,
    step_of_folder,
    steps_in,
)
from megapipe.config.config import Config
from megapipe.config.files import TOKENIZER_TYPES, DataConfig, is_hugging_face
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import DEVICES, TrainingConfig
from megapipe.data.indexed_file import IndexedFile, bin_path, idx_path, made_with
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, ConfigError, DataError
from megapipe.extras.cli.frame import command, option, switch, write_file
from megapipe.extras.preprocess.text_source import TEXT_KEY, find_files, read_records
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.tokenizers.tokenizer import Fingerprint, Tokenizer, described, end_tokens, is_same, tokenizer_fingerprint

if TYPE_CHECKING:
    from megapipe.assembly.runtime import InferenceRuntime
    from megapipe.comm.meeting import Fact, Facts

CHECKPOINT_OPTIONS = (
    option("--ckpt-step", "step to load (default: the newest complete checkpoint)", type=int),
    option("--dtype", "weights and activations (default: as the model was trained)", choices=TENSOR_DTYPES),
    option("--device", "default: cuda if there is a GPU", choices=DEVICES, default="auto"),
    option("--tokenizer-type", "default: the tokenizer saved with the checkpoint", choices=TOKENIZER_TYPES),
    option("--tokenizer-model", "file or folder of that tokenizer", metavar="PATH"),
)
GRID = tuple(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor"))
GRID_OPTIONS = (
    "grid; start the ranks with `megapipe launch` or torchrun",
    option("--tensor-model-parallel-size", default=1),
    option("--pipeline-model-parallel-size", default=1),
    option("--expert-model-parallel-size", "ranks among which experts are divided", default=1),
    option("--expert-tensor-parallel-size", "ranks that share every expert (default: tp)", type=int),
)
LOAD = option("--load", "directory of checkpoints, as pretraining's --save", required=True, metavar="DIR")
MODEL_OPTIONS = ("model", LOAD, *CHECKPOINT_OPTIONS, *GRID_OPTIONS)
SAMPLING_OPTIONS = (
    "sampling",
    option("--temperature", "0: always the most likely token", default=1.0),
    option("--top-k", "sample from the K most likely tokens, 0: all", default=0),
    option("--top-p", "sample from the most likely tokens whose probabilities sum to P", default=1.0),
    option("--seed", default=1234),
)
GENERATE_OPTIONS = (
    *MODEL_OPTIONS,
    "prompts",
    option("--prompt", "a text to continue; may be given repeatedly", action="append", default=[], metavar="TEXT"),
    option("--prompts-file", "one prompt per line; in .jsonl the key `prompt`", type=Path),
    option("--batch-size", "prompts per batch", default=8),
    option("--output", "write JSON lines {prompt, text, num_tokens} instead of printing", type=Path),
    option("--max-new-tokens", default=128, at_least=1),
    switch("--ignore-eod", "continue after the tokens that end a text"),
    *SAMPLING_OPTIONS,
)
EVALUATE_OPTIONS = (
    *MODEL_OPTIONS,
    "data",
    option("--data", "PREFIX of .bin/.idx, or text files", required=True, nargs="+", metavar="PATH"),
    option("--max-tokens", "only the first N tokens", type=int),
    option("--seq-length", "length of a window (default: as trained)", type=int),
    option("--stride", "tokens scored in a window (default: all)", type=int),
    option("--micro-batch-size", "windows at a time", default=4),
    switch("--json", "print one JSON object"),
)


@dataclass
class SavedModel:
    """The model of a checkpoint, planned on the ranks of this process. folder: of the checkpoint."""

    folder: Path
    plan: RunPlan
    tokenizer: Tokenizer | None
    environment: Environment
    own: argparse.Namespace  # the options of the command
    trained_with: Fingerprint | None = None  # that tokenizer
    is_trained_on_text: bool = False  # the run trained it on text, not on conversations
    is_step_given: bool = False  # by the user, so that no other step may be read

    def required_tokenizer(self, instead: str = "") -> Tokenizer:
        """Return the tokenizer. instead: what could be given in place of one. Raises ConfigError without one."""
        if self.tokenizer is None:
            flags = f"--tokenizer-type and --tokenizer-model{instead}"
            raise ConfigError(f"{self.folder} was trained without a tokenizer: give {flags}")
        return self.tokenizer

    def chat_tokenizer(self) -> tuple[ChatTokenizer | None, str]:
        """Return the tokenizer with the chat template that the model was trained with, or None and the reason."""
        tokenizer = self.required_tokenizer()
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat_template() is None:
            return None, "its tokenizer has no chat template"
        if self.is_trained_on_text:
            return None, "it was trained on text, not yet on conversations (--sft)"
        return ChatTokenizer(tokenizer), ""

    def runtime(self, data_facts: Callable[[], Facts] = dict) -> InferenceRuntime:
        """Join the other ranks, build the stages and load the weights.

        data_facts: returns what the command has read, compared in place of its options of the same names. Raises
        DisagreementError on all ranks if options, data, checkpoint, tokenizer or versions differ.
        """
        from megapipe.assembly.runtime import InferenceRuntime
        from megapipe.comm.bootstrap import start
        from megapipe.comm.groups import build_process_groups
        from megapipe.extras.inference.session import load_weights
        from megapipe.train.state import on_rank_0

        device = self.plan.config.training.device
        world = start(self.environment, device=device, facts_of=lambda _: {**self.facts(), **data_facts()})
        groups = build_process_groups(self.plan.topology, world.global_rank, world.backend, world.timeout_seconds)
        runtime = InferenceRuntime(self.plan, groups, world.device)
        read_newest(lambda: on_rank_0(self._found, groups.world), functools.partial(load_weights, runtime))
        return runtime

    def facts(self) -> Facts:
        """Return what the ranks compare before they load: options, checkpoint, tokenizer, versions and device."""
        from megapipe.comm.meeting import Fact
        from megapipe.extras.cli.agreement import command_facts
        from megapipe.train.facts import checkpoint_fact

        facts = dict(command_facts(self.own, self.environment, "auto", self.plan.config.training.device))
        facts["--load" if "--load" in facts else "load"] = checkpoint_fact(self.folder)
        if self.tokenizer is not None:
            used = tokenizer_fingerprint(self.tokenizer, self.plan.config.data.tokenizer_model)
            facts["tokenizer"] = Fact(described(used), json.dumps(used | {"source": None}, sort_keys=True))
        return facts

    def _found(self) -> CheckpointFolder:
        """Open the checkpoint, or the newest one if that was removed by a run that saves and prunes there."""
        try:
            return open_folder(self.folder)
        except CheckpointError:
            if self.is_step_given or self.folder.exists():
                raise
        newer = find_checkpoint(self.folder.parent)
        if newer is None:
            raise CheckpointError(f"{self.folder} was removed, and {self.folder.parent} holds no other checkpoint")
        print(f"{self.folder} was removed meanwhile; {newer.path.name} is read instead", file=sys.stderr)
        self.folder = newer.path
        return newer

    def tell_copies(self) -> None:
        """Say on rank 0 if there are more ranks than the model needs."""
        ranks = self.plan.topology
        num_copies = min(ranks.dp, ranks.edp) if self.plan.model.has_experts else ranks.dp
        if num_copies > 1 and self.environment.global_rank == 0:
            copies = f"{ranks.world_size} ranks hold {num_copies} copies of the model, which write the same text"
            remark = f"{copies}: {ranks.world_size // num_copies} generate as fast"
            print(remark, file=sys.stderr)


def located(run: Path, step: int | None) -> tuple[Path, int | None]:
    """Return the folder of checkpoints and the step of a run's folder, its `checkpoints`, or one of the checkpoints."""
    if STEP_FOLDER.fullmatch(run.name) and step is None:
        return run.parent, step_of_folder(run)
    return (run / "checkpoints" if (run / "checkpoints").is_dir() else run), step


def newest_below(run: Path) -> Path:
    """Return the folder itself, or if it has no checkpoint that of those below it which was saved to last."""
    if STEP_FOLDER.fullmatch(run.name) or steps_in(located(run, None)[0]):
        return run
    below = [path for depth in ("*", "*/*", "*/*/*") for path in run.glob(f"{depth}/{LATEST_NAME}")]
    return max(below, key=lambda path: path.stat().st_mtime).parent if below else run


def open_model(
    own: argparse.Namespace,
    environment: Environment,
    micro_batch_size: int,
    seq_length: int | None = None,
    takes_newest: bool = False,
) -> SavedModel:
    """Plan a saved model on these ranks. Raises ConfigError, CheckpointError, DataError.

    seq_length: instead of the one that it was trained with. takes_newest: --load may also be a folder of runs.
    """
    run = newest_below(Path(own.load)) if takes_newest else Path(own.load)
    root, step = located(run, own.ckpt_step)
    planned = functools.partial(_planned, own, environment, micro_batch_size, seq_length, step is not None)
    return read_newest(lambda: find_checkpoint(root, step), planned)


def _planned(
    own: argparse.Namespace,
    environment: Environment,
    micro_batch_size: int,
    seq_length: int | None,
    is_step_given: bool,
    found: CheckpointFolder | None,
) -> SavedModel:
    if found is None:
        what = "holds no checkpoint" if Path(own.load).exists() else "does not exist"
        if is_hugging_face(own.load):
            raise CheckpointError(f"{own.load} is a Hugging Face folder; first megapipe convert {own.load} NEW_FOLDER")
        raise CheckpointError(f"{own.load} {what}; give the folder that --save wrote checkpoints to")
    saved = saved_config(found)
    model = saved.model
    if seq_length is not None:
        positions = model.max_position_embeddings or model.seq_length
        if not 1 <= seq_length <= positions:
            raise ConfigError(f"--seq-length {seq_length} must be in 1 .. {positions}, the trained model's positions")
        model = replace(model, seq_length=seq_length, max_position_embeddings=positions)
    grid = {name: getattr(own, name) for name in GRID if hasattr(own, name)}
    config = Config(
        model=model,
        parallel=ParallelConfig(**grid, sequence_parallel=grid.get(GRID[0], 1) > 1 and model.num_experts is not None),
        training=TrainingConfig(micro_batch_size=micro_batch_size, train_iters=1, device=own.device),
        precision=PrecisionConfig(dtype=own.dtype or saved.precision.dtype),
        data=_tokenizer_files(own, saved.data, found.path),
    )
    tokenizer = tokenizer_of(config, is_resolved=True)
    if tokenizer is not None and tokenizer.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"--tokenizer-type {tokenizer.name} has {tokenizer.vocab_size} tokens, the model {found.path} only "
            f"{model.vocab_size}; give the tokenizer that it was trained with"
        )
    trained_with = found.manifest.state.get("tokenizer")
    if tokenizer is not None and trained_with is not None:
        given = tokenizer_fingerprint(tokenizer, own.tokenizer_model)
        check_tokenizer(found.manifest.state, given, str(found.path), is_finetuning=True)
    plan = resolve(config, environment.world_size, environment.local_world_size)
    on_text = not saved.data.sft and (saved.data.data_path or saved.data.train_data_path) is not None
    return SavedModel(found.path, plan, tokenizer, environment, own, trained_with, on_text, is_step_given)


def _tokenizer_files(own: argparse.Namespace, saved: DataConfig, folder: Path) -> DataConfig:
    """Return the tokenizer's files: from the flags, else the copy in the checkpoint, else those of the training run."""
    if own.tokenizer_type is not None:
        return DataConfig(tokenizer_type=own.tokenizer_type, tokenizer_model=own.tokenizer_model)
    found = saved_tokenizer(folder, saved)
    if own.tokenizer_model is not None:
        found = {"tokenizer_type": saved.tokenizer_type, "tokenizer_model": own.tokenizer_model}
    return DataConfig(**found)


@command("megapipe generate", GENERATE_OPTIONS, on_ranks=True)
def generate(own: argparse.Namespace, environment: Environment) -> None:
    """Generate texts with a trained model: continue prompts, on any grid that fits.

        megapipe generate --load runs/quickstart/*/checkpoints --prompt "Once upon a time" --max-new-tokens 100
        megapipe generate --load CHECKPOINTS --prompts-file prompts.txt --temperature 0 --output texts.jsonl
        megapipe launch --nproc-per-node 4 tools/generate.py --load CHECKPOINTS --tensor-model-parallel-size 2 \\
            --pipeline-model-parallel-size 2 --prompt "def main"

    A draw depends on --seed, the number of the prompt and the number of the token alone: neither the grid nor the batch
    changes a text, but for rounding. tools/generate.py is the same.
    """
    prompts = list(own.prompt)
    if own.prompts_file is not None:
        key = "prompt" if own.prompts_file.suffix == ".jsonl" else TEXT_KEY
        records = read_records(find_files([str(own.prompts_file)]), "line", keys=[key])
        prompts += [text for record in records for text in record.texts([key]) if text.strip()]
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts-file FILE")
    model = open_model(own, environment, micro_batch_size=max(1, min(own.batch_size, len(prompts))))
    tokenizer = model.required_tokenizer()
    is_first = environment.global_rank == 0
    model.tell_copies()
    from megapipe.extras.inference.generate import Generator, Limits, Sampling, TextStream

    sampling = Sampling(own.temperature, own.top_k, own.top_p, own.seed)
    eod = [] if tokenizer.eod is None else [tokenizer.eod]
    ends = frozenset() if own.ignore_eod else frozenset(end_tokens(tokenizer))
    starts = [tokenizer.encode(text) or eod for text in prompts]  # an empty prompt begins a document
    generator = Generator(model.runtime(), sampling, own.batch_size)
    limits = Limits(own.max_new_tokens, ends)
    if len(prompts) == 1 and is_first and own.output is None:
        write = functools.partial(print, end="", flush=True)
        write(prompts[0])
        stream = TextStream(tokenizer.decode, starts[0], write)
        generator.continue_prompts(starts, limits, lambda number, token: stream.add(token))
        stream.close()
        print(flush=True)
        return
    texts = generator.continue_prompts(starts, limits)
    if not is_first:
        return
    rows = [
        {
            "prompt": prompt,
            "text": tokenizer.decode([*start, *text])[len(tokenizer.decode(start)) :],
            "num_tokens": len(text),
        }
        for prompt, start, text in zip(prompts, starts, texts, strict=True)
    ]
    if own.output is None:
        for row in rows:
            print(f"--- {row['prompt']}\n{row['prompt']}{row['text']}")
        return
    write_file(own.output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "--output")
    print(f"wrote {len(rows)} texts to {own.output}", file=sys.stderr)


@command("megapipe evaluate", EVALUATE_OPTIONS, on_ranks=True)
def evaluate(own: argparse.Namespace, environment: Environment) -> None:
    """Compute loss and perplexity of a trained model on a text or a token file, on any grid.

        megapipe evaluate --load CHECKPOINTS --data held_out.txt
        megapipe evaluate --load CHECKPOINTS --data data/corpus_text_document --max-tokens 1000000 --json
        megapipe launch --nproc-per-node 4 tools/evaluate.py --load CHECKPOINTS --pipeline-model-parallel-size 2 \\
            --data held_out.jsonl

    --data is PREFIX of PREFIX.bin/.idx, or text files (.txt, .jsonl with the key `text`, ...), each document followed
    by the end-of-document token. The tokens are one stream, cut into windows of --seq-length; every token but the first
    is scored once. With --stride N below the window's length each window scores its last N tokens, so that every token
    has at least seq-length - N before it: slower, and nearer to what the model knows. Ranks beyond tensor x pipeline
    parallel size share the windows. tools/evaluate.py is the same.
    """
    model = open_model(own, environment, own.micro_batch_size, own.seq_length)
    tokens, num_bytes = _tokens(model, own.data)
    if own.max_tokens is not None and own.max_tokens < len(tokens):
        tokens, num_bytes = tokens[: own.max_tokens], None
    from megapipe.extras.inference.generate import score, windows

    seq = model.plan.config.model.seq_length
    next(windows(len(tokens), seq, own.stride or seq))  # report errors before the model is built
    runtime = model.runtime(lambda: {"--data": _data_fact(own.data, tokens)})
    is_first = environment.global_rank == 0

    def say(line: str) -> None:
        if is_first and not own.json:
            print(line, file=sys.stderr, flush=True)

    result = score(runtime, tokens, own.stride, say)
    if not math.isfinite(result.loss):
        where, dtype = f"the loss of {model.folder} is {result.loss}", model.plan.config.precision.dtype
        raise CheckpointError(
            f"{where}: weights are not finite, or numbers overflow in {dtype}; take an earlier checkpoint with "
            "--ckpt-step N, or try --dtype fp32"
        )
    if not is_first:
        return
    bits_per_byte = None
    if num_bytes is not None:
        bits_per_byte = result.loss * result.num_tokens / math.log(2.0) / num_bytes
    if own.json:
        row = {
            "loss": result.loss,
            "perplexity": None if math.isinf(result.perplexity) else result.perplexity,
            "num_tokens": result.num_tokens,
            "bits_per_byte": bits_per_byte,
            "checkpoint": str(model.folder),
        }
        print(json.dumps(row))
        return
    in_bytes = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits a byte of text"
    print(
        f"{model.folder}: loss {result.loss:.4f} nats a token, perplexity {result.perplexity:.4g}{in_bytes}, over "
        f"{result.num_tokens:,} tokens"
    )


def _data_fact(paths: Sequence[str], tokens: Any) -> Fact:
    """Return the tokens that are scored, whole, whatever files they come from."""
    from megapipe.comm.meeting import Fact

    content = f"{len(tokens):,} tokens, checksum {zlib.crc32(np.ascontiguousarray(tokens).data):08x}"
    return Fact(f"{' '.join(paths)} ({content})", content)


def _tokens(model: SavedModel, paths: Sequence[str]) -> tuple[Any, int | None]:
    """Return (one stream of tokens, bytes of the text or None for token files)."""
    if any(idx_path(path).is_file() for path in paths):
        for path, found in ((path, made_with(path)) for path in paths):
            if found is not None and model.trained_with is not None and not is_same(found, model.trained_with):
                both = f"{described(found)}; the model was trained with {described(model.trained_with)}"
                raise DataError(f"--data {path} was made with another tokenizer: {both}")
        tokens = np.concatenate([_stream(IndexedFile(path)) for path in paths])
        vocab_size = model.plan.config.model.vocab_size
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise DataError(
                f"--data holds token {tokens.max()}, the model's vocabulary has {vocab_size}: the file was made with "
                "another tokenizer"
            )
        return tokens, None
    tokenizer = model.required_tokenizer(", or a token file")
    ids: list[int] = []
    num_bytes = 0
    for record in read_records(find_files(paths)):
        for text in record.texts([TEXT_KEY]):
            num_bytes += len(text.encode())
            ids += tokenizer.encode(text)
            if tokenizer.eod is not None:
                ids.append(tokenizer.eod)
    return np.array(ids, dtype=np.int64), num_bytes


def _stream(file: IndexedFile) -> Any:
    if file.is_contiguous():
        return np.memmap(bin_path(file.prefix), file.dtype, "r", shape=(file.num_tokens,))
    return np.concatenate([file.read(number) for number in range(len(file))])

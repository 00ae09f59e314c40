"""`megapipe generate` and `evaluate`: a model from a checkpoint on a grid of ranks, its texts and its perplexity."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path

from megapipe.config.files import TOKENIZER_TYPES
from megapipe.config.training import DEVICES
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.frame import command, option, switch, write_file
from megapipe.extras.inference.saved_model import ModelRequest, data_fact, open_model, tokens_of
from megapipe.extras.preprocess.text_source import TEXT_KEY, find_files, read_records
from megapipe.tokenizers.tokenizer import end_tokens

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


def model_asked(own: argparse.Namespace, environment: Environment) -> ModelRequest:
    """Return the model that CHECKPOINT_OPTIONS, GRID_OPTIONS and --load or RUN ask for."""
    from megapipe.extras.cli.agreement import command_facts

    return ModelRequest(
        load=Path(own.load),
        step=own.ckpt_step,
        dtype=own.dtype,
        device=own.device,
        tokenizer_type=own.tokenizer_type,
        tokenizer_model=own.tokenizer_model,
        grid={name: getattr(own, name) for name in GRID if hasattr(own, name)},
        facts_on=lambda device: command_facts(own, environment, "auto", device),
    )


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
    batch_size = max(1, min(own.batch_size, len(prompts)))
    model = open_model(model_asked(own, environment), environment, batch_size)
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
    model = open_model(model_asked(own, environment), environment, own.micro_batch_size, own.seq_length)
    tokens, num_bytes = tokens_of(model, own.data)
    if own.max_tokens is not None and own.max_tokens < len(tokens):
        tokens, num_bytes = tokens[: own.max_tokens], None
    from megapipe.extras.inference.generate import score, windows

    seq = model.plan.config.model.seq_length
    next(windows(len(tokens), seq, own.stride or seq))  # report errors before the model is built
    runtime = model.runtime(lambda: {"--data": data_fact(own.data, tokens)})
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

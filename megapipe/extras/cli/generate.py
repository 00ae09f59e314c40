"""Generate texts with a trained model: continue prompts, on any grid that fits.

    megapipe generate --load runs/quickstart/*/checkpoints --prompt "Once upon a time" --max-new-tokens 100
    megapipe generate --load CHECKPOINTS --prompts-file prompts.txt --temperature 0 --output texts.jsonl
    megapipe launch --nproc-per-node 4 tools/generate.py --load CHECKPOINTS --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --prompt "def main"

A draw depends on --seed, the number of the prompt and the number of the token alone: neither the grid nor the batch
changes a text, but for rounding. tools/generate.py is the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

from megapipe.environment import Environment
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli.frame import Command, option, write_file
from megapipe.extras.cli.saved_model import MODEL_OPTIONS, open_model

OPTIONS = (
    *MODEL_OPTIONS,
    "prompts",
    option("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; may be given repeatedly"),
    option("--prompts-file", metavar="FILE", type=Path, help="one prompt per line; in .jsonl the key `prompt`"),
    option("--batch-size", type=int, default=8, metavar="N", help="prompts per batch (default: 8)"),
    option(
        "--output",
        metavar="FILE",
        type=Path,
        help="write JSON lines {prompt, text, num_tokens} instead of printing",
    ),
    "sampling",
    option("--max-new-tokens", type=int, default=128, at_least=1, metavar="N", help="default: 128"),
    option("--temperature", type=float, default=1.0, metavar="T", help="0: always the most likely token (default: 1)"),
    option("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: 0, all)"),
    option(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P (default: 1)",
    ),
    option("--seed", type=int, default=1234, help="default: 1234"),
    option("--ignore-eod", action="store_true", help="continue after the end-of-document token"),
)


def _generate(own: argparse.Namespace, environment: Environment) -> None:
    prompts = [*own.prompt, *([] if own.prompts_file is None else _read_prompts(own.prompts_file))]
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts-file FILE")
    model = open_model(own, environment, micro_batch_size=max(1, min(own.batch_size, len(prompts))))
    tokenizer = model.required_tokenizer()
    if model.plan.topology.dp > 1:
        raise ConfigError(
            f"{environment.world_size} ranks hold {model.plan.topology.dp} copies of the model: start "
            f"{environment.world_size // model.plan.topology.dp}, tensor x pipeline parallel size"
        )
    from megapipe.extras.inference.generate import Generator, Limits, TextStream
    from megapipe.extras.inference.sampling import Sampling

    sampling = Sampling(own.temperature, own.top_k, own.top_p, own.seed)
    eod = [] if tokenizer.eod is None else [tokenizer.eod]
    starts = [tokenizer.encode(text) or eod for text in prompts]  # an empty prompt begins a document
    generator = Generator(model.runtime(), sampling, own.batch_size)
    limits = Limits(own.max_new_tokens, frozenset() if own.ignore_eod else frozenset(eod))
    is_first = environment.global_rank == 0
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


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts-file {path} cannot be read: {error}") from None
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError):
            message = f"{path}, line {number}: expected a JSON object with the key `prompt`, got {line[:80]}"
            raise DataError(message) from None
    return prompts


main = Command("megapipe generate", __doc__, OPTIONS, _generate, on_ranks=True)

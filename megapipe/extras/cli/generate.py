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
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megapipe.environment import Environment
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli.saved_model import SavedModel, add_model_flags, open_model, parse, run_on_all_ranks
from megapipe.tokenizers.tokenizer import Tokenizer


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapipe generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add_model_flags(parser)
    text = parser.add_argument_group("prompts")
    text.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; may be given several times"
    )
    text.add_argument("--prompts-file", metavar="FILE", help="one prompt per line; in .jsonl the key `prompt`")
    text.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="prompts per batch (default: 8)",
    )
    text.add_argument(
        "--output", metavar="FILE", help="write JSON lines {prompt, text, num_tokens} instead of printing"
    )
    how = parser.add_argument_group("sampling")
    how.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    how.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0: always the most likely token (default: 1)"
    )
    how.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: 0, all)"
    )
    how.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P (default: 1)",
    )
    how.add_argument("--seed", type=int, default=1234, help="default: 1234")
    how.add_argument("--ignore-eod", action="store_true", help="continue after the end-of-document token")
    return parser


def main(argv: Sequence[str]) -> int:
    """Generate on this rank and return the exit code."""
    return run_on_all_ranks("megapipe generate", lambda environment: _generate(argv, environment))


def _generate(argv: Sequence[str], environment: Environment) -> int:
    arguments = parse(build_parser(), argv)
    prompts = _prompts(arguments)
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {arguments.max_new_tokens}: expected at least 1")
    size = min(arguments.batch_size, len(prompts))
    model = open_model(arguments, environment, micro_batch_size=max(1, size))
    tokenizer = _required(model)
    if model.plan.topology.dp > 1:
        raise ConfigError(
            f"{environment.world_size} ranks hold {model.plan.topology.dp} copies of the model: start "
            f"{environment.world_size // model.plan.topology.dp}, tensor x pipeline parallel size"
        )
    from megapipe.extras.inference.generate import Generator, Limits
    from megapipe.extras.inference.sampling import Sampling

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    tokens = [_encoded(tokenizer, text) for text in prompts]
    generator = Generator(model.runtime(), sampling, arguments.batch_size)
    stop = frozenset() if tokenizer.eod is None or arguments.ignore_eod else frozenset({tokenizer.eod})
    limits = Limits(arguments.max_new_tokens, stop)
    speaks = environment.global_rank == 0
    if len(prompts) == 1 and speaks and arguments.output is None:
        on_token, close = _streaming(tokenizer, prompts[0], tokens[0])
        generator.continue_prompts(tokens, limits, on_token)
        close()
        return 0
    texts = generator.continue_prompts(tokens, limits)
    if speaks:
        rows = [
            {"prompt": prompt, "text": _continuation(tokenizer, start, text), "num_tokens": len(text)}
            for prompt, start, text in zip(prompts, tokens, texts, strict=True)
        ]
        _write(rows, arguments.output)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts_file is not None:
        prompts += _read_prompts(Path(arguments.prompts_file))
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts-file FILE")
    return prompts


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
            raise DataError(
                f"{path}, line {number}: expected a JSON object with the key `prompt`, got {line[:80]}"
            ) from None
    return prompts


def _required(model: SavedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise ConfigError(
            f"{model.folder} was trained without a tokenizer: give --tokenizer-type and --tokenizer-model"
        )
    return model.tokenizer


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens = tokenizer.encode(text)
    return tokens if tokens or tokenizer.eod is None else [tokenizer.eod]  # an empty prompt begins a document


def _streaming(
    tokenizer: Tokenizer, prompt: str, tokens: Sequence[int]
) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    from megapipe.extras.inference.generate import TextStream

    def write(text: str) -> None:
        print(text, end="", flush=True)

    write(prompt)
    stream = TextStream(tokenizer.decode, tokens, write)

    def close() -> None:
        stream.close()
        print(flush=True)

    return lambda number, token: stream.add(token), close


def _continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


def _write(rows: list[dict[str, Any]], output: str | None) -> None:
    if output is None:
        for row in rows:
            print(f"--- {row['prompt']}\n{row['prompt']}{row['text']}")
        return
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from None
    print(f"wrote {len(rows)} texts to {output}", file=sys.stderr)

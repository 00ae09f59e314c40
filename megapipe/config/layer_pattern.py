"""Patterns of layers as text: Megatron's frequencies and lists, the words of --layer-pattern, and JSON files of
Llama-Nemotron's block configurations. What a pattern means for each layer is `config.layers`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from megapipe.errors import ConfigError
from megapipe.input_files import MOST_BYTES, regular

REPEAT = "..."  # as the last word of a pattern
PARTS = ("attention", "mlp")
# the sizes of a part in a file of block configurations; of two the first one counts
BLOCK_SIZES = {"attention": ("num_query_groups", "n_heads_in_group"), "mlp": ("ffn_hidden_size", "ffn_mult")}
WHOLE = re.compile(r"[0-9]{1,5}")  # a number of layers
MOST_LAYERS = 100_000  # in a list, so that [1]*99999999999 is refused instead of filling the memory


def marked_layers(flag: str, text: str, num_layers: int, mark: int) -> list[int]:
    """Return the layers that a frequency or a list of Megatron's names. Raises ConfigError.

    text: N for every N-th layer, or a list such as ([1]*3+[0])*2, in which `mark` stands for these layers.
    """
    if WHOLE.fullmatch(text.strip()):
        if int(text) < 1:
            raise ConfigError(f"{flag} {text}: use 1 or more, or leave it out")
        return list(range(int(text) - 1, num_layers, int(text)))
    try:
        values = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        values = None
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        raise ConfigError(f"{flag} {text}: expected a number or a list of 0 and 1, such as ([1]*3+[0])*2")
    if len(values) != num_layers:
        raise ConfigError(f"{flag} {text} is a list for {len(values)} layers, --num-layers is {num_layers}")
    return [layer for layer, value in enumerate(values) if value == mark]


def _evaluated(node: ast.expr) -> Any:
    """Return the value of an expression of whole numbers, lists of them, + and *. Raises ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluated(node.left) + _evaluated(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _evaluated(node.left), _evaluated(node.right)
        length, times = (len(left), right) if isinstance(left, list) else (len(right), left)
        if length * times <= MOST_LAYERS:
            return left * right
    raise ValueError


def expanded(flag: str, words: Sequence[str], num_layers: int) -> list[dict[str, str]]:
    """Return what each layer has in place of the model's options, name -> text. Raises ConfigError.

    words: 'COUNT NAME=VALUE ...' or 'count=COUNT NAME=VALUE ...' for each run of layers; the last one may be '...',
    which repeats the others.
    """
    repeats = bool(words) and words[-1] == REPEAT
    layers: list[dict[str, str]] = []
    for word in words[: len(words) - repeats]:
        first, *others = word.split() or [""]
        tokens = [first if "=" in first else f"count={first}", *others]
        pairs = [token.partition("=") for token in tokens]
        if not all(name and value for name, _, value in pairs):
            raise ConfigError(f"{flag} {word!r}: write COUNT NAME=VALUE ..., such as '5 window_size=1024'")
        settings = {name.replace("-", "_"): value for name, _, value in pairs}
        if len(settings) < len(pairs):
            raise ConfigError(f"{flag} {word!r} names an option twice")
        if "count" not in settings:
            raise ConfigError(f"{flag} {word!r} lacks its count: write '1 {word}', a run of layers in quotes")
        count = settings.pop("count")
        if not WHOLE.fullmatch(count) or int(count) < 1:
            raise ConfigError(f"{flag} {word!r}: a run has 1 layer or more, not {count}")
        layers += [settings] * int(count)
    if repeats and layers:
        return list(islice(cycle(layers), num_layers))
    if words and len(layers) != num_layers:
        way = f"repeat the runs with a last word '{REPEAT}', or change the counts"
        raise ConfigError(f"{flag} describes {len(layers)} layers, --num-layers is {num_layers}; {way}")
    return layers


def read_block_configs(path: str) -> tuple[str, ...]:
    """Return the words of --layer-pattern for a JSON file with block_configs. Raises ConfigError."""
    flag = f"--heterogeneous-layers-config-path {path}"
    return block_words(read_text(path, flag), flag)


def read_text(path: str, subject: str) -> str:
    """Return the text of a file that a flag names. subject: the flag with its path. Raises ConfigError."""
    try:
        return regular(path, MOST_BYTES).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{subject}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{subject}: not a text file in UTF-8") from None


def block_words(text: str, subject: str) -> tuple[str, ...]:
    """Return the words of --layer-pattern for the text of a JSON file with block_configs. Raises ConfigError.

    The file is that of Megatron's heterogeneous layers, the config.json of Llama-Nemotron: for each layer the query
    groups of its attention and the width of its MLP, either of which may be missing (no_op). subject: for errors.
    """
    try:
        blocks = list(json.loads(text)["block_configs"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{subject}: expected a JSON object with the list block_configs") from None
    words: list[str] = []
    for number, block in enumerate(blocks):
        try:
            parts = {"attention": block["attention"], "mlp": block["ffn" if "ffn" in block else "mlp"]}
            settings = [setting for part, found in parts.items() for setting in _block_part(part, found)]
        except (KeyError, TypeError, AttributeError):
            raise ConfigError(f"{subject}: block {number} lacks the object attention, ffn or mlp") from None
        except ValueError as error:
            raise ConfigError(f"{subject}: block {number}: {error}") from None
        words.append(" ".join(["1", *settings]))
    return tuple(words)


def _block_part(part: str, found: dict[str, Any]) -> list[str]:
    """Return the settings of one part of a block, none if it has the model's. Raises ValueError."""
    if found.get("replace_with_linear"):
        raise ValueError(f"replace_with_linear of its {part}: a single linear in place of a part is not supported")
    sizes = BLOCK_SIZES[part]
    unknown = [name for name, value in found.items() if name not in (*sizes, "no_op", "replace_with_linear") and value]
    if unknown:
        raise ValueError(f"{unknown[0]} of its {part} is not supported")
    size = [f"{name}={found[name]}" for name in sizes if found.get(name) is not None]
    return [f"{part}=none"] * bool(found.get("no_op")) + size[:1]

"""Hugging Face tokenizers: `tokenizer.json` through `tokenizers`, without torch; others as transformers writes them."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError, DataError
from megapipe.input_files import MOST_BYTES, parse_json, regular

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG, GENERATION_FILE = "tokenizer_config.json", "generation_config.json"
CONFIG_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json")
SPECIAL_TOKENS = ("eos_token", "bos_token", "pad_token", "unk_token")
TEMPLATE_HOLDERS = ("chat_template.json", TOKENIZER_CONFIG)
# saved together with the tokenizer if they exist: an export of the trained model uses them
COMPANIONS = (*CONFIG_FILES, "added_tokens.json", "chat_template.json", TEMPLATE_FILE, GENERATION_FILE, "config.json")
END_FILES = (GENERATION_FILE, "config.json")  # the first one that names tokens that end a text holds
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)  # NAME or OWNER/NAME
# names of end-of-document tokens in public vocabularies: used only if no config file names one
KNOWN_EODS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOD>")


def optional_package(name: str, what: str, extra: str) -> Any:
    """Import a package of an extra. Raises ConfigError if it is missing, saying what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name != name:
            raise
        raise ConfigError(f"{what} needs the package {name!r}: run pip install 'megapipe[{extra}]'") from None


def end_ids(content: Any) -> tuple[int, ...]:
    """Return the tokens that end a text by the content of a generation_config.json or config.json."""
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    found = value if isinstance(value, list) else [value]
    return tuple(one for one in found if isinstance(one, int))


def _json(file: Path) -> Any:
    try:
        return parse_json(_text(file))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from None


def _text(file: Path) -> str:
    try:
        return regular(file, MOST_BYTES).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


class _Fast:
    """A tokenizer of the `tokenizers` package, with special tokens from its config files."""

    def __init__(self, tokenizer: Any, special: dict[str, str], files: Mapping[str, Path]) -> None:
        self._tokenizer = tokenizer
        self._files = dict(files)  # by the name they are saved under
        self.special = special  # 'eos_token' -> its text
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # ids can have gaps; an embedding needs a row for the highest one
        self.vocab_size: int = max(len(vocabulary), 1 + max(vocabulary.values(), default=-1))
        self.eod: int | None = vocabulary.get(special.get("eos_token"))
        self.bos: int | None = vocabulary.get(special.get("bos_token"))
        self.pad: int | None = vocabulary.get(special.get("pad_token"))
        found = next((name for name in KNOWN_EODS if name in vocabulary), None)
        if "eos_token" not in special and found is not None:
            self.eod, self.special = vocabulary[found], special | {"eos_token": found}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_batch(self, texts: list[str], num_threads: int) -> list[list[int]]:
        """Encode texts in the library's own threads, whose number `environment.set_tokenizer_threads` has set."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in self._files.items():
            (folder / name).write_bytes(path.read_bytes())


class HuggingFaceTokenizer(_Fast):
    """A tokenizer.json or a folder with one. Encoding adds what its post-processor adds (Llama 3: BOS in front)."""

    name = "HuggingFaceTokenizer"

    def __init__(self, model: str | Path) -> None:
        path = Path(model) / TOKENIZER_FILE if Path(model).is_dir() else Path(model)
        library = optional_package("tokenizers", "--tokenizer-type HuggingFaceTokenizer", "tokenizers")
        if not path.is_file():
            raise DataError(f"there is no tokenizer file {path}; see --tokenizer-model")
        try:
            tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{path} is not a tokenizer.json: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        companions = {name: path.parent / name for name in COMPANIONS if (path.parent / name).is_file()}
        special: dict[str, str] = {}  # each from the first file that names it
        for file in (companions[name] for name in CONFIG_FILES if name in companions):
            config = _json(file)
            for key in SPECIAL_TOKENS:
                value = config.get(key) if isinstance(config, dict) else None
                text = value.get("content") if isinstance(value, dict) else value  # an object or a string
                if isinstance(text, str):
                    special.setdefault(key, text)
        super().__init__(tokenizer, special, {TOKENIZER_FILE: path} | companions)
        # further tokens that end a text, such as the ends of turns
        named = (end_ids(_json(companions[name])) for name in END_FILES if name in companions)
        self.ends: tuple[int, ...] = next((ids for ids in named if ids), ())

    @property
    def origin(self) -> str:
        """Its file, for messages."""
        return str(self._files[TOKENIZER_FILE])

    def for_chats(self) -> Any:
        """Return a copy of the library's tokenizer that adds no tokens and gives offsets in the text as it is."""
        content = json.loads(self._tokenizer.to_str())
        content["post_processor"] = None  # one for bytes would leave spaces out of the offsets
        return type(self._tokenizer).from_str(json.dumps(content))

    def chat_template(self) -> str | None:
        """Return the chat template of the tokenizer's files, or None. Raises DataError if one cannot be read."""
        if TEMPLATE_FILE in self._files:
            return _text(self._files[TEMPLATE_FILE])
        for name in TEMPLATE_HOLDERS:
            found = _json(self._files[name]) if name in self._files else {}
            template = found.get("chat_template") if isinstance(found, dict) else None
            if isinstance(template, list):  # several by name
                named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
                template = named.get("default")
            if isinstance(template, str):
                return template
        return None


class GPT2BPETokenizer(_Fast):
    """GPT-2's byte-level BPE from its vocabulary (JSON) and merges (text) files. <|endoftext|> ends a document."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        library = optional_package("tokenizers", "--tokenizer-type GPT2BPETokenizer", "tokenizers")
        files = [Path(vocab_file), Path(merge_file)]
        for flag, path in zip(("--vocab-file", "--merge-file"), files, strict=True):
            if not path.is_file():
                raise DataError(f"there is no file {path}; see {flag}")
        try:
            built = library.ByteLevelBPETokenizer.from_file(str(vocab_file), str(merge_file))
            tokenizer = library.Tokenizer.from_str(built.to_str())  # which also has encode_batch_fast
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{vocab_file} and {merge_file} are not a vocabulary and its merges: {error}") from None
        names = {"vocab.json": files[0], "merges.txt": files[1]}
        super().__init__(tokenizer, {"eos_token": "<|endoftext|>"}, names)
        if self.eod is None:
            raise DataError(f"{vocab_file} has no <|endoftext|> token, so it is not GPT-2's vocabulary")


def from_transformers(model: str) -> HuggingFaceTokenizer:
    """Return the tokenizer of a folder without tokenizer.json, or of a hub name, as transformers writes it."""
    if not Path(model).exists() and not HUB_NAME.fullmatch(model):  # without a network the hub is tried for a minute
        raise DataError(
            f"there is no file or folder {model}; give --tokenizer-model the folder of a tokenizer, or a name of "
            "Hugging Face's hub (NAME or OWNER/NAME)"
        )
    found = (
        f"has no {TOKENIZER_FILE}, and" if Path(model).exists() else "is no file or folder; one of Hugging Face's hub"
    )
    library = optional_package("transformers", f"the tokenizer {model} {found}", "transformers")
    folder = tempfile.TemporaryDirectory(prefix="megapipe-tokenizer-")
    try:
        library.AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder.name)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"the tokenizer {model} consists of Python code of its own, which is never executed "
                f"(--trust-remote-code changes nothing); give its {TOKENIZER_FILE}, or preprocess the data with it"
            ) from None
        raise DataError(f"transformers cannot load the tokenizer {model}: {error}") from None
    if not (Path(folder.name) / TOKENIZER_FILE).is_file():
        raise DataError(
            f"transformers writes no {TOKENIZER_FILE} of the tokenizer {model}; preprocess the data with it"
        )
    made = HuggingFaceTokenizer(folder.name)
    weakref.finalize(made, folder.cleanup)
    return made

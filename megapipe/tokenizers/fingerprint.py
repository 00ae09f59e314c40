"""Fingerprints of tokenizers: written with token files and checkpoints, compared wherever tokens meet a model.

A fingerprint is plain JSON: {"type": --tokenizer-type, "source": its path or null, "vocab_size": tokens, "eod": id or
null, "files": {name: SHA-256 of the whole content}}. `source` is for people. `files` are those that turn text into ids;
the special tokens of configuration files count by `eod`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from megapipe.tokenizers.hugging_face import COMPANIONS
from megapipe.tokenizers.tokenizer import SAMPLE_TEXT, ByteTokenizer, NullTokenizer, Tokenizer, files_of

NOT_IDS = frozenset(COMPANIONS) - {"added_tokens.json"}  # of the files: they do not change the ids of a text
COMPARED = ("type", "vocab_size", "eod", "files")
SHOWN_DIGITS = 8

Fingerprint = dict[str, Any]


def tokenizer_fingerprint(tokenizer: Tokenizer, source: str | None = None) -> Fingerprint:
    """Return the fingerprint of a tokenizer. source: the path that it was read from."""
    files = {name: content for name, content in files_of(tokenizer).items() if name not in NOT_IDS}
    if not files and tokenizer.name not in (ByteTokenizer.name, NullTokenizer.name):  # of an extension
        files = {"ids of a text": repr(list(tokenizer.encode(SAMPLE_TEXT))).encode()}
    return {
        "type": tokenizer.name,
        "source": source,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
    }


def is_same(one: Fingerprint, other: Fingerprint, *, with_eod: bool = True) -> bool:
    """Return True if two tokenizers give the same ids, and with_eod end documents with the same one."""
    return all(one.get(key) == other.get(key) for key in COMPARED if with_eod or key != "eod")


def described(found: Fingerprint) -> str:
    """Return a fingerprint as the name of a tokenizer, for messages."""
    origin = f" of {found['source']}" if found.get("source") else ""
    digests = [f"SHA-256 {digest[:SHOWN_DIGITS]}" for digest in found["files"].values()]
    end = "no end-of-document token" if found["eod"] is None else f"end of document {found['eod']}"
    return f"{found['type']}{origin} ({found['vocab_size']:,} tokens, {', '.join([end, *digests])})"

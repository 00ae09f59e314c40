"""The quickstart's data: corpus, tokenizer and token files, made once, in a folder named by a digest of the text."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapipe.data.build_datasets import parse_split, sequence_range
from megapipe.data.dataset import unigram_entropy
from megapipe.data.indexed_file import IndexedFile
from megapipe.data.preprocess import Progress, output_prefix, preprocess
from megapipe.data.text_source import corpus_documents, read_records, write_jsonl
from megapipe.tokenizers.sentencepiece import train_sentencepiece
from megapipe.tokenizers.tokenizer import build_tokenizer

SPLIT = "90,10,0"
TOKENIZER = "SentencePieceTokenizer"
TOKENIZER_BYTES = 1_000_000  # of text to train it on; more takes longer and hardly improves it
STDLIB_NAME, STDLIB_PROMPTS = "python-stdlib", ("def __init__(self", "import ", "    for i in ")
PROMPT_WORDS, NUM_PROMPTS = 4, 3


@dataclass(frozen=True)
class Prepared:
    """Prepared data.

    prefix: of the token files. entropy: of single validation tokens, in nats. prompts: texts to continue.
    """

    folder: Path
    prefix: Path
    tokenizer: Path
    entropy: float
    prompts: tuple[str, ...]


def prepare(corpus: str | None, out: Path, vocab_size: int, megabytes: float) -> Prepared:
    """Make the missing files, and print each step.

    The digest in the folder's name separates the tokenizers of different texts. Raises ConfigError, DataError.
    """
    documents = corpus_documents(corpus, megabytes)
    name = STDLIB_NAME if corpus is None else re.sub(r"[^\w.-]", "_", Path(corpus).resolve().name)[:40]
    folder = out / f"{name}-{_digest(documents, vocab_size)}"
    record, prefix = folder / "prepared.json", Path(output_prefix(str(folder / "tokens"), "text"))
    tokenizer = folder / "tokenizer.model"
    source = "the source of Python's standard library" if corpus is None else str(corpus)
    size = sum(len(text.encode("utf-8")) for text in documents) / 1e6
    if record.is_file():
        facts = json.loads(record.read_text(encoding="utf-8"))
        print(f"== data: {folder} is reused: {facts['tokens']:,} tokens of {source}", flush=True)
        return Prepared(folder, prefix, tokenizer, facts["entropy"], tuple(facts["prompts"]))
    began = time.monotonic()
    print(f"== corpus: {len(documents):,} documents, {size:.1f} MB of {source}", flush=True)
    write_jsonl(documents, folder / "corpus.jsonl")
    train_sentencepiece(documents, tokenizer, vocab_size=vocab_size, max_bytes=TOKENIZER_BYTES)
    print(f"== tokenizer: {vocab_size:,} SentencePiece pieces (Unigram), {time.monotonic() - began:.1f} s", flush=True)
    factory = functools.partial(build_tokenizer, TOKENIZER, str(tokenizer))
    workers = min(4, os.cpu_count() or 1)
    counts = preprocess(
        read_records([folder / "corpus.jsonl"]),
        str(folder / "tokens"),
        factory,
        append_eod=True,
        num_workers=workers,
        progress=Progress(),
    )
    num_tokens = sum(counts.tokens.values())
    entropy = validation_entropy(prefix)
    prompts = STDLIB_PROMPTS if corpus is None else prompts_from(documents)
    print(
        f"== tokens: {num_tokens:,} in {prefix}.bin/.idx, unigram entropy of the validation part {entropy:.3f} nats",
        flush=True,
    )
    facts = {
        "source": source,
        "documents": len(documents),
        "tokens": num_tokens,
        "entropy": entropy,
        "prompts": prompts,
    }
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(facts), encoding="utf-8")
    os.replace(partial, record)  # last: the folder is complete
    return Prepared(folder, prefix, tokenizer, entropy, tuple(prompts))


def validation_entropy(prefix: Path) -> float:
    """Return the unigram entropy of the validation tokens of SPLIT, in nats."""
    validation = parse_split(SPLIT)[1]
    assert validation is not None
    file = IndexedFile(prefix)
    first, last = sequence_range(validation, len(file))
    return unigram_entropy(np.concatenate([file.read(i) for i in range(first, last)]))


def prompts_from(documents: list[str]) -> tuple[str, ...]:
    """Return the first words of some documents of the validation part."""
    validation = parse_split(SPLIT)[1]
    assert validation is not None
    first, last = sequence_range(validation, len(documents))
    found = []
    for text in documents[first:last]:
        line = next((line for line in text.splitlines() if re.match(r"\w", line)), "")
        if line:
            found.append(" ".join(line.split()[:PROMPT_WORDS]))
    return tuple(found[:NUM_PROMPTS]) or ("The ",)


def _digest(documents: list[str], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{vocab_size} {SPLIT}".encode())
    for text in documents:
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8"))
    return digest.hexdigest()[:8]

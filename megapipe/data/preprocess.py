"""Text to token files: documents read by one process, tokenized by several, written in their order.

The tokenizer comes as a factory that each worker calls once, so that this room does not know the tokenizers' and nothing large is pickled.
One difference from Megatron's tool: a document without a token is left out (and counted), not kept as a document without sequences.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.indexed_file import IndexedWriter, token_dtype
from megapipe.data.text_source import Record
from megapipe.errors import ConfigError, DataError

BATCH_BYTES = 1 << 18  # text handed to a worker at once: large against the cost of a message, small against a corpus
BATCHES_PER_WORKER = 3  # in flight, so that memory stays bounded however fast the reader is


class Encoder(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...


EncoderFactory = Callable[[], Encoder]


@dataclass
class Counts:
    """What went through so far; documents without a token are left out of the files and counted as empty."""

    documents: int = 0
    empty: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        rate = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        tokens = sum(self.tokens.values())
        return f"{self.documents:,} documents, {tokens:,} tokens, {self.text_bytes / 1e6:,.1f} MB, {rate:.1f} MB/s, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Encoded:
    """A batch of documents from a worker: for each key the tokens of all documents end to end, and how many each has."""

    tokens: dict[str, Array]
    lengths: dict[str, list[int]]
    num_documents: int
    text_bytes: int


def output_prefix(prefix: str, key: str) -> str:
    """Where the tokens under a JSON key go: PREFIX_KEY_document.bin/.idx."""
    return f"{prefix}_{key}_document"


def preprocess(
    records: Iterable[Record],
    prefix: str,
    encoder_factory: EncoderFactory,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    num_workers: int = 1,
    progress: Progress | None = None,
) -> Counts:
    """Write `PREFIX_KEY_document.bin/.idx` for each key, one document a record, and return what went in.

    Files appear under their names when all of them are complete; an error or Ctrl-C leaves none of them. Raises DataError for a record
    that cannot be read or a worker that died, ConfigError if end-of-document tokens are asked of a tokenizer without one.
    """
    encoder = encoder_factory()  # here as well: what is wrong with it should be said once, and not by a worker
    if append_eod and encoder.eod is None:
        raise ConfigError("--append-eod: this tokenizer has no end-of-document token")
    if num_workers < 1:
        raise ConfigError(f"--workers {num_workers}: at least one worker process is needed")
    counts = Counts(tokens=dict.fromkeys(keys, 0))
    begin = time.monotonic()
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedWriter(output_prefix(prefix, key), token_dtype(encoder.vocab_size)))
            for key in keys
        }
        for encoded in _encode_all(records, encoder_factory, tuple(keys), append_eod, num_workers):
            _write(encoded, writers, counts)
            counts.seconds = time.monotonic() - begin
            if progress is not None:
                progress.show(counts)
        if counts.documents == counts.empty:
            raise DataError(f"{prefix}: the input holds no document with text in it, so there is nothing to write")
    if progress is not None:
        progress.end()
    return counts


def _write(encoded: Encoded, writers: dict[str, IndexedWriter], counts: Counts) -> None:
    for key, writer in writers.items():
        start = 0
        for length in encoded.lengths[key]:
            if length:
                writer.add_document(encoded.tokens[key][start : start + length])
            else:
                counts.empty += 1
            start += length
        counts.tokens[key] += start
    counts.documents += encoded.num_documents
    counts.text_bytes += encoded.text_bytes


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_all(
    records: Iterable[Record], factory: EncoderFactory, keys: tuple[str, ...], append_eod: bool, num_workers: int
) -> Iterator[Encoded]:
    """Batches in the order of the records, with a bounded number of them in the workers."""
    # spawn: a fork would inherit locks of the threads that some tokenizers start
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(factory, keys, append_eod)
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in _batches(records):
            with _interrupts_held():  # submitting may start a worker, which inherits this
                pending.append(pool.submit(_encode, batch))
            if len(pending) >= BATCHES_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing worker died (out of memory? --workers takes fewer of them); no file was written"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C goes to the whole terminal. Here it waits for the end of the block; workers started here never get it, the parent ends
    them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Work:
    encoder: Encoder
    keys: tuple[str, ...]
    append_eod: bool


_work: list[_Work] = []  # one entry in each worker process: what its initializer made


def _start_worker(factory: EncoderFactory, keys: tuple[str, ...], append_eod: bool) -> None:
    _work[:] = [_Work(factory(), keys, append_eod)]


def _encode(batch: list[Record]) -> Encoded:
    return encode_records(batch, _work[0].encoder, _work[0].keys, _work[0].append_eod)


def encode_records(batch: list[Record], encoder: Encoder, keys: tuple[str, ...], append_eod: bool) -> Encoded:
    """Tokenize a batch. A document without text stays empty: it gets no end-of-document token either."""
    dtype = token_dtype(encoder.vocab_size)
    tokens: dict[str, list[Array]] = {key: [] for key in keys}
    lengths: dict[str, list[int]] = {key: [] for key in keys}
    for record in batch:
        for key, text in zip(keys, record.texts(keys), strict=True):
            try:
                ids = encoder.encode(text) if text else []
            except DataError as error:
                raise DataError(f"{record.origin}: {error}") from None
            if ids and (min(ids) < 0 or max(ids) >= encoder.vocab_size):
                bad = next(i for i in ids if not 0 <= i < encoder.vocab_size)
                raise DataError(
                    f"{record.origin}: token {bad} lies outside of the vocabulary of {encoder.vocab_size} tokens"
                )
            if ids and append_eod and encoder.eod is not None:
                ids.append(encoder.eod)
            tokens[key].append(np.array(ids, dtype=dtype))
            lengths[key].append(len(ids))
    joined = {key: np.concatenate(tokens[key]) for key in keys}
    return Encoded(joined, lengths, len(batch), sum(len(record.content) for record in batch))


class Progress:
    """One line on a terminal, rewritten five times a second; elsewhere a line every `log_interval` documents, or nothing."""

    def __init__(self, stream: TextIO | None = None, log_interval: int | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.is_terminal = self.stream.isatty()
        self.log_interval = log_interval
        self._last_time = 0.0
        self._next_document = log_interval or 0

    def show(self, counts: Counts) -> None:
        now = time.monotonic()
        if self.is_terminal and now - self._last_time >= 0.2:
            self.stream.write(f"\r\x1b[K{counts.line()}")
            self.stream.flush()
            self._last_time = now
        elif not self.is_terminal and self.log_interval and counts.documents >= self._next_document:
            print(counts.line(), file=self.stream, flush=True)
            self._next_document = counts.documents + self.log_interval

    def end(self) -> None:
        """Clear the line; the summary is the caller's."""
        if self.is_terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

"""Text to token files: one process reads documents and writes tokens in order, several tokenize.

Each worker calls a factory for the tokenizer once, so that nothing large is pickled and this package does not depend on
the tokenizers. Unlike in Megatron, a document without tokens is left out (and counted).
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol, TextIO

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.indexed_file import IndexedWriter, token_dtype
from megapipe.data.text_source import Record
from megapipe.errors import ConfigError, DataError

BATCH_BYTES = 1 << 18  # text per task: large compared with the cost of a message, small compared with a corpus
BATCHES_PER_WORKER = 3  # in flight, so that memory stays bounded however fast the reader is


class Encoder(Protocol):
    """The part of a tokenizer that preprocessing uses."""

    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> list[int]: ...


EncoderFactory = Callable[[], Encoder]


@dataclass
class Counts:
    """The documents, tokens and bytes processed so far."""

    documents: int = 0
    empty: int = 0  # documents without tokens, which are not written
    tokens: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """Return a progress line."""
        megabytes = self.text_bytes / 1e6
        amounts = f"{self.documents:,} documents, {sum(self.tokens.values()):,} tokens, {megabytes:,.1f} MB"
        return f"{amounts}, {megabytes / max(self.seconds, 1e-9):.1f} MB/s, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Encoded:
    """A batch of tokenized documents: for each key the concatenated tokens and the number of tokens per document."""

    tokens: dict[str, Array]
    lengths: dict[str, list[int]]
    num_documents: int
    text_bytes: int


def output_prefix(prefix: str, key: str) -> str:
    """Return the prefix of the token files for a JSON key: PREFIX_KEY_document."""
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
    """Write `PREFIX_KEY_document.bin/.idx` for each key, with one document per record, and return the counts.

    The files get their names once all of them are complete; an error or Ctrl-C leaves none. Raises DataError for a
    record that cannot be read or a worker that died, ConfigError for append_eod without such a token.
    """
    encoder = encoder_factory()  # here too, so that an invalid tokenizer is reported once, not by each worker
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
            counts.seconds = time.monotonic() - begin
            if progress is not None:
                progress.show(counts)
        if counts.documents == counts.empty:
            raise DataError(f"{prefix}: the input holds no document with text in it, so there is nothing to write")
    if progress is not None:
        progress.end()
    return counts


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
    """Yield tokenized batches in the order of the records, with a bounded number of batches in flight."""
    # spawn: a fork would inherit locks of the threads that some tokenizers start
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(factory, keys, append_eod)
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in _batches(records):
            # Ctrl-C reaches all processes of the terminal. Submitting may start a worker, which inherits the signal
            # mask: so workers never get SIGINT, and the parent stops them
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                pending.append(pool.submit(_encode, batch))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if len(pending) >= BATCHES_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        way_out = "perhaps out of memory (try fewer --workers); no file was written"
        raise DataError(f"a tokenizing worker died, {way_out}") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_work: list[tuple[Encoder, tuple[str, ...], bool]] = []  # in each worker process: (encoder, keys, append_eod)


def _start_worker(factory: EncoderFactory, keys: tuple[str, ...], append_eod: bool) -> None:
    _work[:] = [(factory(), keys, append_eod)]


def _encode(batch: list[Record]) -> Encoded:
    return encode_records(batch, *_work[0])


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
                raise DataError(f"{record.origin}: token {bad} is outside of the vocabulary of {encoder.vocab_size}")
            if ids and append_eod and encoder.eod is not None:
                ids.append(encoder.eod)
            tokens[key].append(np.array(ids, dtype=dtype))
            lengths[key].append(len(ids))
    joined = {key: np.concatenate(tokens[key]) for key in keys}
    return Encoded(joined, lengths, len(batch), sum(len(record.content) for record in batch))


class Progress:
    """A line on a terminal, rewritten five times a second; elsewhere one every `log_interval` documents, if given."""

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
        """Clear the line; the caller prints the summary."""
        if self.is_terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

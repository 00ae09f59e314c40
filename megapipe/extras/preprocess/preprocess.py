"""Text to token files: documents are read and tokens written in order, while other threads tokenize.

Unlike in Megatron, a document without tokens is left out (and counted).
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Protocol, TextIO

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.indexed_file import token_dtype
from megapipe.environment import set_tokenizer_threads
from megapipe.errors import ConfigError, DataError, MegapipeError
from megapipe.extras.preprocess.partial_output import PartialOutput
from megapipe.extras.preprocess.text_source import Position, Problem, Record

BATCH_BYTES = 1 << 18  # text of a batch, for each thread of a library that tokenizes it in threads
BATCHES_IN_FLIGHT = 3  # while the library encodes one batch, Python parses the next and packs the one before
COMMIT_BYTES = 1 << 26  # text after which the work is on disk for good


class Encoder(Protocol):
    """The part of a tokenizer that preprocessing uses.

    A tokenizer whose library has threads also has `encode_batch(texts, num_threads) -> list[list[int]]`, which is
    called from several threads; `encode` is called from one.
    """

    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> list[int]: ...


@dataclass
class Counts:
    """The documents, tokens and bytes processed so far."""

    documents: int = 0
    empty: int = 0  # documents without tokens, which are not written
    skipped: int = 0  # bad records
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
    lengths: dict[str, Array]
    text_bytes: int
    problems: tuple[Problem, ...]  # the records that are not among the documents
    end: Position  # in the input, behind the batch

    @property
    def num_documents(self) -> int:
        return len(next(iter(self.lengths.values())))


def preprocess(
    records: Iterable[Record],
    output: PartialOutput,
    encoder: Encoder,
    *,
    append_eod: bool = False,
    num_workers: int = 1,
    skip_bad: int = 0,
    progress: Progress | None = None,
) -> Counts:
    """Write `PREFIX_KEY_document.bin/.idx` for each key, with one document per record, and return the counts.

    The files get their names once all of them are complete. output: perhaps an earlier run's, which the records
    continue; after an error or Ctrl-C it keeps what was done. skip_bad: the number of bad records that are left out
    and reported in PREFIX.skipped.jsonl. Raises DataError for one more, ConfigError for append_eod without such a
    token.
    """
    set_tokenizer_threads(num_workers)
    counts = Counts(**output.counts) if output.counts else Counts(tokens=dict.fromkeys(output.keys, 0))
    try:
        if append_eod and encoder.eod is None:
            raise ConfigError("--append-eod: this tokenizer has no end-of-document token")
        if num_workers < 1:
            raise ConfigError(f"--workers {num_workers}: at least one worker is needed")
        if not output.is_read:
            encoding = _encode_all(records, encoder, (output.keys, append_eod), num_workers)
            with closing(encoding):
                _write_all(encoding, output, counts, skip_bad, progress)
        output.publish()
    except BaseException as error:
        kept = "no file was written"
        if output.is_committed and counts.documents > counts.empty:
            kept = f"the same command continues after the documents that are kept in {output.folder}"
            output.close()
        else:
            output.discard()
        if isinstance(error, OSError):
            raise DataError(f"cannot write token files {output.prefix}: {error.strerror}; {kept}") from None
        if isinstance(error, DataError):
            raise DataError(f"{error}; {kept}") from None
        raise
    if progress is not None:
        progress.end()
    return counts


def _write_all(
    encoding: Iterable[Encoded], output: PartialOutput, counts: Counts, skip_bad: int, progress: Progress | None
) -> None:
    """Write the batches and commit now and then, also before an error or Ctrl-C is raised again."""
    begin, committed = time.monotonic() - counts.seconds, counts.text_bytes
    try:
        for encoded in encoding:
            if encoded.problems and counts.skipped + len(encoded.problems) > skip_bad:
                problem = encoded.problems[max(0, skip_bad - counts.skipped)]
                before = f", after {skip_bad:,} that were skipped" if skip_bad else ""
                way = "repair it, choose files with --suffixes, or leave out up to N bad records with --skip-bad N"
                raise DataError(f"{problem.text}{before}; {way}")
            _write(encoded, output, counts)
            counts.seconds = time.monotonic() - begin
            output.mark(encoded.end, asdict(counts))
            if counts.text_bytes - committed >= COMMIT_BYTES:
                output.commit()
                committed = counts.text_bytes
            if progress is not None:
                progress.show(counts)
        if counts.documents == counts.empty:
            raise DataError(
                f"{output.prefix}: the input holds no document with text in it, so nothing is to be written"
            )
    except OSError:
        raise  # a full disk: what was committed before stays
    except BaseException:
        output.commit()
        raise
    output.commit(is_read=True)


def _write(encoded: Encoded, output: PartialOutput, counts: Counts) -> None:
    for key, lengths in encoded.lengths.items():
        filled = lengths[lengths > 0]
        output.add(key, encoded.tokens[key], filled)
        counts.empty += len(lengths) - len(filled)
        counts.tokens[key] += len(encoded.tokens[key])
    output.skip(encoded.problems)
    counts.documents += encoded.num_documents
    counts.skipped += len(encoded.problems)
    counts.text_bytes += encoded.text_bytes


def _batches(records: Iterable[Record], batch_bytes: int) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.num_bytes
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_all(
    records: Iterable[Record], encoder: Encoder, settings: tuple[tuple[str, ...], bool], num_workers: int
) -> Generator[Encoded]:
    """Yield tokenized batches in the order of the records, with a bounded number of batches in flight."""
    pool = ThreadPoolExecutor(BATCHES_IN_FLIGHT if hasattr(encoder, "encode_batch") else 1)
    pending: deque[Future[Encoded]] = deque()
    failure: MegapipeError | None = None
    batches = _batches(records, BATCH_BYTES * num_workers)
    try:
        while failure is None:
            try:
                batch = next(batches, None)
            except MegapipeError as error:  # of the reader; the documents before it count
                failure = error
                break
            if batch is None:
                break
            pending.append(pool.submit(encode_records, batch, encoder, *settings, num_workers))
            if len(pending) >= BATCHES_IN_FLIGHT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_records(
    batch: list[Record], encoder: Encoder, keys: tuple[str, ...], append_eod: bool, num_threads: int = 1
) -> Encoded:
    """Tokenize a batch. A document without text stays empty: it gets no end-of-document token either."""
    problems: list[Problem] = []
    records: list[Record] = []
    ids: dict[str, list[list[int]]] = {key: [] for key in keys}
    is_batched = hasattr(encoder, "encode_batch")
    parsed: list[list[str]] = []
    for record in batch:
        texts = record.parse(keys)
        if isinstance(texts, list) and not is_batched:
            try:
                encoded = [encoder.encode(text) if text else [] for text in texts]
            except DataError as error:
                texts = record.problem(str(error))
            else:
                for key, one in zip(keys, encoded, strict=True):
                    ids[key].append(one)
        if isinstance(texts, Problem):
            problems.append(texts)
        else:
            parsed.append(texts)
            records.append(record)
    for place, key in enumerate(keys) if is_batched else ():
        filled = [texts[place] for texts in parsed if texts[place]]
        found = iter(encoder.encode_batch(filled, num_threads))  # type: ignore[attr-defined]
        ids[key] = [next(found) if texts[place] else [] for texts in parsed]
    eod = encoder.eod if append_eod else None
    tokens, lengths = {}, {}
    for key in keys:
        tokens[key], lengths[key] = _packed(ids[key], records, encoder.vocab_size, eod)
    return Encoded(tokens, lengths, sum(record.num_bytes for record in batch), tuple(problems), batch[-1].end)


def _packed(ids: list[list[int]], records: list[Record], vocab_size: int, eod: int | None) -> tuple[Array, Array]:
    """Return (tokens of all documents, each with `eod` if it has any; number of tokens of each)."""
    joined = array("I")  # fromlist: a fifth of the time of numpy's conversion
    for document, record in zip(ids, records, strict=True):
        try:
            joined.fromlist(document)
        except OverflowError:
            raise DataError(record.problem(_outside(min(document), vocab_size)).text) from None
        if eod is not None and document:
            joined.append(eod)
    values = np.frombuffer(joined, np.uint32) if joined else np.empty(0, np.uint32)
    lengths = np.array([len(document) + (eod is not None and len(document) > 0) for document in ids], np.int64)
    if len(values) and values.max() >= vocab_size:
        place = int(np.argmax(values >= vocab_size))
        record = records[int(np.searchsorted(np.cumsum(lengths), place, side="right"))]
        raise DataError(record.problem(_outside(int(values[place]), vocab_size)).text)
    return values.astype(token_dtype(vocab_size)), lengths


def _outside(token: int, vocab_size: int) -> str:
    return f"token {token} is outside of the vocabulary of {vocab_size}"


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

"""Several pairs of token files merged into one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megapipe.data.indexed_file import IndexedFile, Tokenizer, bin_path, idx_path, made_with, read_bytes
from megapipe.errors import ConfigError, DataError
from megapipe.extras.preprocess.indexed_writer import publish, write_index

BLOCK_BYTES = 1 << 24  # copied at a time


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedFile:
    """Write the documents of all prefixes, in order, to `output_prefix`, after checking all, and return the new file.

    Under the final names there is at any time the old pair, no index, or the new pair; never a partial one.
    Raises DataError for damaged files or different dtypes, ConfigError if there are no inputs or the output is one.
    """
    if not prefixes:
        raise ConfigError("nothing to merge: name at least one file prefix")
    target = bin_path(output_prefix)
    for prefix in prefixes:
        if target.exists() and bin_path(prefix).exists() and target.samefile(bin_path(prefix)):
            raise ConfigError(f"the output {output_prefix} is one of the files to merge; choose another name")
    files = [IndexedFile(prefix) for prefix in prefixes]
    tokenizer = _common_tokenizer(prefixes)
    for file in files[1:]:
        if file.dtype != files[0].dtype:
            rule = "only token files of one dtype can be merged"
            raise DataError(f"{file.prefix} holds {file.dtype}, but the files before it {files[0].dtype}: {rule}")
        if (file.modes is None) != (files[0].modes is None):
            kind = "multimodal" if file.modes is not None else "not multimodal"
            raise DataError(f"{file.prefix} is {kind}, unlike the files before it")
    partial_bin, partial_idx = (Path(f"{path}.partial-{os.getpid()}") for path in (target, idx_path(output_prefix)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(partial_bin, "wb", buffering=1 << 20) as output:
            for file in files:
                output.writelines(_blocks(file))
            output.flush()
            os.fsync(output.fileno())
        firsts = np.cumsum([0, *map(len, files)])  # of each file, among all sequences
        documents = [file.documents[1:] + first for file, first in zip(files, firsts, strict=False)]
        modes = b"".join(file.modes.tobytes() for file in files if file.modes is not None)
        lengths = np.concatenate([file.lengths for file in files])
        write_index(partial_idx, files[0].dtype, lengths, np.concatenate([[0], *documents]), modes)
        publish(partial_bin, partial_idx, output_prefix, tokenizer)
    except OSError as error:
        raise DataError(f"cannot write token files {output_prefix}.bin/.idx: {error.strerror}") from None
    finally:
        partial_bin.unlink(missing_ok=True)
        partial_idx.unlink(missing_ok=True)
    return IndexedFile(output_prefix)


def _blocks(file: IndexedFile) -> Iterator[bytes]:
    """Yield the bytes of all sequences, in order and in blocks."""
    if not file.is_contiguous():
        yield from (file.read(sequence).tobytes() for sequence in range(len(file)))
        return
    end = file.num_tokens * file.dtype.itemsize
    with open(bin_path(file.prefix), "rb", buffering=0) as tokens:
        for begin in range(0, end, BLOCK_BYTES):
            yield read_bytes(tokens, min(BLOCK_BYTES, end - begin), begin)


def _common_tokenizer(prefixes: Sequence[str]) -> Tokenizer | None:
    """Return the tokenizer of all these files, None if that of one is not known. Raises DataError if two differ."""
    made = [made_with(prefix) for prefix in prefixes]
    known = [(prefix, found) for prefix, found in zip(prefixes, made, strict=True) if found is not None]
    for prefix, found in known[1:]:
        first, other = ({**one, "source": None} for one in (known[0][1], found))
        if first != other:
            names = [f"{at} with {one['type']} of {one['source']}" for at, one in (known[0], (prefix, found))]
            raise DataError(f"the files were made with different tokenizers, {' and '.join(names)}; merge each alone")
    return None if len(known) < len(made) else made[0]


def prefixes_in(folder: str | Path) -> list[str]:
    """Return the prefixes of all token files in a folder, sorted. Raises ConfigError if it is no folder or has none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"--input {folder} is not a directory")
    prefixes = sorted(str(path)[: -len(".idx")] for path in folder.glob("*.idx"))
    if not prefixes:
        raise ConfigError(f"--input {folder} holds no .idx file")
    return prefixes

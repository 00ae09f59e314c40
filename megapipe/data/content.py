"""Contents of data and tokenizer files as short texts: equal for equal files, whatever their paths."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megapipe.config.files import parse_blend
from megapipe.data.fingerprint import INDEX_BLOCKS, sampled_checksum
from megapipe.data.indexed_file import bin_path, idx_path
from megapipe.errors import DataError

TOKEN_BLOCKS = (64, 1 << 12)  # number and bytes of the blocks that are read of a .bin: all of up to 256 KiB
LEAST_BLOCKS = 4  # of a file in a large blend
BLOCKS_OF_A_BLEND = 1024  # of all its files together, so that a start stays short
# of a tokenizer's folder, which may hold a whole model
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".bpe")
WEIGHT_INDEX = ".index.json"


def blend_content(words: Sequence[str], flag: str, of_chats: bool) -> tuple[str, str]:
    """Return a blend with the contents of its files: as shown in messages, and without their paths, to be compared.

    of_chats: the paths are files of conversations, else prefixes of .bin and .idx. Raises ConfigError.
    """
    paths, weights = parse_blend(words, flag)
    most = max(LEAST_BLOCKS, BLOCKS_OF_A_BLEND // len(paths))
    shown, compared = [], []
    for index, path in enumerate(paths):
        weight = "" if weights is None else f"{weights[index]:g} "
        if of_chats:
            content = sampled_content(Path(path), most)
        else:
            tokens, entries = sampled_content(bin_path(path), most), sampled_content(idx_path(path), most, INDEX_BLOCKS)
            content = f".bin of {tokens}, .idx of {entries}"
        shown.append(f"{weight}{path} ({content})")
        compared.append(weight + content)
    return "; ".join(shown), "; ".join(compared)


def sampled_content(path: Path, most: int, blocks: tuple[int, int] = TOKEN_BLOCKS) -> str:
    """Return size and checksum of a file, read in evenly spaced blocks, or why it cannot be read."""
    try:
        count, block_bytes = blocks
        return f"{path.stat().st_size:,} bytes, checksum {sampled_checksum(path, min(count, most), block_bytes):08x}"
    except (OSError, DataError) as error:
        return f"which cannot be read ({getattr(error, 'strerror', None) or error})"


def whole_content(path: Path) -> str:
    """Return a digest of a file, or of those in a folder that belong to a tokenizer, or why it cannot be read."""
    files = [path]
    if path.is_dir():
        files = [one for one in sorted(path.iterdir()) if one.suffix in TOKENIZER_SUFFIXES and one.is_file()]
        files = [one for one in files if not one.name.endswith(WEIGHT_INDEX)]
    whole = hashlib.sha256()
    try:
        for one in files:
            content = one.read_bytes()
            named = one.name if path.is_dir() else ""
            whole.update(f"{named} {len(content)}\n".encode() + content)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"sha256 {whole.hexdigest()[:16]}"

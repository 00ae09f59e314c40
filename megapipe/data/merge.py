"""Several token files as one, their documents in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megapipe.data.indexed_file import IndexedFile, IndexedWriter, bin_path
from megapipe.errors import ConfigError


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedFile:
    """Write the documents of all prefixes to `output_prefix` and return the new file.

    Every input is opened and checked before anything is written. Raises DataError for a damaged file or different dtypes, ConfigError if
    nothing is given or the output is one of the inputs.
    """
    if not prefixes:
        raise ConfigError("nothing to merge: name at least one file prefix")
    target = bin_path(output_prefix)
    for prefix in prefixes:
        if target.exists() and bin_path(prefix).exists() and target.samefile(bin_path(prefix)):
            raise ConfigError(f"the output {output_prefix} is one of the files to merge; choose another name")
    files = [IndexedFile(prefix) for prefix in prefixes]
    with IndexedWriter(output_prefix, files[0].dtype, multimodal=files[0].modes is not None) as writer:
        for file in files:
            writer.append(file)
    return IndexedFile(output_prefix)


def prefixes_in(folder: str | Path) -> list[str]:
    """Prefixes of all token files in a folder, sorted by name. Raises ConfigError if it is not a folder or holds none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"--input {folder} is not a directory")
    prefixes = sorted(str(path)[: -len(".idx")] for path in folder.glob("*.idx"))
    if not prefixes:
        raise ConfigError(f"--input {folder} holds no .idx file")
    return prefixes

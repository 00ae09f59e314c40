"""The interface for conversion families from outside: files that `megapipe convert --extension FILE.py` loads.

docs/conversion_family.md has a complete example.
"""

from __future__ import annotations

import torch

from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES
from megapipe.extras.convert.family import HEAD_DIM, LLAMA_BIASES, Family, llama_family, llama_rows
from megapipe.extras.convert.layer_types import ROPE, rope, rope_fields
from megapipe.extras.convert.tables import (
    Layers,
    Layout,
    Row,
    Rule,
    Settings,
    again,
    always,
    check_alike,
    fixed,
    fused_qkv,
    gate_and_up,
    key,
    map_tensors,
    nullable,
    same,
    separate_qkv,
    shared,
    transposed,
    unpadded,
    unwritten,
)

__all__ = [
    "HEAD_DIM",
    "LLAMA_BIASES",
    "ROPE",
    "Family",
    "Layers",
    "Layout",
    "Row",
    "Rule",
    "Settings",
    "again",
    "always",
    "check_alike",
    "fixed",
    "fused_qkv",
    "gate_and_up",
    "key",
    "llama_family",
    "llama_rows",
    "nullable",
    "register_family",
    "rope",
    "rope_fields",
    "same",
    "separate_qkv",
    "shared",
    "transposed",
    "unwritten",
]


def register_family(family: Family, example: Settings) -> Family:
    """Add an architecture to those that `megapipe convert` reads and writes, at the top level of an extension.

    example: keys of a small config.json, on which the tables are proven here: its settings come back from ours, every
    parameter has a row of its own, and each layout restores what it has split. Choose sizes that differ from each
    other, with fewer key and value heads than heads if the architecture can have them. Raises ConfigError naming the
    key or tensor at fault, or if the architecture is known already.
    """
    name = f"conversion family {family.architecture!r}"
    try:
        model = family.read(example)
        family.write(model)
        mapped = map_tensors(family.rows, unpadded(model), family.architecture)
    except ConfigError as error:
        raise ConfigError(f"{name}: its example: {error}") from None
    seen: set[str] = set()
    for entry in mapped:
        tensor = entry.spec.name
        if repeated := [part for part in entry.theirs if part in seen]:
            raise ConfigError(f"{name}: {repeated[0]} is a part of {tensor} and of another tensor")
        seen.update(entry.theirs)
        whole = torch.randn(entry.spec.shape, generator=torch.Generator().manual_seed(len(seen)))
        parts = entry.layout.split(whole)
        if len(parts) != len(entry.theirs):
            raise ConfigError(f"{name}: the layout of {tensor} has {len(parts)} parts, its row {len(entry.theirs)}")
        if not torch.equal(entry.layout.join(parts), whole):
            raise ConfigError(f"{name}: the layout of {tensor} does not restore the tensor that it has split")
    FAMILIES.add(family.architecture, family)
    return family

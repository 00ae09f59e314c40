"""The interface for conversion families from outside: files that `megapipe convert --extension FILE.py` loads.

docs/convert.md has a complete example.
"""

from __future__ import annotations

import torch

from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES
from megapipe.extras.convert.family import HEAD_DIM as HEAD_DIM
from megapipe.extras.convert.family import LLAMA_BIASES as LLAMA_BIASES
from megapipe.extras.convert.family import Family as Family
from megapipe.extras.convert.family import llama_family as llama_family
from megapipe.extras.convert.family import llama_rows as llama_rows
from megapipe.extras.convert.layer_types import ROPE as ROPE
from megapipe.extras.convert.layer_types import rope as rope
from megapipe.extras.convert.layer_types import rope_fields as rope_fields
from megapipe.extras.convert.tables import Layers as Layers
from megapipe.extras.convert.tables import Layout as Layout
from megapipe.extras.convert.tables import Row as Row
from megapipe.extras.convert.tables import Rule as Rule
from megapipe.extras.convert.tables import Settings as Settings
from megapipe.extras.convert.tables import again as again
from megapipe.extras.convert.tables import always as always
from megapipe.extras.convert.tables import check_alike as check_alike
from megapipe.extras.convert.tables import fixed as fixed
from megapipe.extras.convert.tables import fused_qkv as fused_qkv
from megapipe.extras.convert.tables import gate_and_up as gate_and_up
from megapipe.extras.convert.tables import key as key
from megapipe.extras.convert.tables import map_tensors, unpadded
from megapipe.extras.convert.tables import nullable as nullable
from megapipe.extras.convert.tables import same as same
from megapipe.extras.convert.tables import separate_qkv as separate_qkv
from megapipe.extras.convert.tables import shared as shared
from megapipe.extras.convert.tables import stacked_qkv as stacked_qkv
from megapipe.extras.convert.tables import transposed as transposed
from megapipe.extras.convert.tables import unwritten as unwritten


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

"""Multi-token prediction in Hugging Face's files, as of DeepSeek-V3 and GLM-4.5.

Module k of a model of n layers is `model.layers.{n + k}`: two norms, eh_proj, a layer like the last one, and a head
with a norm of its own. Copies of the embedding and of the output layer belong to it, which here the modules share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError
from megapipe.extras.convert.snapshot import LazyTensor, are_equal
from megapipe.extras.convert.tables import LAYER, LLAMA, Row, Rule, Settings, check_alike
from megapipe.layers.embedding import WORD_EMBEDDING

COUNT, OTHER_NAME = "num_nextn_predict_layers", "num_mtp_layers"


def read_count(settings: Settings) -> dict[str, Any]:
    value = settings.get(COUNT)
    check_alike({name: settings.get(name) for name in (COUNT, OTHER_NAME)})
    return {"mtp_num_layers": (settings.get(OTHER_NAME) if value is None else value) or None}


RULE = Rule((COUNT, OTHER_NAME), read_count, lambda layers: {COUNT: layers[0].mtp_num_layers or 0})
ROWS = tuple(
    Row(f"mtp.layers.{LAYER}.{ours}", (f"{LLAMA}.{theirs}",))
    for ours, theirs in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("eh_proj", "eh_proj"),
        ("final_layernorm", "shared_head.norm"),
    )
)


def further_names(model: ModelConfig, names: Collection[str]) -> set[str]:
    """Return those names that belong to modules after the last layer of the model."""
    layers = tuple(f"model.layers.{model.num_layers + number}." for number in range(model.mtp_num_layers or 0))
    return {name for name in names if name.startswith(layers)} if layers else set()


def as_stored(model: ModelConfig, names: Collection[str], left_out: bool) -> ModelConfig:
    """Return the model without modules that are left out or of which no tensor is stored: transformers stores none,
    but keeps their number.
    """
    return replace(model, mtp_num_layers=None) if left_out or not further_names(model, names) else model


def copies(model: ModelConfig) -> dict[str, str]:
    """Return the names of the modules' copies of embedding and output layer, with ours of what they copy."""
    head = "output_layer.weight" if model.untie_embeddings_and_output_weights else WORD_EMBEDDING
    found: dict[str, str] = {}
    for number in range(model.mtp_num_layers or 0):
        module = f"model.layers.{model.num_layers + number}"
        found |= {f"{module}.embed_tokens.weight": WORD_EMBEDDING, f"{module}.shared_head.head.weight": head}
    return found


def check_copies(
    where: Path, model: ModelConfig, found: Mapping[str, LazyTensor], ours: Mapping[str, LazyTensor]
) -> None:
    """Raise CheckpointError unless the copies that are stored equal what they copy. ours: tensors by our names."""
    for name, original in copies(model).items():
        if name in found and not are_equal(found[name], ours[original]):
            raise CheckpointError(
                f"{where}: {name} differs from the model's own, {original}, which multi-token prediction shares "
                f"here; to leave the modules out give --ignore-key {COUNT}"
            )

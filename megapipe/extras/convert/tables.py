"""Tables between another format and ours: rules for settings, rows for tensors. Both are read in both directions.

A rule maps keys of their configuration to fields of our model section, and the section as each layer has it to keys.
Writing may lose what the other side has no key for: the writer reads the result again and compares what each layer does
(`check_expressed`). A row maps a module of ours to theirs by a layout, which is a bijection:
`split(join(parts)) == parts`; rows.csv has those that depend on no option. Our weights are [out, in], biases [out].
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig, fields_by_key, resolve_model
from megapipe.config.fields import out_of_bounds
from megapipe.config.layers import LayerConfig, idle_options, layer_configs
from megapipe.config.model import ACTIVATIONS, ModelConfig
from megapipe.errors import ConfigError
from megapipe.formatting import shortened
from megapipe.sharding.spec import ParamSpec, QueryGroups
from megapipe.trace.parameters import model_parameters, model_states

Settings = Mapping[str, Any]  # config.json, or Megatron's args
Layers = tuple[LayerConfig, ...]  # the model section as each layer has it
Shape = tuple[int, ...]

# fields that change how a model is trained or stored, not what it computes: a foreign configuration may lack them
NOT_THE_MODEL = tuple(
    """
    seq_length padded_vocab_size make_vocab_size_divisible_by hidden_dropout attention_dropout
    attention_softmax_in_fp32 init_method_std moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff
    moe_z_loss_coeff moe_router_bias_update_rate mtp_loss_scaling_factor
    """.split()
)
SPELLINGS = ("window_attn_skip_freq", "no_rope_freq", "layer_pattern", "moe_layer_freq")  # of layers that differ


@dataclass(frozen=True)
class Rule:
    """One row of a table."""

    keys: tuple[str, ...]  # of the other format, that the rule handles
    read: Callable[[Settings], dict[str, Any]]  # -> our fields; raises ConfigError naming a key without an equivalent
    # -> their keys; what all layers share is taken from the first, and compared for all after writing
    write: Callable[[Layers], dict[str, Any]]


REQUIRED = object()  # in place of a default
LARGEST = 2**63  # in size, of a number
KINDS: dict[str, tuple[type, str]] = {  # of values, in kinds.csv; a plural is a list of them
    "whole": (int, "a whole number"),
    "number": (int | float, "a finite number"),  # type: ignore[dict-item]
    "flag": (bool, "true or false"),
    "word": (str, "a text"),
    "object": (dict, "an object"),
}


def stated(settings: Settings, name: str, default: Any) -> Any:
    """Return the value of a key, the default where it is missing or null."""
    return default if settings.get(name) is None else settings[name]


def key(
    theirs: str | Sequence[str],
    ours: str,
    default: Any = REQUIRED,
    words: Mapping[Any, Any] | None = None,
    value_of: Callable[[Layers], Any] | None = None,
    none: Any = None,
) -> Rule:
    """Return the rule of one key that corresponds to one field.

    theirs: its name, or several of which a file has any; the first is written. default: their value if the key is
    missing or null, or a function of their settings. words: their values -> ours; no other values can be expressed.
    value_of: our value to write, by default the field of the first layer. none: their value for our None.
    """
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)

    def read(settings: Settings) -> dict[str, Any]:
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        check_alike(given)
        value = next(iter(given.values()), None)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"the key {names[0]} is missing")
            value = default(settings) if callable(default) else default
        if words is None:
            return {ours: None if value == none else value}
        if value not in words:
            raise ConfigError(f"{names[0]} {value!r} cannot be expressed; it can be {', '.join(map(str, words))}")
        return {ours: words[value]}

    def write(layers: Layers) -> dict[str, Any]:
        value = getattr(layers[0], ours) if value_of is None else value_of(layers)
        if words is None:
            return {names[0]: none if value is None else value}
        # if they have no word for the value, the comparison after writing finds it
        return {names[0]: next((word for word, meant in words.items() if meant == value), next(iter(words)))}

    return Rule(names, read, write)


def nullable(theirs: str, ours: str, default: Any) -> Rule:
    """Return the rule of one key whose null is a value. default: their value if the key is missing."""
    return Rule(
        (theirs,),
        lambda settings: {ours: settings.get(theirs, default)},
        lambda layers: {theirs: getattr(layers[0], ours)},
    )


def fixed(theirs: str, only: Any, why: str) -> Rule:
    """Return the rule of a key that must have one value, also its default. why: others cannot be expressed."""

    def read(settings: Settings) -> dict[str, Any]:
        value = settings.get(theirs, only)
        if value != only and value is not None:
            raise ConfigError(f"{theirs} {value!r} cannot be expressed: {why}")
        return {}

    return Rule((theirs,), read, lambda layers: {theirs: only})


def shared(keys: Sequence[str], ours: str, default: Any, why: str) -> Rule:
    """Return the rule of several keys that must have the same value, which is one field of ours."""

    def read(settings: Settings) -> dict[str, Any]:
        values = {key: stated(settings, key, default) for key in keys}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{key} {value}" for key, value in values.items())
            raise ConfigError(f"{text} cannot be expressed: {why}")
        return {ours: values[keys[0]]}

    return Rule(tuple(keys), read, lambda layers: dict.fromkeys(keys, getattr(layers[0], ours)))


def always(**fields: Any) -> Rule:
    """Return the rule of fields that have one value in every model of the architecture, without a key."""
    return Rule((), lambda settings: dict(fields), lambda layers: {})


def unwritten(rule: Rule) -> Rule:
    """Return the rule of keys that are read but not written, since they have no effect beside others."""
    return dataclasses.replace(rule, write=lambda layers: {})


def check_alike(stated: Mapping[str, Any]) -> None:
    """Raise ConfigError if a configuration states one thing twice, and differently. stated: where -> value or None."""
    given = {where: value for where, value in stated.items() if value is not None}
    if any(value != next(iter(given.values())) for value in given.values()):
        text = " and ".join(f"{where} {value!r}" for where, value in given.items())
        raise ConfigError(f"{text} contradict each other; correct the file")


def again(theirs: str, original: str, value_of: Callable[[Settings], Any] | None = None) -> Rule:
    """Return the rule of a key that repeats another one, and is not written.

    value_of: of what it repeats, by default the value of the key `original`, which is its name in an error otherwise.
    """

    def read(settings: Settings) -> dict[str, Any]:
        if value_of is None:
            check_alike({original: settings.get(original), theirs: settings.get(theirs)})
        else:
            check_alike({theirs: settings.get(theirs), original: value_of(settings)})
        return {}

    return Rule((theirs,), read, lambda layers: {})


def read_fields(rules: Sequence[Rule], settings: Settings) -> dict[str, Any]:
    """Return our fields. Raises ConfigError naming the key that cannot be expressed, or is out of its field's range."""
    found: dict[str, Any] = {}
    for rule in rules:
        given = ", ".join(f"{name} {shortened(str(settings[name]))}" for name in rule.keys if name in settings)
        try:
            found |= (fields := rule.read(settings))
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{given} cannot be expressed: {error!r}") from None
        for name, value in fields.items():
            option = fields_by_key()[f"model.{name}"].option
            for one in value if isinstance(value, tuple) else (value,):
                trouble = out_of_bounds(option, one)
                if trouble and one is not None:
                    raise ConfigError(f"{given or name} cannot be expressed: {trouble}")
    return found


def is_of_kind(kind: str, value: Any) -> bool:
    """Return True if a value of JSON is of a kind of KINDS."""
    if kind.endswith("s"):
        return isinstance(value, list) and all(is_of_kind(kind[:-1], one) for one in value)
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # nor is a NaN
        return False
    return isinstance(value, KINDS[kind][0]) and isinstance(value, bool) == (kind == "flag")


def check_kinds(settings: Settings) -> None:
    """Raise ConfigError for a value of config.json, at any depth, that is of another kind than kinds.csv states."""
    kinds = {key: row["kinds"].split("|") for row in read_table("kinds.csv") for key in row["keys"].split()}
    objects: list[Settings] = [settings]
    while objects:
        for key, value in objects.pop().items():
            expected = kinds.get(key)
            if value is not None and expected and not any(is_of_kind(kind, value) for kind in expected):
                meant = " or ".join(
                    "a list, each " * kind.endswith("s") + KINDS[kind.rstrip("s")][1] for kind in expected
                )
                raise ConfigError(f"{key} {shortened(repr(value))} cannot be expressed; expected {meant}")
            objects += [value] if isinstance(value, dict) else []


def write_keys(rules: Sequence[Rule], model: ModelConfig) -> dict[str, Any]:
    """Return their keys of a model."""
    layers = layer_configs(unpadded(model))
    return {name: value for rule in rules for name, value in rule.write(layers).items()}


def check_expressed(model: ModelConfig, read: ModelConfig, name: str) -> None:
    """Raise ConfigError if a model that was written and read again computes something else. name: of the other side."""
    layers = meaning(model)
    for number, (layer, again) in enumerate(zip(layers, meaning(read), strict=False)):
        for field in (field.name for field in dataclasses.fields(layer) if field.name not in NOT_THE_MODEL):
            value, found = getattr(layer, field), getattr(again, field)
            if found != value:
                where = "" if all(getattr(other, field) == value for other in layers) else f" of layer {number}"
                raise ConfigError(f"{name} cannot express model.{field} {value}{where} (it would be {found})")


def unpadded(model: ModelConfig) -> ResolvedModelConfig:
    """Return the model with all sizes and no vocabulary padding: its shapes are those of a Snapshot's tensors."""
    return resolve_model(dataclasses.replace(model, padded_vocab_size=model.vocab_size), 1)


def meaning(model: ModelConfig) -> Layers:
    """Return each layer in a normal form for comparison: derived sizes filled in, fields without effect at defaults."""
    defaults, found = ModelConfig(), []
    for layer in layer_configs(unpadded(model)):
        without_effect = idle_options(layer)
        if layer.moe_router_topk_scaling_factor == 1.0:
            without_effect.add("moe_router_topk_scaling_factor")
        if layer.moe_router_num_groups == 1:
            without_effect |= {"moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"}
        if layer.moe_router_topk == 1:
            without_effect.add("moe_router_norm_topk_prob")
        changes = {name: getattr(defaults, name) for name in SPELLINGS}
        if layer.num_experts is None:
            without_effect |= {name for name in vars(layer) if name.startswith("moe_")}
        else:
            changes |= dict.fromkeys(("ffn_hidden_size", "moe_ffn_hidden_size"), layer.expert_ffn_size)
        changes |= {name: getattr(defaults, name) for name in without_effect}
        found.append(dataclasses.replace(layer, **changes))
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """One whole tensor of ours as one or more tensors ("parts") of theirs."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        """Return the shapes of the parts of a tensor of shape `whole`."""
        return tuple(tuple(part.shape) for part in self.split(torch.empty(whole, device="meta")))


def same(model: ModelConfig) -> Layout:
    """Return the layout of the same tensor under another name."""
    return Layout(lambda parts: parts[0], lambda whole: (whole,))


def transposed(model: ModelConfig) -> Layout:
    """Return the layout of weights stored as [in, out] (GPT-2's Conv1D); biases are unchanged."""
    return Layout(lambda parts: parts[0].t(), lambda whole: (whole.t(),))


def gate_and_up(model: ModelConfig) -> Layout:
    """Return the layout of two equal parts, of which our rows are [gate; up]."""
    return Layout(lambda parts: torch.cat(tuple(parts)), lambda whole: whole.chunk(2))


def separate_qkv(model: ModelConfig) -> Layout:
    """Return the layout of separate q, k and v; our rows are [q_0 .. q_{n-1}, k, v] x head_dim per query group. With
    --attention-output-gate the gates are a part behind q.
    """
    groups, head_dim = model.query_groups(), model.head_size()
    slicing = QueryGroups(model.num_attention_heads, groups, head_dim, is_gated=model.attention_output_gate)
    rows = tuple(count * head_dim for count in slicing.heads_of_group.values())  # of one group

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def split(whole: Tensor) -> tuple[Tensor, ...]:
        grouped = whole.reshape(groups, sum(rows), *whole.shape[1:])
        return tuple(part.flatten(0, 1) for part in grouped.split(rows, 1))

    return Layout(join, split)


def separate_qkv_of_pairs(model: ModelConfig) -> Layout:
    """Return the layout of separate q, k and v, heads of q and k in neighbouring pairs: theirs (2 i, 2 i + 1) is our
    (i, i + r / 2) of r rotated channels.
    """
    separate, rotated, size = separate_qkv(model), model.rotary_channels(), model.head_size()

    def reordered(parts: Sequence[Tensor], pairs: tuple[int, int]) -> tuple[Tensor, ...]:
        return (*(_in_pairs(part, (rotated, size - rotated), pairs, turned=0) for part in parts[:2]), parts[2])

    half = rotated // 2
    return Layout(
        lambda parts: separate.join(reordered(parts, (half, 2))),
        lambda whole: reordered(separate.split(whole), (2, half)),
    )


def _in_pairs(whole: Tensor, sizes: tuple[int, int], pairs: tuple[int, int], turned: int) -> Tensor:
    """Return rows of heads of two sizes, with the rotated ones, the first or the second, reordered as a matrix."""
    parts = list(whole.reshape(-1, sum(sizes), *whole.shape[1:]).split(sizes, dim=1))
    parts[turned] = parts[turned].unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
    return torch.cat(parts, dim=1).flatten(0, 1)


def one_row(model: ModelConfig) -> Layout:
    """Return the layout of a vector that is a matrix of one row."""
    return Layout(lambda parts: parts[0].flatten(), lambda whole: (whole.unsqueeze(0),))


def neighbours(plain: Callable[[ModelConfig], int]) -> Callable[..., Layout]:
    """Return the layout of rows of heads, `plain` rows of each and then the rotated ones in neighbouring pairs.

    Their pair (2 i, 2 i + 1) is our (i, i + r / 2) of r rotated ones.
    """

    def layout(model: ModelConfig) -> Layout:
        sizes, half = (plain(model), model.qk_pos_emb_head_dim), model.qk_pos_emb_head_dim // 2
        return Layout(
            lambda parts: _in_pairs(parts[0], sizes, (half, 2), turned=1),
            lambda whole: (_in_pairs(whole, sizes, (2, half), turned=1),),
        )

    return layout


# latent attention: rows of queries, and of the latent of keys and values
latent_queries = neighbours(lambda model: model.qk_head_dim)
latent_keys = neighbours(lambda model: model.kv_lora_rank)


def of_experts(model: ModelConfig) -> Layout:
    """Return the layout of one matrix for each gate of each expert; our rows are [gate_0; up_0; gate_1; up_1; ...]."""
    count = (2 if ACTIVATIONS[model.activation].is_gated else 1) * (model.num_experts or 1)
    return Layout(lambda parts: torch.cat(tuple(parts)), lambda whole: whole.chunk(count))


def of_experts_transposed(model: ModelConfig) -> Layout:
    """Return the layout of one matrix [out, in] for each expert; our rows are [in] of one expert after the other."""
    count = model.num_experts or 1
    return Layout(
        lambda parts: torch.cat([part.t() for part in parts]),
        lambda whole: tuple(part.t() for part in whole.chunk(count)),
    )


def stacked_qkv(model: ModelConfig) -> Layout:
    """Return the layout of [q; k; v] over all heads in one tensor."""
    separate, head_dim = separate_qkv(model), model.head_size()
    rows = [heads * head_dim for heads in (model.num_attention_heads, model.query_groups(), model.query_groups())]
    return Layout(lambda parts: separate.join(parts[0].split(rows)), lambda whole: (torch.cat(separate.split(whole)),))


def fused_qkv(model: ModelConfig) -> Layout:
    """Return the layout of GPT-2's c_attn: `stacked_qkv`, transposed like all its weights."""
    stacked = stacked_qkv(model)
    return Layout(
        lambda parts: stacked.join((parts[0].t(),)), lambda whole: tuple(part.t() for part in stacked.split(whole))
    )


def stacked_experts(model: ModelConfig) -> Layout:
    """Return the layout of one tensor with a dimension of experts, whose rows are ours."""
    count = model.num_experts or 1
    return Layout(lambda parts: parts[0].flatten(0, 1), lambda whole: (whole.unflatten(0, (count, -1)),))


def stacked_transposed_experts(model: ModelConfig) -> Layout:
    """Return the layout of one tensor [experts, out, in]; our rows are [in] of one expert after the other."""
    count = model.num_experts or 1
    return Layout(
        lambda parts: parts[0].transpose(1, 2).flatten(0, 1),
        lambda whole: (whole.unflatten(0, (count, -1)).transpose(1, 2),),
    )


def interleaved_experts(model: ModelConfig) -> Layout:
    """Return the layout of [experts, in, 2 width], of biases [experts, 2 width], whose channels alternate: gate, up."""
    count = model.num_experts or 1

    def join(parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0].transpose(1, -1)  # [experts, 2 width, in]
        return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 2)

    def split(whole: Tensor) -> tuple[Tensor, ...]:
        return (whole.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(1, 2).transpose(1, -1),)

    return Layout(join, split)


LAYER = "#"  # placeholder for the layer's number in our names and theirs
EXPERT = "@"  # placeholder for an expert's number in theirs
OURS, LLAMA = f"decoder.layers.{LAYER}", f"model.layers.{LAYER}"  # layers in our names, and in those of Llama


@dataclass(frozen=True)
class Row:
    """One row of a table.

    ours: a module, of which theirs hold the weight, and the bias if it has one; or one parameter, which theirs are.
    Names with EXPERT are repeated for every expert of the layer: all of the first, then all of the second.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Callable[[ModelConfig], Layout] = same

    def parts(self, layer: str, kind: str, num_experts: int) -> tuple[str, ...]:
        """Return their names in a layer. kind: "weight" or "bias" of a module, "" for a parameter."""
        numbers = range(num_experts if any(EXPERT in name for name in self.theirs) else 1)
        names = (name.replace(LAYER, layer).replace(EXPERT, str(number)) for number in numbers for name in self.theirs)
        return tuple(f"{name}.{kind}" if kind else name for name in names)


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of this folder."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def rows_of(table: str) -> tuple[Row, ...]:
    """Return the rows of a table of rows.csv, which names layouts of this module; none means `same`."""
    rows = (row for row in read_table("rows.csv") if row["table"] == table)
    return tuple(Row(row["ours"], tuple(row["theirs"].split()), globals()[row["layout"] or "same"]) for row in rows)


@dataclass(frozen=True)
class MappedTensor:
    """One of our parameters with its names and layout in the other format."""

    spec: ParamSpec
    theirs: tuple[str, ...]
    layout: Layout


def _place(spec: ParamSpec, model: ResolvedModelConfig, layers: Layers) -> tuple[str, str, ResolvedModelConfig]:
    """Return the number of a parameter's layer, its name with LAYER in its place, and the configuration there.

    The layers of multi-token prediction follow those of the model; their parameters are named like those of others.
    """
    found = re.match(r"mtp\.layers\.(\d+)\.", spec.name)
    if found is not None:
        rest = spec.name.removeprefix(found[0])
        inner = rest.removeprefix("transformer_layer.")
        name = f"mtp.layers.{LAYER}.{rest}" if inner == rest else f"decoder.layers.{LAYER}.{inner}"
        return str(model.num_layers + int(found[1])), name, layers[-1]
    if not isinstance(spec.owner, int):
        return str(spec.owner), spec.name, model
    return str(spec.owner), spec.name.replace(f".{spec.owner}.", f".{LAYER}.", 1), layers[spec.owner]


def map_tensors(rows: Sequence[Row], model: ResolvedModelConfig, architecture: str) -> tuple[MappedTensor, ...]:
    """Return every parameter and state of an `unpadded` model, in model order. Raises ConfigError for one without a
    row.
    """
    by_ours, layers = {row.ours: row for row in rows}, layer_configs(model)
    mapped = []
    for spec in (*model_parameters(model, sequence_parallel=False), *model_states(model)):
        layer, name, config = _place(spec, model, layers)
        module, _, kind = name.rpartition(".")
        row, kind = (by_ours[name], "") if name in by_ours else (by_ours.get(module), kind)
        if row is None:
            raise ConfigError(f"{architecture} has no place for the tensor {spec.name} of shape {list(spec.shape)}")
        mapped.append(MappedTensor(spec, row.parts(layer, kind, config.num_experts or 1), row.layout(config)))
    return tuple(mapped)

"""The changes since a checkpoint was saved: a run's configuration against the saved one, by the classes of
`config.changes`, its model layer by layer, and its tokenizer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megapipe.checkpoint.folder import CONFIG_NAME, CheckpointFolder, missing_extensions, read_listed, vocabulary_of
from megapipe.config.changes import CLASSES, DATA, FUNCTION, NEUTRAL, OPTIMIZER, SCHEDULE, classes
from megapipe.config.config import Config, all_fields, derived_options, fields_by_key, make_config, value_of
from megapipe.config.fields import value_text
from megapipe.config.files import CheckpointConfig
from megapipe.config.layers import ROTARY_OPTIONS, LayerConfig, idle_options, layer_configs, layers_text
from megapipe.config.load import asks_for_nothing, settings_of_entry
from megapipe.config.model import ModelConfig
from megapipe.config.problems import Problems
from megapipe.config.rules.training import with_implied
from megapipe.config.yaml_file import read_entries
from megapipe.errors import CheckpointError, ConfigError
from megapipe.schedule.families import SCHEDULES
from megapipe.tokenizers.tokenizer import Fingerprint, described, is_same

TOKENIZER = "data.tokenizer_type"
# class -> the flag that allows its changes, and another way out; changes of other classes are printed
ALLOWED_BY = {
    FUNCTION: ("--allow-changed-model", "--use-checkpoint-args takes the checkpoint's model"),
    OPTIMIZER: ("--allow-changed-optimizer", "--no-load-optim starts with a fresh optimizer"),
    DATA: ("--allow-changed-data", "--finetune starts at step 0"),
}
# of the data, what is compared by content (data.fingerprint): a file may move
BY_CONTENT = (
    "data_path split train_data_path dataset mock_data sft sft_tokenizer_prompt_format tokenizer_model vocab_file "
    "merge_file seq_length"
).split()
# compared as what each layer has
OF_EACH_LAYER = "layer_pattern window_attn_skip_freq no_rope_freq moe_layer_freq".split()
LATENT_OPTIONS = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim latent_norm_epsilon".split()
ATTENTION_OPTIONS = (
    *"num_attention_heads num_query_groups kv_channels window_size qk_layernorm qk_layernorm_scope".split(),
    *"qk_layernorm_after_rope attn_logit_softcapping attention_kind softmax_type softmax_scale add_qkv_bias".split(),
    *"qk_l2_norm nope_query_scale nope_query_scale_length attention_output_gate multi_latent_attention".split(),
    *LATENT_OPTIONS,
    *ROTARY_OPTIONS,
)


# where the pipeline of an asynchronous schedule drains, which changes later weights (Config.drain_intervals)
DRAINS = (
    *"checkpoint.save_interval checkpoint.save_interval_minutes training.eval_interval training.eval_iters".split(),
    *"training.exit_interval training.check_weight_hash_across_dp_replicas_interval".split(),
)
# which layers a stage has, and so how late a gradient is and which norm limits it where stages are updated one by one
STAGES = tuple(
    f"parallel.{name}"
    for name in (
        *"pipeline_model_parallel_size pipeline_model_parallel_layout pipeline_balance pipeline_layer_times".split(),
        *"decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_rank_speeds".split(),
        *"account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_rank_memory".split(),
    )
)
# which tokens are on one rank, and so which of them a capacity drops and sinkhorn balances
TOKENS_OF_A_RANK = ("parallel.tensor_model_parallel_size", "parallel.context_parallel_size")


@dataclass(frozen=True)
class ConfigChanges:
    """The differences from the run that saved a checkpoint. lines: both values, by class. unknown: fields of the
    configuration that only its file or only this version has.
    """

    folder: CheckpointFolder
    lines: Mapping[str, Sequence[str]]
    unknown: Collection[str]

    def told(self, flags: CheckpointConfig) -> tuple[str, ...]:
        """Return the lines to print. Raises CheckpointError for changes that the flags do not allow."""
        allowed = {
            FUNCTION: flags.allow_changed_model,
            OPTIMIZER: flags.allow_changed_optimizer,
            DATA: flags.allow_changed_data,
        }
        lines, refused = [f"changed since step {self.folder.step} ({self.folder.path}):"], {}
        for kind in [kind for kind in CLASSES if self.lines.get(kind)]:
            flag, way = ALLOWED_BY.get(kind, ("", ""))
            lines += [f"  {kind} ({flag}):" if allowed.get(kind) else f"  {kind}:"]
            lines += [f"    {line}" for line in self.lines[kind]]
            if not allowed.get(kind, True):
                refused[flag] = way
        block = "\n".join(lines)
        if refused:
            raise CheckpointError(
                f"this run is not the one that was saved; {block}\nSet them alike ({'; '.join(refused.values())}), or "
                f"give {' '.join(refused)} if the change is wanted"
            )
        remarks = (block,) if len(lines) > 1 else ()
        skipped = ", ".join(sorted(self.unknown))
        written = f"{self.folder.path} was written by another version, so these were not compared: {skipped}"
        return (written, *remarks) if skipped else remarks


def changes_since(
    folder: CheckpointFolder, own: Config, kinds: Collection[str], more: Mapping[str, Sequence[str]]
) -> ConfigChanges:
    """Compare a resolved configuration with the one saved with a checkpoint. Raises CheckpointError if that cannot be
    read.

    kinds: the classes that are compared besides the function and the type of tokenizer. more: lines by class on what is
    compared by other means.
    """
    saved, unknown = compared_config(folder, own)
    compared = {key: kind for key, kind in classes().items() if kind in kinds or key == TOKENIZER}
    lines: dict[str, list[str]] = {FUNCTION: list(model_differences(saved.model, own.model))}
    length = "train_samples" if saved.training.train_iters is not None else "train_iters"  # the other is derived
    for key, kind in compared.items():
        section, name = key.split(".")
        # compared in another way: layer by layer, by content, as a part of `Schedules`
        is_rate = kind == SCHEDULE and section == "optimizer"
        if key not in unknown and kind != FUNCTION and name not in (*BY_CONTENT, length) and not is_rate:
            lines.setdefault(kind, []).extend(_change(key, saved, own))
    for kind, found in more.items():
        lines.setdefault(kind, []).extend(found)
    may_differ = set()
    for key in unknown:  # of a field that this version knows, the default changes nothing
        field = fields_by_key().get(key)
        if field is None or (classes()[key] in (FUNCTION, *kinds) and value_of(own, field) != field.default):
            may_differ.add(key)
    return ConfigChanges(folder, lines, may_differ)


def model_changes(folder: CheckpointFolder, own: ModelConfig) -> list[str]:
    """Return a line for each option in which a checkpoint's model computes another function. Raises CheckpointError."""
    saved, _ = compared_config(folder, Config(model=own))
    return list(model_differences(saved.model, own))


def compared_config(folder: CheckpointFolder, own: Config) -> tuple[Config, set[str]]:
    """Return the configuration that a checkpoint was trained with, as far as it is compared, and the fields that only
    its file or only this version knows, which are as in `own`. Raises CheckpointError.
    """
    text, state, problems = read_listed(folder, CONFIG_NAME), folder.manifest.state, Problems()
    values: dict[str, Any] = {}
    try:
        found = read_entries(text, str(folder.path / CONFIG_NAME), problems)
        problems.raise_all()
        entries = {f"{one.section}.{one.key}": one for one in found if not asks_for_nothing(one)}
        needed = {field.option.needs.key for field in all_fields() if field.option.needs is not None}
        for key in [key for key in entries if key in needed or classes().get(key, NEUTRAL) != NEUTRAL]:
            try:
                values |= {one.field.key: one.value for one in settings_of_entry(entries[key], [])}
            except ConfigError:
                if classes()[key] == FUNCTION:
                    raise
                values[key] = entries[key].raw  # the name of an extension that this run does not have
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be compared: {error}{missing_extensions(folder)}") from None
    unknown = entries.keys() ^ classes().keys()
    values |= {key: value_of(own, fields_by_key()[key]) for key in unknown & classes().keys()}
    config = with_implied(make_config(values))
    seed = (state.get("random") or {}).get("seed", config.training.seed)
    batch = state.get("global_batch_size") or own.training.global_batch_size
    training = replace(config.training, seed=seed, global_batch_size=batch)
    return replace(config, model=replace(config.model, vocab_size=vocabulary_of(folder)), training=training), unknown


def data_parallel_change(state: Mapping[str, Any], own: Config, dp: int) -> list[str]:
    """Return the line for another number of dp ranks than in a checkpoint's state, where the microbatches of each rank
    change results: by a loss over those so far, or by updates between them.
    """
    depends = ("global_aux_loss" in own.model.balance_losses and own.model.num_experts) or _updates_by_stage(own)
    saved = (state.get("grid") or {}).get("dp", dp)
    return [change_text("data-parallel size", saved, dp)] if depends and saved != dp else []


def _change(key: str, saved: Config, own: Config) -> Iterator[str]:
    """Yield the line for a field that has changed, unless it has no effect in one of the runs."""
    field, is_off = fields_by_key()[key], list[bool]()
    need, before, now = field.option.needs, value_of(saved, field), value_of(own, field)
    if need is not None:
        is_off = [not need.is_met(value_of(one, fields_by_key()[need.key])) for one in (saved, own)]
        if any(is_off) and classes()[need.key] != NEUTRAL:
            return  # the change of the other option is named
        # where a neutral option is off, as that of narrow states, the default is in force
        before, now = (field.default if off else value for off, value in zip(is_off, (before, now), strict=True))
    if key == "training.micro_batch_size" and not any(
        over_microbatches(one) or _updates_by_stage(one) for one in (saved, own)
    ):
        return
    if key in STAGES and not (_updates_by_stage(saved) and _updates_by_stage(own)):
        return
    if key in TOKENS_OF_A_RANK and not (_chooses_by_rank(saved) and _chooses_by_rank(own)):
        return
    if key == TOKENIZER and {None, "NullTokenizer"} & {before, now}:
        return  # the data were tokenized elsewhere
    if key == "data.sft_overlong" and "refuse" in (before, now):
        return  # where a run was not refused, nothing was too long
    if key in DRAINS and (_is_synchronous(own) or (key == "training.eval_iters" and bool(before) == bool(now))):
        return
    if key == "parallel.pipeline_schedule":
        asynchronous = {name for name in SCHEDULES if not SCHEDULES[name].is_synchronous}
        before, now = (name if name in asynchronous else "synchronous" for name in (before, now))
    if before != now:
        yield change_text(field.main_flag, before, now)


def _is_synchronous(config: Config) -> bool:
    name = config.parallel.pipeline_schedule
    return name not in SCHEDULES or SCHEDULES[name].is_synchronous


def _updates_by_stage(config: Config) -> bool:
    """Return True if a stage is updated at its own time, some microbatches after their forwards."""
    name = config.parallel.pipeline_schedule
    return not _is_synchronous(config) and not SCHEDULES[name].is_delayed


def _chooses_by_rank(config: Config) -> bool:
    """Return True if what happens to a token in a layer with experts depends on the other tokens of its rank."""
    model = config.model
    return bool(model.num_experts) and (model.moe_expert_capacity_factor is not None or model.has_sinkhorn)


def over_microbatches(config: Config) -> bool:
    """Return True if a loss or a choice of experts depends on which sequences are in one microbatch."""
    model, training = config.model, config.training
    losses = {*model.balance_losses} if model.num_experts else set()
    # masked tokens give microbatches different weights: that of a mean over each, or of a router's loss
    has_means = losses or model.mtp_num_layers or (model.num_experts and model.moe_z_loss_coeff)
    is_weighed = config.data.masks_loss and (not training.calculate_per_token_loss or has_means)
    return bool(losses - {"seq_aux_loss"} or _chooses_by_rank(config) or is_weighed)


def check_tokenizer(
    state: Mapping[str, Any],
    own: Fingerprint | None,
    where: str,
    *,
    is_finetuning: bool = False,
    may_differ: bool | None = None,
) -> tuple[str, ...]:
    """Return remarks on how a run's tokenizer differs from that of a checkpoint's state.

    is_finetuning: documents may end with another token. may_differ: --allow-changed-data; None for a command without
    it. Raises CheckpointError for another tokenizer, unless it may differ.
    """
    if own is None or ("tokenizer" in state and state["tokenizer"] is None):
        return ()  # one of the two runs has none
    if "tokenizer" not in state:
        return (f"{where} does not say which tokenizer it was trained with, so it was not compared",)
    saved: Fingerprint = state["tokenizer"]
    try:
        if is_same(saved, own, with_eod=not is_finetuning):
            return ()
        both = f"{described(saved)} in the checkpoint, {described(own)} here"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{where}: its tokenizer cannot be understood: {error!r}") from None
    if may_differ:
        return (f"the tokenizer is not that of {where} (--allow-changed-data): {both}",)
    way = "" if may_differ is None else ", or --allow-changed-data if the change is wanted"
    raise CheckpointError(
        f"the tokenizer is not the one that {where} was trained with: {both}; the same text has other ids. Give that "
        f"tokenizer{way}"
    )


def model_differences(saved: ModelConfig, own: ModelConfig) -> Iterator[str]:
    """Yield a line with both values for every option in which two models compute different functions."""
    if saved.num_layers != own.num_layers:
        yield change_text(_flag("num_layers"), saved.num_layers, own.num_layers)
    longest = max(saved.seq_length, own.seq_length)
    found: dict[tuple[str, Any, Any], list[int]] = {}
    of_both = (layer_configs(replace(model, **derived_options(model))) for model in (saved, own))
    layers = list(zip(*of_both, strict=False))
    for number, (before, now) in enumerate(layers):
        if before == now:
            continue
        there, here = _function_of(before, longest), _function_of(now, longest)
        for name in there:  # one that only one of them uses follows from another that differs
            if name in here and there[name] != here[name]:
                found.setdefault((name, there[name], here[name]), []).append(number)
    for (name, value, other), numbers in found.items():
        where = "" if len(numbers) == len(layers) else f" ({layers_text(numbers)})"
        yield change_text(_flag(name), value, other) + where


def change_text(flag: str, saved: Any, own: Any) -> str:
    """Return the line for a setting that has changed since a checkpoint."""
    there, here = (value if isinstance(value, str) else value_text(value) for value in (saved, own))
    return f"{flag}: {there} in the checkpoint, {here} here"


def _flag(name: str) -> str:
    field = fields_by_key().get(f"model.{name}")
    return f"--layer-pattern {name.removeprefix('has_')}" if field is None else field.main_flag


def _function_of(layer: LayerConfig, longest: int) -> dict[str, Any]:
    """Return the options that have an effect on what a layer, and the model around it, compute for sequences up to
    `longest` tokens."""
    unused = {key.removeprefix("model.") for key, kind in classes().items() if kind != FUNCTION}
    unused |= {*OF_EACH_LAYER, "num_layers", "mixer"}
    if layer.mixer is not None:  # it says itself what has an effect
        unused |= {*ATTENTION_OPTIONS} - {"attention_kind"}
        options = tuple(f"{name}={value:g}" for name, value in layer.mixer_options.items())
        layer = replace(layer, has_attention=True, attention_options=options)
    elif not layer.has_attention:
        unused |= {*ATTENTION_OPTIONS}
    if layer.mixer is None:
        unused.add("attention_options")
    if not layer.has_mlp:
        unused |= {"ffn_hidden_size", "activation"}
    unused |= idle_options(layer)
    if not layer.multi_latent_attention:
        unused |= {*LATENT_OPTIONS}
    if layer.window_size is not None and layer.window_size >= longest:
        layer = replace(layer, window_size=None)
    return {one.name: getattr(layer, one.name) for one in fields(layer) if one.name not in unused}

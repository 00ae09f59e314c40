"""Common parts of Megatron's two checkpoint formats: folders, names, order and cuts of tensors, optimizer state; and
what is written for Megatron.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.config.config import Config, ResolvedModelConfig, resolve_model
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.megatron_args import INTERLEAVED, LATENT, MegatronGrid, write_args
from megapipe.extras.convert.snapshot import DTYPES, EXPERT_BIAS, LazyTensor, Snapshot, fresh_state, new_folder
from megapipe.extras.convert.tables import Layout, Settings, latent_keys, latent_queries, unpadded
from megapipe.schedule.families import SCHEDULES
from megapipe.sharding.boxes import pieces
from megapipe.sharding.spec import ExpertRows, Fused, ParamSpec
from megapipe.sharding.state_dtypes import LAST_CHANGE
from megapipe.trace.parameters import model_parameters

TRACKER, COMMON = "latest_checkpointed_iteration.txt", "common.pt"
MOMENTS = "exp_avg", "exp_avg_sq"
HEAD = "output_layer.weight"
KEYS = {"master": "param", **dict(zip(MOMENTS, MOMENTS, strict=True))}  # ours -> the distributed optimizer's
ALIGNMENT = 64  # elements between the starts of parameters in the distributed optimizer's buffers
EXTRA_STATE = "_extra_state"  # Transformer Engine's fp8 scales, empty without fp8
# Transformer Engine stores a norm's weights in the linear layer that follows it
INPUT_NORM, MLP_NORM = "input_layernorm.", "pre_mlp_layernorm."
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": INPUT_NORM,
    "mlp.linear_fc1.layer_norm_": MLP_NORM,
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
SINKS = ("self_attention.core_attention.softmax_offset", "self_attention.softmax_offset")  # Megatron's name, and ours
LATENT_LINEARS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
TRY_WEIGHTS_ONLY = "convert with --weights-only"


def iteration_folder(root: Path, step: int | None) -> Path:
    """Return the folder of `step`, else of the iteration in the tracker file, else root. Raises CheckpointError."""
    if step is None and not (root / TRACKER).exists():
        return root
    iteration = (root / TRACKER).read_text().strip() if step is None else step
    folder = root / ("release" if iteration == "release" else f"iter_{int(iteration):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{root} has no {folder.name}")
    return folder


def renamed(name: str, shift: int = 0) -> str:
    """Return our name of one of Megatron's parameters. shift: added to the number of its layer."""
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda match: f"decoder.layers.{int(match[1]) + shift}.", name)
    for theirs, plain in FUSED_NORMS.items():
        name = name.replace(theirs, plain)
    return name.replace(*SINKS)


def their_name(name: str, layer: LayerConfig | None, transformer_engine: bool) -> str:
    """Return Megatron's name of one of our parameters in `torch_dist`, by whose layers it has.

    layer: the configuration of the parameter's layer; None outside of layers. Megatron's own layers store the norms of
    attention and MLP under Transformer Engine's names, unless attention is latent. An own norm is one that no linear
    follows: before a router, and before latent attention.
    """
    name = name.replace(*SINKS[::-1])
    if layer is None:
        return name
    is_latent = layer.multi_latent_attention
    is_fused = {
        INPUT_NORM: not is_latent,
        MLP_NORM: layer.num_experts is None if transformer_engine else not is_latent,
    }
    for theirs, plain in FUSED_NORMS.items():
        if is_fused.get(plain, is_latent and transformer_engine):
            name = name.replace(plain, theirs)
    return name


def joined(spec: ParamSpec, parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return the first `num_rows` rows of a tensor, without vocabulary padding, from the slices of all tp ranks."""
    whole = torch.empty(spec.shape, dtype=parts[0].dtype)
    for tp_rank, part in enumerate(parts):
        for piece in pieces(spec, tp_rank, len(parts)):
            if piece.owned:
                whole[piece.box.slices] = part.flatten()[piece.start : piece.stop].view(piece.box.shape)
    return whole if num_rows == spec.shape[0] else whole[:num_rows].clone()


def in_halves(config: Config, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return tensors of a model with rotary_interleaved by `key/name`, unread, with channels of its heads reordered.

    A rotary pair is two neighbouring channels there, and channels i and i + n / 2 of n rotated ones here. Queries and
    keys take the same order, so their products stay as they are; elementwise optimizer state moves with its weight.
    """
    model = unpadded(config.model)
    groups, size = model.query_groups(), model.head_size()
    rotated = int(size * model.rotary_percent)
    order = torch.tensor([*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, size)])

    rotated_heads = [*range(model.num_attention_heads // groups), -2]

    def of_heads(tensor: Tensor) -> Tensor:  # [groups x (queries of a group, gates, key, value) x size, ...]
        whole = tensor.reshape(groups, -1, size, *tensor.shape[1:]).clone()
        whole[:, rotated_heads] = whole[:, rotated_heads][:, :, order]
        return whole.reshape(tensor.shape)

    moves = {f"linear_qkv.{kind}": of_heads for kind in ("weight", "bias")}
    for norm in ("q_layernorm", "k_layernorm"):
        moves |= {f"{norm}.{kind}": lambda tensor: tensor[order] for kind in ("weight", "bias")}
    return _moved(tensors, moves)


def with_neighbours(model: ModelConfig, tensors: Mapping[str, LazyTensor], to_theirs: bool) -> dict[str, LazyTensor]:
    """Return tensors of latent attention by `key/name`, unread, with the rows of rotated channels in the other order.

    Megatron's pairs of channels are neighbours in latent attention, as in DeepSeek's files; ours are two halves.
    """

    def move(layout: Layout, whole: Tensor) -> Tensor:
        return layout.split(whole)[0] if to_theirs else layout.join([whole])

    queries, keys = (partial(move, layout(model)) for layout in (latent_queries, latent_keys))
    linears = {"linear_q_proj": queries, "linear_q_up_proj": queries, "linear_kv_down_proj": keys}
    return _moved(tensors, {f"{linear}.weight": move for linear, move in linears.items()})


def _moved(tensors: Mapping[str, LazyTensor], moves: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, LazyTensor]:
    """Return tensors, unread, with channels in another order. moves: by the last two words of a parameter's name."""
    ends = {name: ".".join(name.split(".")[-2:]) for name in tensors}
    return {name: tensor.map(moves[ends[name]]) if ends[name] in moves else tensor for name, tensor in tensors.items()}


def with_cut_latents(spec: ParamSpec) -> ParamSpec:
    """Return a parameter as Megatron's own linears cut it: rows of linears to latents over tp. Others stay."""
    return dataclasses.replace(spec, slicing=Fused(0)) if spec.name.endswith(LATENT_LINEARS) else spec


def layer_order(is_latent: bool, transformer_engine: bool) -> list[str]:
    """Return the modules of a layer in the order in which Megatron creates them.

    Its own norms are modules before the attention or at its end; Transformer Engine's are part of the linear layer that
    follows.
    """
    attention, norms = ["self_attention", "self_attention.linear_proj"], ["q_layernorm", "k_layernorm", "kv_layernorm"]
    order = ["linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"]
    order += ["linear_kv_down_proj", "linear_kv_up_proj", *norms]
    if transformer_engine and is_latent:
        order = ["linear_q_proj", "linear_q_down_proj", "q_layernorm", "linear_q_up_proj"]
        order += ["linear_kv_down_proj", "kv_layernorm", "linear_kv_up_proj"]
    before, after = ([], [INPUT_NORM[:-1]]) if transformer_engine and not is_latent else ([INPUT_NORM[:-1]], [])
    shared = "mlp.shared_experts"
    return [
        *before, *attention, *after, *(f"self_attention.{name}" for name in order), MLP_NORM[:-1], "mlp.router",
        "mlp.experts", shared, f"{shared}.linear_fc1", f"{shared}.linear_fc2", "mlp.linear_fc1", "mlp.linear_fc2",
    ]  # fmt: skip


def ordered_parameters(model: ResolvedModelConfig, etp: int, transformer_engine: bool) -> list[ParamSpec]:
    """Return all parameters as Megatron cuts them, in the order in which it creates them.

    Raises CheckpointError for one without a place.
    """
    order, ends = layer_order(model.multi_latent_attention, transformer_engine), {"embedding": -1, "head": sys.maxsize}

    def place(spec: ParamSpec) -> tuple[int, int]:
        if not isinstance(spec.owner, int):
            return ends[spec.owner], 0
        module = spec.name.split(".", 3)[3].rpartition(".")[0]
        if module not in order:
            raise CheckpointError(f"optimizer state of {spec.name} cannot be found by its order; {TRY_WEIGHTS_ONLY}")
        return spec.owner, order.index(module)

    specs = model_parameters(model, sequence_parallel=False, etp=etp)
    return sorted(specs if transformer_engine else map(with_cut_latents, specs), key=place)


# ---------------------------------------------------------------------------------------------------- experts

LOCAL = r"local_experts\.(?P<number>\d+)\.linear_fc(?P<linear>[12])\.(?P<kind>weight|bias)"
GROUPED = r"linear_fc(?P<linear>[12])\.(?P<kind>weight|bias)(?P<number>\d+)"
NAMES = [re.compile(rf"(?P<module>.*\.mlp\.experts)\.{place}") for place in (LOCAL, GROUPED)]


def expert_tensor(name: str) -> tuple[str, int] | None:
    """Return our name of the tensor of all experts to which one expert's belongs, and its number; None for others."""
    match = next(filter(None, (pattern.fullmatch(name) for pattern in NAMES)), None)
    return None if match is None else (f"{match['module']}.{match['kind']}{match['linear']}", int(match["number"]))


def to_stack(spec: ParamSpec, whole: Tensor, count: int) -> Tensor:
    """Return Megatron's tensors [experts, ...] from ours of so many experts."""
    stack = whole.unflatten(0, (count, -1))
    return stack.transpose(1, 2) if spec.name.endswith("weight2") else stack


def from_stack(spec: ParamSpec, stack: Tensor) -> Tensor:
    """Return our tensor of all experts, the inverse of `to_stack`."""
    return (stack.transpose(1, 2) if spec.name.endswith("weight2") else stack).flatten(0, 1)


def stacked_shape(spec: ParamSpec, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of Megatron's tensors of so many experts. shape: of ours."""
    return tuple(to_stack(spec, torch.empty(shape, device="meta"), count).shape)


def local_slice(spec: ParamSpec, parts: Sequence[Tensor], rank: int) -> Tensor:
    """Return a rank's slice of the tensor of all experts. parts: that of each of its experts.

    rank: ep_rank x etp + etp_rank. A bias of linear_fc2 is whole on all ranks of etp there, and cut here.
    """
    assert isinstance(spec.slicing, ExpertRows)
    stack, etp = torch.stack(tuple(parts)), spec.slicing.etp
    return from_stack(spec, stack.chunk(etp, 1)[rank % etp] if spec.name.endswith("bias2") else stack)


@dataclass(frozen=True)
class Member:
    """One tensor of a rank in Megatron: a parameter's slice, or that of one of the rank's experts."""

    spec: ParamSpec
    expert: int | None = None  # its number on the rank

    def local_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return its shape on a rank of tp, or of ep x etp."""
        local, slicing = self.spec.local_shape(rank, ranks), self.spec.slicing
        if self.expert is None:
            return local
        assert isinstance(slicing, ExpertRows)
        rows, *others = stacked_shape(self.spec, local, slicing.count // (ranks // slicing.etp))[1:]
        return (rows * (slicing.etp if self.spec.name.endswith("bias2") else 1), *others)


def members(specs: Iterable[ParamSpec], ep: int, is_grouped: bool) -> list[Member]:
    """Return the tensors of a rank in Megatron's order. specs: its parameters, in that order but for experts."""
    found: list[Member] = []
    for (is_expert, _), group in groupby(specs, lambda spec: (spec.is_expert, spec.owner)):
        same = list(group)
        if not is_expert:
            found += [Member(spec) for spec in same]
            continue
        linears = [[spec for spec in same if spec.name.endswith(number)] for number in "12"]  # weight, bias
        assert isinstance(same[0].slicing, ExpertRows)
        numbers = range(same[0].slicing.count // ep)
        if is_grouped:
            found += [Member(spec, number) for linear in linears for number in numbers for spec in linear]
        else:
            found += [Member(spec, number) for number in numbers for linear in linears for spec in linear]
    return found


def stacked_name(name: str) -> str:
    """Return the name in torch_dist of a tensor of all experts of a layer, or the name of another tensor."""
    return re.sub(r"\.mlp\.experts\.(weight|bias)([12])$", r".mlp.experts.experts.linear_fc\2.\1", name)


# -------------------------------------------------------------------------------------------- reading a run


def aligned(position: int) -> int:
    """Return the place of the next parameter in a flat buffer of the distributed optimizer, in elements."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def steps_of(groups: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the numbers of updates that the groups of an optimizer state."""
    return {int(group["step"]) for group in groups if group.get("step") is not None}


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer other than tensors."""

    num_steps: int  # updates made
    scaler: Mapping[str, Any] | None


def run_snapshot(
    config: Config,
    tensors: Mapping[str, LazyTensor],
    args: Settings,
    content: Mapping[str, Any],
    optimizer: OptimizerState | None,
    remarks: tuple[str, ...] = (),
) -> Snapshot:
    """Return the Snapshot of a run, or without optimizer state that of a model at step 0.

    tensors: under our names, with Megatron's order of the channels. content: of a checkpoint file, for everything
    other than tensors.
    """
    if args.get(LATENT):
        tensors = with_neighbours(config.model, tensors, to_theirs=False)
    elif args.get(INTERLEAVED):
        tensors = in_halves(config, tensors)
        remarks = (
            *remarks,
            "reordered the channels of queries and keys (rotary_interleaved): rotary pairs lie in the two halves of a "
            "head now; leave out --rotary-interleaved if the run goes back to Megatron",
        )
    state = fresh_state(config.precision.dtype)
    if optimizer is None:
        return Snapshot(config, tensors, state, remarks=remarks)
    step = int(content.get("iteration", args.get("iteration", 0)))
    samples = int(args.get("consumed_train_samples") or 0)
    state["training"] = {
        "step": step,
        "consumed_samples": samples,
        "consumed_tokens": samples * config.model.seq_length,
        "skipped_steps": max(0, step - optimizer.num_steps),
    }
    loss_scaler = {"scale": 1.0, "good_steps": 0, "overflows_left": 1}  # a constant scale has no state
    scaler = optimizer.scaler
    if scaler and "growth_tracker" in scaler:  # Megatron's dynamic scaler, which counts like ours
        loss_scaler = {
            "scale": float(scaler["scale"]),
            "good_steps": int(scaler["growth_tracker"]),
            "overflows_left": int(scaler["hysteresis_tracker"]),
        }
    rule = config.optimizer.optimizer
    state["optimizer"] = {"num_steps": optimizer.num_steps, "loss_scaler": loss_scaler, "rule": rule}
    state["random"] = {"seed": config.training.seed}
    if content.get("opt_param_scheduler") is not None:
        state["schedules"] = read_schedules(content["opt_param_scheduler"], args)
    return Snapshot(config, tensors, state, remarks=remarks)


def read_schedules(scheduler: Mapping[str, Any], args: Settings) -> dict[str, Any]:
    """Return the state of Megatron's OptimizerParamScheduler, whose steps are samples, as our `schedules`."""

    def either(*names: str) -> Any:
        found = next((scheduler[name] for name in names if name in scheduler), None)
        if found is None:
            raise CheckpointError(f"the checkpoint's opt_param_scheduler lacks {names[0]}")
        return found

    style = either("lr_decay_style", "decay_style")
    wsd_iters, wsd_samples = args.get("lr_wsd_decay_iters"), args.get("lr_wsd_decay_samples")
    lr = {
        "max_lr": either("max_lr", "start_lr"),
        "min_lr": either("min_lr"),
        "init_lr": args.get("lr_warmup_init") or 0.0,
        "style": style,
        "warmup_samples": either("lr_warmup_steps", "warmup_steps", "warmup_iter"),
        "decay_samples": either("lr_decay_steps", "decay_steps", "end_iter"),
        "wsd_style": args.get("lr_wsd_decay_style") or "exponential",
        "wsd_samples": wsd_samples or (wsd_iters or 0) * (args.get("global_batch_size") or 0),
    }
    decoupled = {"max_lr": args.get("decoupled_lr"), "min_lr": args.get("decoupled_min_lr")}
    decay = {
        "start": either("start_wd"),
        "end": either("end_wd"),
        "style": either("wd_incr_style"),
        "ramp_samples": either("wd_incr_steps"),
    }
    return {"lr": lr, "decoupled_lr": lr | {k: v for k, v in decoupled.items() if v is not None}, "weight_decay": decay}


# -------------------------------------------------------------------------------------------- writing a run

CHECKPOINT_VERSION = 3.0  # of Megatron's format, since q, k and v are interleaved by query group


def extra_state_modules(layer: LayerConfig, transformer_engine: bool) -> list[str]:
    """Return the modules of a layer that have an extra state, without its experts' linears."""
    names = ["linear_proj"]
    if not layer.multi_latent_attention:
        names.append("linear_qkv")
    else:
        queries = ["linear_q_proj"] if layer.q_lora_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        names += [*queries, "linear_kv_down_proj", "linear_kv_up_proj"]
    norms = []
    if transformer_engine:
        names.append("core_attention")
        if layer.qk_layernorm and not layer.multi_latent_attention:
            names += ["q_layernorm", "k_layernorm"]
        norms += [INPUT_NORM] if layer.multi_latent_attention else []
        norms += [MLP_NORM] if layer.num_experts is not None else []
    if layer.num_experts is None:
        block = "mlp."
    else:
        block = "" if layer.moe_shared_expert_intermediate_size is None else "mlp.shared_experts."
    linears = [f"{block}linear_fc1", f"{block}linear_fc2"] if block else []
    return [*(f"self_attention.{name}" for name in names), *(norm[:-1] for norm in norms), *linears]


@dataclass(frozen=True)
class MegatronRun:
    """A run to write, in Megatron's terms."""

    grid: MegatronGrid
    transformer_engine: bool  # its names, of norms and of experts in grouped GEMMs
    model: ResolvedModelConfig  # with its padded vocabulary
    args: Mapping[str, Any]
    snapshot: Snapshot  # with Megatron's order of channels
    weights: Mapping[str, LazyTensor]  # by our names, in the dtype of the run if it continues
    continues: bool  # its optimizer state is written

    @property
    def optimizers(self) -> tuple[bool, ...]:
        """Whether each optimizer is that of experts: with several ranks of ep they have the second of two."""
        return (False,) if self.grid.ep == 1 else (False, True)


def prepare(
    snapshot: Snapshot, grid: MegatronGrid, transformer_engine: bool, distributed_optimizer: bool
) -> MegatronRun:
    """Return a run in Megatron's terms. Raises ConfigError naming what does not fit or cannot be expressed."""
    model = resolve_model(dataclasses.replace(snapshot.config.model, padded_vocab_size=None), grid.tp)
    check_grid(model, grid, transformer_engine)
    if model.multi_latent_attention:
        snapshot = dataclasses.replace(snapshot, tensors=with_neighbours(model, snapshot.tensors, to_theirs=True))
    continues, weights = has_writable_optimizer(snapshot), snapshot.weights
    if continues:  # with fp32 masters the weights have the dtype of the run
        dtype = DTYPES[snapshot.config.precision.dtype]
        weights = {name: t if name.endswith(EXPERT_BIAS) else t.to(dtype) for name, t in weights.items()}
    elif distributed_optimizer:
        raise ConfigError(
            "--use-distributed-optimizer: this checkpoint has no optimizer state that Megatron could continue (Adam's "
            "moments, fp32 masters, one learning rate); leave the flag out to write its weights"
        )
    args = write_args(snapshot.config, snapshot.state, model.padded_vocab_size, grid) | {
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "use_distributed_optimizer": distributed_optimizer,
        "no_save_optim": not continues,
        "no_save_rng": True,
        "moe_grouped_gemm": transformer_engine and model.num_experts is not None,
    }
    return MegatronRun(grid, transformer_engine, model, args, snapshot, weights, continues)


def check_grid(model: ResolvedModelConfig, grid: MegatronGrid, transformer_engine: bool) -> None:
    """Raise ConfigError naming the size of the grid that does not divide the model."""
    flags = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}
    flags |= {"ep": "--expert-model-parallel-size", "etp": "--expert-tensor-parallel-size"}
    expert = next((layer for layer in layer_configs(model) if layer.num_experts is not None), None)
    rules = [("pp", model.num_layers, "layers of the model"), ("tp", model.num_query_groups, "query groups")]
    if expert is None and (grid.ep > 1 or grid.experts_tp is not None):
        raise ConfigError(f"{flags['ep' if grid.ep > 1 else 'etp']} is for models with experts; leave it out")
    if expert is not None:
        rules += [("ep", expert.num_experts or 1, "experts"), ("etp", expert.expert_ffn_size, "channels of an expert")]
    if model.multi_latent_attention and not transformer_engine:
        rows = model.kv_lora_rank + model.qk_pos_emb_head_dim
        rules += [
            ("tp", rows, "rows of linear_kv_down_proj"),
            ("tp", model.q_lora_rank or 0, "rows of linear_q_down_proj"),
        ]
    for axis, size, what in rules:
        if size % getattr(grid, axis):
            raise ConfigError(f"{flags[axis]} {getattr(grid, axis)} does not divide the {size} {what}")


@contextmanager
def new_iteration(root: Path, step: int) -> Iterator[tuple[Disk, Path]]:
    """Create a directory atomically, as `new_folder`: yield its folder of an iteration, and name it in the tracker."""
    with new_folder(root) as (disk, temporary):
        folder = temporary / f"iter_{step:07d}"
        disk.make_folder(folder)
        yield disk, folder
        disk.sync_folder(folder)
        disk.write_file(temporary / TRACKER, str(step).encode())


def common_content(run: MegatronRun) -> dict[str, Any]:
    """Return the entries of a checkpoint that are neither the model's nor the optimizer's."""
    snapshot = run.snapshot
    content: dict[str, Any] = {
        "args": argparse.Namespace(**run.args),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": snapshot.step,
    }
    if run.continues:
        lr, decay = snapshot.state["schedules"]["lr"], snapshot.state["schedules"]["weight_decay"]
        content["num_floating_point_operations_so_far"] = 0
        content["opt_param_scheduler"] = {
            "max_lr": lr["max_lr"], "min_lr": lr["min_lr"], "lr_decay_style": lr["style"],
            "lr_warmup_steps": lr["warmup_samples"], "lr_decay_steps": lr["decay_samples"],
            "num_steps": snapshot.state["training"]["consumed_samples"], "start_wd": decay["start"],
            "end_wd": decay["end"], "wd_incr_style": decay["style"], "wd_incr_steps": decay["ramp_samples"],
        }  # fmt: skip
    return content


def has_writable_optimizer(snapshot: Snapshot) -> bool:
    """Return True for a run with Adam's state, fp32 masters and one learning rate, which Megatron can continue."""
    state, weights = snapshot.state, snapshot.weights
    return (
        (state.get("optimizer") or {}).get("rule") == "adam"
        and state.get("schedules") is not None
        and snapshot.config.optimizer.decoupled_lr is None
        and all(
            f"{key}/{name}" in snapshot.tensors for key in MOMENTS for name in weights if not name.endswith(EXPERT_BIAS)
        )
        and all(tensor.dtype == torch.float32 for tensor in weights.values())
    )


def left_out(snapshot: Snapshot) -> tuple[str, ...]:
    """Return a remark on each part of a running job that Megatron does not continue."""
    if snapshot.state.get("optimizer") is None:
        return ()
    if not has_writable_optimizer(snapshot):
        return (
            "left out the optimizer's state, the step and the schedules: Megatron can continue Adam with fp32 masters "
            "and one learning rate; training starts again from these weights",
        )
    remarks, schedule = [], snapshot.config.parallel.pipeline_schedule
    if schedule in SCHEDULES and not SCHEDULES[schedule].is_synchronous:
        remarks.append(
            f"left out --pipeline-schedule {schedule}: Megatron continues the run with synchronous steps, whose "
            "gradients are not late"
        )
    if any(name.startswith(f"{LAST_CHANGE}/") for name in snapshot.tensors):
        remarks.append(
            "left out the last change of each weight (--delay-error-feedback), which Megatron lacks: its first update "
            "does not add the error of the last one"
        )
    return tuple(remarks)


def param_groups(snapshot: Snapshot, of_experts: bool = False) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, with weight decay and without, which need not have members.

    of_experts: those of the second optimizer, which a run with several ranks of ep has for its experts.
    """
    state, adam = snapshot.state, snapshot.config.optimizer
    steps, lr, decay = state["optimizer"]["num_steps"], state["schedules"]["lr"], state["schedules"]["weight_decay"]
    kinds = (True,) if of_experts and not snapshot.config.model.add_bias_linear else (True, False)
    return [
        {
            "step": steps, "lr": lr["max_lr"], "max_lr": lr["max_lr"], "min_lr": lr["min_lr"] or 0.0,
            "betas": (adam.adam_beta1, adam.adam_beta2), "eps": adam.adam_eps,
            "weight_decay": decay["start"] if decays else 0.0, "wd_mult": float(decays), "lr_mult": 1.0,
            "is_expert_parallel": of_experts, "is_decoupled_lr": False, "default_config": True,
        }
        for decays in kinds
    ]  # fmt: skip


def optimizer_content(snapshot: Snapshot, inner: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer around another one, with the loss scale of an fp16 run. inner: its state."""
    content = {"optimizer": inner}
    if snapshot.config.precision.dtype == "fp16":
        scaler = snapshot.state["optimizer"]["loss_scaler"]
        content["grad_scaler"] = {
            "scale": torch.tensor([scaler["scale"]]),
            "growth_tracker": scaler["good_steps"],
            "hysteresis_tracker": scaler["overflows_left"],
        }
    return content


def with_padding(whole: Tensor, num_rows: int) -> Tensor:
    """Return a tensor with at least so many rows, the added ones zero, as a padded vocabulary has."""
    if whole.shape[0] >= num_rows:
        return whole
    return torch.cat([whole, whole.new_zeros(num_rows - whole.shape[0], *whole.shape[1:])])

"""The oracle: the plain model of megapipe.extras.reference, trained in one process in fp64, and its inputs.

Initial weights and global batches are random, reproducible, and the same for the grid and the oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapipe.assembly.compose import DrawSlice
from megapipe.assembly.microbatches import Microbatches, to_microbatch
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.config.config import ResolvedConfig
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.config.model import ACTIVATIONS, ATTENTIONS, NORMALIZATIONS, AttentionHeads
from megapipe.config.rules.optimizer import rule_options
from megapipe.config.training import OPTIMIZERS, OptimizerConfig, UpdateStep
from megapipe.data.batch import PADDING, Batch, DocumentRules
from megapipe.extras.reference.asynchronous import ErrorFeedback, StreamRule, StreamTraining
from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import (
    Microbatch,
    MuonOptions,
    StepResult,
    build_optimizer,
    reference_step,
)
from megapipe.extras.verify.compare import PlainChoices
from megapipe.optimizer.schedule import Rates
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.sequence import SequencePart
from megapipe.sharding.spec import Init, ParamSpec
from megapipe.tensor_parallel.random import DropoutKey, draw, keyed_mask

GlobalBatch = Sequence[Batch]  # microbatch k * dp + d of a global batch is microbatch k of dp_rank d

STANDARD_DEVIATION = 0.2  # of the initial weights
# The weights of norms after branches are drawn this much smaller. A norm divides by the size of a branch's output,
# which is small where its terms cancel; with weights of 1, deep models would multiply rounding errors in every layer.
BRANCH_SHARE = 0.03
BRANCH_NORMS = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
EOD_SHARE = 0.15  # share of end-of-document tokens where the configuration uses documents
TRAINED_SHARE = 0.6  # of the tokens of conversations
FROM_TRAINING = ("label_smoothing", "z_loss")  # fields of ReferenceConfig that the training section has
OPTIMIZER_NAMES = {"adam": "adamw", "sgd": "sgd", "muon": "muon"}


def drawn_slices(seed: int, dtype: torch.dtype) -> DrawSlice:
    """Return a function that draws one rank's slice of a parameter through the random streams of training.

    Every parameter is random, norms and biases too: at their usual 1 and 0 a missing norm or bias would go unnoticed.
    """

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        init = Init("normal", STANDARD_DEVIATION)
        noise = draw(dataclasses.replace(spec, init=init), tp_rank, tp, seed, torch.float64)
        mean = 1.0 if spec.init.kind == "ones" else 0.0
        if spec.name.endswith(BRANCH_NORMS):
            return ((noise + 1.0) * BRANCH_SHARE + (mean - 1.0)).to(dtype)
        return (noise + mean).to(dtype)

    return slice_of


def whole_weights(specs: Iterable[ParamSpec], slices: DrawSlice) -> dict[str, Tensor]:
    """Return the whole tensors by name, as a world of one rank draws them."""
    return {spec.name: slices(spec, 0, 1) for spec in specs}


def random_batches(config: ResolvedConfig, dp: int, num_microbatches: Sequence[int], seed: int) -> list[GlobalBatch]:
    """Return one global batch of random tokens for each entry of `num_microbatches` (microbatches a dp rank).

    With document options the vocabulary's last token ends documents, a few in every sample. With --sft samples are
    conversations, most of them padded.
    """
    random = np.random.default_rng([seed, 20])
    data, vocab = config.data, config.model.vocab_size
    has_documents = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    eod = vocab - 1 if has_documents else None
    rules = DocumentRules(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    micro, seq = config.training.micro_batch_size, config.model.seq_length
    batches: list[GlobalBatch] = []
    sample = 0
    for count in num_microbatches:
        batch = []
        for _ in range(count * dp):
            tokens = random.integers(0, vocab if eod is None else max(vocab - 1, 1), (micro, seq + 1))
            if data.sft:  # conversations; up to half of a sequence is padding
                is_real = np.arange(seq + 1) < random.integers((seq + 1) // 2, seq + 2, (micro, 1))
                chats = np.where(is_real, np.cumsum(random.random(tokens.shape) < EOD_SHARE, axis=1), PADDING)
                is_trained = is_real & (random.random(tokens.shape) < TRAINED_SHARE)
                tokens = np.stack([tokens, is_trained, chats], axis=1)
            elif eod is not None:
                tokens[random.random(tokens.shape) < EOD_SHARE] = eod
            batch.append(Batch.of(tokens, tuple(range(sample, sample + micro)), rules))
            sample += micro
        batches.append(batch)
    return batches


def share_of(runtime: TrainingRuntime, batch: GlobalBatch, step: int) -> Microbatches:
    """Return this rank's microbatches of a global batch, with the dropout keys of training."""
    dp, dp_rank = runtime.plan.topology.dp, runtime.coordinates.dp_rank
    return runtime.microbatches(len(batch) // dp, lambda k: batch[k * dp + dp_rank], step)


@dataclass(frozen=True)
class OracleStep:
    """One step of the oracle: its loss before the update, and whole tensors by name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]  # averaged over the global batch, before clipping
    weights: dict[str, Tensor]  # after the update, with the tensors of model_states
    ahead: tuple[float, ...] = ()  # losses of the modules of multi-token prediction
    choices: Tensor | None = None  # of experts, as `routing.PlainChoices` takes them; None without experts


class Oracle:
    """The reference model in fp64 with the configuration's optimizer.

    config: its grid matters only for the dropout masks. dp: ranks that run microbatches at once, which matters only for
    losses over all of these. weights: whole tensors by name, with vocabulary padding.
    """

    def __init__(
        self, config: ResolvedConfig, weights: Mapping[str, Tensor], device: torch.device | str = "cpu", dp: int = 1
    ) -> None:
        self._config, self._device, self._dp = config, torch.device(device), dp
        self.model = ReferenceGPT(reference_config(config)).to(self._device, torch.float64)
        self.model.load_state_dict({name: weight.double() for name, weight in weights.items()})
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = not any(fnmatchcase(name, pattern) for pattern in config.optimizer.freeze)
        optimizer = config.optimizer
        self._optimizer = build_optimizer(
            self.model,
            OPTIMIZER_NAMES.get(optimizer.optimizer, "muon"),
            weight_decay=1.0,  # marks the groups that decay; `step` sets their real weight decay
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            momentum=optimizer.sgd_momentum,
            update=registered_update(optimizer),
            muon=muon_options(optimizer),
        )
        self._choices = PlainChoices(self.model) if config.model.num_experts is not None else None
        self._decaying = [group for group in self._optimizer.param_groups if group["weight_decay"]]

    def step(self, batch: GlobalBatch, step: int, rates: Rates, drains: bool = True) -> OracleStep:
        """Run one step. step: the number that the grid's dropout keys carry.

        drains: the pipeline drains after the step, which matters only for asynchronous schedules.
        """
        for group in self._decaying:
            group["weight_decay"] = rates.weight_decay
        microbatches = []
        for number, part in enumerate(batch):
            key = DropoutKey(self._config.training.seed, step, number)
            microbatch = to_microbatch(part, self._device, key)
            mask = microbatch.loss_mask
            arguments: Microbatch = {
                "tokens": microbatch.tokens,
                "labels": microbatch.labels,
                "loss_mask": torch.ones_like(microbatch.tokens) if mask is None else mask,
                "position_ids": microbatch.position_ids,
                "document_ids": microbatch.document_ids,
                "dropout_masks": GridMasks(self._config, key, self._device),
                "padding": None if part.padding is None else torch.from_numpy(part.padding).to(self._device),
            }
            microbatches.append(arguments)
        result = self._train(microbatches, rates, drains)
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        states = {name: state.double() for name, state in self.model.states().items()}
        gradients = {name: result.grads.get(name, torch.zeros_like(weight)) for name, weight in weights.items()}
        choices = None if self._choices is None else self._choices.take()
        return OracleStep(result.loss, result.grad_norm, gradients, weights | states, result.ahead, choices)

    def _train(self, microbatches: Sequence[Microbatch], rates: Rates, drains: bool) -> StepResult:
        return reference_step(
            self.model,
            self._optimizer,
            microbatches,
            per_token_loss=self._config.training.calculate_per_token_loss,
            clip_grad=self._config.optimizer.clip_grad,
            lr=rates.lr,
            decoupled_lr=rates.decoupled_lr,
            data_parallel=self._dp,
        )


class StreamOracle(Oracle):
    """An asynchronous schedule whose pipeline drains only after the steps that say so.

    rule: None for that of the plan's schedule. Raises
    ValueError if stages that update apart share a weight.
    """

    def __init__(
        self,
        plan: RunPlan,
        weights: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        rule: StreamRule | None = None,
    ) -> None:
        super().__init__(plan.config, weights, device, plan.topology.dp)
        rule, error_feedback = rule or stream_rule(plan), plan.config.optimizer.delay_error_feedback
        optimizer = ErrorFeedback(self._optimizer, error_feedback) if error_feedback else self._optimizer
        per_token_loss, clip_grad = plan.config.training.calculate_per_token_loss, plan.config.optimizer.clip_grad
        stages, clips_late = parameter_stages(plan, rule), bool(plan.config.optimizer.clip_grad_delay)
        self._stream = StreamTraining(
            self.model, optimizer, rule, stages, per_token_loss, clip_grad, plan.topology.dp, clips_late
        )

    def _train(self, microbatches: Sequence[Microbatch], rates: Rates, drains: bool) -> StepResult:
        return self._stream.step(microbatches, rates.lr, rates.decoupled_lr, drains)


def stream_rule(plan: RunPlan) -> StreamRule:
    """Return the rule of the plan's schedule. Raises ValueError if the schedule is not asynchronous."""
    num_stages = plan.placement.num_stages
    rules: dict[str, Callable[[], StreamRule]] = {
        "pipedream": partial(StreamRule.pipedream, num_stages),
        "pipedream-vertical-sync": partial(StreamRule.pipedream, num_stages, vertical_sync=True),
        "pipedream-2bw": StreamRule.pipedream_2bw,
        "paci": partial(StreamRule.paci, num_stages),
    }
    if plan.schedule_name not in rules:
        raise ValueError(f"no rule for the schedule {plan.schedule_name!r}; known are {', '.join(rules)}")
    return rules[plan.schedule_name]()


def parameter_stages(plan: RunPlan, rule: StreamRule) -> dict[str, int]:
    """Return the stage of each parameter, the last one of several.

    Raises ValueError if several stages hold a parameter that each updates by itself.
    """
    found: dict[str, int] = {}
    for stage, specs in enumerate(plan.stage_specs):
        for spec in specs:
            if rule.clips_each_stage and spec.name in found:
                raise ValueError(f"stages {found[spec.name]} and {stage} both hold {spec.name}, and update it apart")
            found[spec.name] = stage
    return found


def reference_config(config: ResolvedConfig) -> ReferenceConfig:
    """Return the reference model's configuration."""
    # every option of a resolved model section has a field of the same name there, or no effect on the result
    names = {field.name for field in dataclasses.fields(ReferenceConfig)}
    sections: list[dict[str, Any]] = []
    for section in (config.model, *layer_configs(config.model)):
        # norm, activation and attention may be those of extensions
        norm, activation = NORMALIZATIONS[section.normalization], ACTIVATIONS[section.activation]
        heads = AttentionHeads(section.softmax_scale, range(section.num_attention_heads), section.num_attention_heads)
        functions = {
            "norm_function": norm.function,
            "norm_has_bias": norm.has_bias,
            "activation_function": activation.function,
            "activation_is_gated": activation.is_gated,
            "attention_function": ATTENTIONS[section.attention_kind].function,
            "attention_heads": heads,
            **(mixer_of(section) if isinstance(section, LayerConfig) else {}),
        }
        if ATTENTIONS[section.attention_kind].mixer is not None:  # a name that the reference does not know
            functions["attention_kind"] = "softmax"
        sections.append({name: value for name, value in vars(section).items() if name in names} | functions)
    model, *layers = sections
    training = {name: getattr(config.training, name) for name in FROM_TRAINING}
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    # a rank's capacity, and what sinkhorn balances, is that of its tp slice of its part of the sequence
    parts = (SequencePart(rank, cp).positions(config.model.seq_length) for rank in range(cp))
    slices: tuple[tuple[int, ...], ...] = ()
    if config.model.moe_expert_capacity_factor is not None or config.model.has_sinkhorn:
        slices = tuple(tuple(held.tolist()) for part in parts for held in np.split(part, tp))
    return ReferenceConfig(**model, **training, moe_capacity_slices=slices, layers=tuple(layers))


def mixer_of(layer: LayerConfig) -> dict[str, Any]:
    """Return the token mixer of a layer, if it has one, as the reference takes it."""
    if layer.mixer is None:
        return {"mixer": None}
    arguments = layer.hidden_size, layer.add_bias_linear, layer.mixer_options
    linears = layer.mixer_kind.module.declare(layer).linears.items()
    parts = {name: getattr(weight.slicing, "parts", 1) for name, weight in linears}
    return {"mixer": partial(layer.mixer_kind.reference, *arguments), "mixer_matrices": parts}


def muon_options(optimizer: OptimizerConfig) -> MuonOptions:
    """Return the options of Muon, or of an extension's rule over matrices, as the reference's optimizer takes them."""
    kind, options = OPTIMIZERS[optimizer.optimizer], rule_options(optimizer)
    given = kind.direction

    def direction(matrix: Tensor, number: int, lr: float, decay: float) -> Tensor:
        assert given is not None
        return given(matrix, UpdateStep(number, lr, decay, options))

    return MuonOptions(
        direction=None if given is None else direction,
        momentum=options.get("momentum", optimizer.muon_momentum),
        nesterov=optimizer.muon_nesterov and given is None,
        coefficient_type=optimizer.muon_coefficient_type,
        num_steps=optimizer.muon_num_ns_steps,
        scale_mode=optimizer.muon_scale_mode,
        extra_scale_factor=optimizer.muon_extra_scale_factor,
        splits_qkv=not optimizer.muon_no_split_qkv,
    )


def registered_update(optimizer: OptimizerConfig) -> Callable[..., None] | None:
    """Return the rule of an extension as the reference's optimizer calls it; None for a rule of megapipe."""
    kind, options = OPTIMIZERS[optimizer.optimizer], rule_options(optimizer)
    if kind.update is None:
        return None
    update = kind.update

    def apply(
        weights: Tensor, gradient: Tensor, states: dict[str, Tensor], number: int, lr: float, decay: float
    ) -> None:
        if not states:
            states.update({name: torch.zeros_like(weights) for name in kind.states})
        update(weights, gradient, states, UpdateStep(number, lr, decay, options))

    return apply


@dataclass(frozen=True)
class GridMasks:
    """The reference's `DropoutMasks`: whole masks in fp64, concatenated from the slices that a grid's tp ranks draw.

    The mask of attention probabilities is cut by heads; that of hidden states by the sequence under sequence
    parallelism, else all tp ranks share one stream. The grid draws hidden states as [s, b, h], not [b, s, h]. With
    context parallelism each part of the sequence has streams of its own, of attention each pair of parts of a ring.
    """

    config: ResolvedConfig
    key: DropoutKey
    device: torch.device | str = "cpu"

    def __call__(self, layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
        """Return the mask divided by 1 - p. shape: [b, heads, s, s] for attention_probs, else [b, s, h]."""
        model, parallel = self.config.model, self.config.parallel
        if site == "attention_probs":
            return self._probs(layer, shape).double() / (1.0 - model.attention_dropout)
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        rate, (batch, seq, hidden) = model.hidden_dropout, shape
        mask = torch.empty(seq, batch, hidden, dtype=torch.bool, device=self.device)
        for part in (SequencePart(rank, cp) for rank in range(cp)):
            key = dataclasses.replace(self.key, part=part)
            ranks = range(tp) if parallel.sequence_parallel else (None,)
            local = seq // cp // len(ranks), batch, hidden
            slices = [keyed_mask(local, rate, key, layer, site, rank, self.device) for rank in ranks]
            mask[part.positions(seq)] = torch.cat(slices)
        return mask.transpose(0, 1).double() / (1.0 - rate)

    def _probs(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        """Return the mask of probabilities, [b, heads, s, s]."""
        parallel, rate, (batch, heads, seq, _) = self.config.parallel, self.config.model.attention_dropout, shape
        kinds, cp = parallel.cp_comm_type, parallel.context_parallel_size
        kind = kinds[min(layer, len(kinds) - 1)]  # the modules of multi-token prediction have the last one
        exchanged = {"a2a": cp, "a2a+p2p": (parallel.hierarchical_context_parallel_sizes or (1,))[0]}.get(kind, 1)
        head_ranks, ring = parallel.tensor_model_parallel_size * exchanged, cp // exchanged
        mask = torch.empty(shape, dtype=torch.bool, device=self.device)
        parts = [SequencePart(rank, ring) for rank in range(ring)]
        local = batch, heads // head_ranks, seq // ring, seq // ring
        for rank in range(head_ranks):
            held = mask[:, rank * local[1] : (rank + 1) * local[1]]
            for queries, keys in itertools.product(parts, parts):
                key = dataclasses.replace(self.key, part=queries, keys_of=keys.rank if ring > 1 else None)
                drawn = keyed_mask(local, rate, key, layer, "attention_probs", rank, self.device)
                rows = torch.from_numpy(queries.positions(seq))[:, None]
                held[:, :, rows, torch.from_numpy(keys.positions(seq))] = drawn
        return mask

"""Shared by the tests of model/: small configurations, stages filled from global tensors, and the reference model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.verify.conversion import replace_parameter
from megapipe.gpu.kernels import TORCH, Kernels
from megapipe.model.microbatch import Microbatch
from megapipe.model.stage import GPTStage
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.random import DropoutKey, keyed_mask
from megapipe.trace.parameters import model_parameters
from tests import tiny
from tests.extras.reference.tiny import draw_weights
from tests.tables import options, rows

SEQ, BATCH = 12, 2

GPT2 = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA = GPT2 | tiny.LLAMA
NOPE = tiny.NOPE
# three layers that share few options; norms around each branch and over the whole projections, a scaled embedding
UNLIKE = LLAMA | {
    "norm_position": "around",
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
    "embedding_scale": 4.9,
    "layer_pattern": (
        "1 window_size=4 rotary_base=50 num_query_groups=1",
        "1 attention=none ffn_hidden_size=8 norm_position=after",
        "1 mlp=none position_embedding_type=none attn_logit_softcapping=2",
        "...",
    ),
}
SCALING = {"rotary_base": 300.0, "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 8}


SETS: dict[str, dict[str, Any]] = {"GPT2": GPT2, "LLAMA": LLAMA, "NOPE": NOPE, "SCALING": SCALING}


def options_of(kind: str, sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of the models of a kind by name, as options.tsv has them."""
    table = rows(Path(__file__).with_name("options.tsv"))
    return {name: options(words, sets) for row, name, words in table if row == kind}


def model_config(**changes: Any) -> ResolvedModelConfig:
    """Build a model of two small layers with a padded vocabulary and a position table longer than the sequence."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 24,
        "ffn_hidden_size": 20,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 10,
        "seq_length": SEQ,
        "max_position_embeddings": SEQ + 2,
        "vocab_size": 29,
        "padded_vocab_size": 32,
    }
    sizes |= changes
    return ResolvedModelConfig(**({"softmax_scale": sizes["kv_channels"] ** -0.5} | sizes))


def reference(
    config: ResolvedModelConfig,
    seed: int = 3,
    dtype: torch.dtype = torch.float64,
    loss: TrainingConfig | None = None,
    layers: Sequence[Mapping[str, Any]] | None = None,
) -> ReferenceGPT:
    """Build the reference model with every parameter drawn at random, including norms and biases.

    layers: what each layer has in place of the model's options; by default as the configuration says.
    """
    fields = {field.name for field in dataclasses.fields(ReferenceConfig)}
    values, *configured = (
        {name: value for name, value in dataclasses.asdict(section).items() if name in fields}
        for section in (config, *layer_configs(config))
    )
    values["layers"] = tuple(configured if layers is None else layers)
    if loss is not None:
        values |= {"label_smoothing": loss.label_smoothing, "z_loss": loss.z_loss}
    model = ReferenceGPT(ReferenceConfig(**values)).to(dtype)
    draw_weights(model, seed)
    return model


def local_slice(spec: ParamSpec, whole: Tensor, tp_rank: int, tp: int) -> Tensor:
    """Return the rows (or columns) that ParamSpec assigns to this tp rank."""
    dim = spec.slicing.dim or 0
    return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)


def make_stage(
    config: ResolvedModelConfig,
    weights: dict[str, Tensor],
    *,
    layers: StageLayers | None = None,
    tp: Group | None = None,
    sequence_parallel: bool = False,
    recompute: RecomputeConfig | tuple[RecomputeConfig, ...] | None = None,
    loss: TrainingConfig | None = None,
    queue: WeightQueue | None = None,
    kernels: Kernels = TORCH,
) -> GPTStage:
    """Build a stage (by default the whole model) whose parameters are slices of `weights`, global tensors by name."""
    tp = tp or Group.alone("tp")
    stage = GPTStage(
        config,
        layers or StageLayers(0, config.num_layers, True, True),
        tp,
        sequence_parallel=sequence_parallel,
        recompute=RecomputeConfig() if recompute is None else recompute,
        loss=loss or TrainingConfig(),
        weight_queue=queue,
        kernels=kernels,
    )
    specs = {spec.name: spec for spec in model_parameters(config, sequence_parallel)}
    for name, parameter in list(stage.named_parameters()):
        local = local_slice(specs[name], weights[name].detach(), tp.rank, tp.size)
        assert local.shape == parameter.shape, (name, local.shape, parameter.shape)
        replace_parameter(stage, parameter, torch.nn.Parameter(local.clone()))
    return stage


def make_microbatch(
    config: ResolvedModelConfig, *, documents: bool = False, dropout_key: DropoutKey | None = None, seed: int = 5
) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (BATCH, SEQ + 1), generator=generator)
    loss_mask = (torch.rand(BATCH, SEQ, generator=generator) > 0.2).float()
    position_ids = document_ids = None
    if documents:
        starts = torch.zeros(BATCH, SEQ, dtype=torch.long)
        starts[0, 5] = starts[1, 2] = starts[1, 9] = 1
        document_ids = starts.cumsum(1)
        index = torch.arange(SEQ).expand(BATCH, SEQ)
        position_ids = index - torch.cummax(index * starts, 1).values
    found = Microbatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), loss_mask, position_ids, document_ids, dropout_key
    )
    return with_ahead(found, config.mtp_num_layers or 0)


def with_ahead(microbatch: Microbatch, num_ahead: int) -> Microbatch:
    """Return a microbatch without documents with what so many modules of multi-token prediction take in."""

    def shifted(each: Tensor, count: int) -> Tensor:
        return torch.cat((each[:, count:], torch.zeros_like(each[:, :count])), dim=1)

    mask = torch.ones(microbatch.tokens.shape) if microbatch.loss_mask is None else microbatch.loss_mask
    assert microbatch.labels is not None
    parts = microbatch.tokens, microbatch.labels, mask
    modules = range(1, num_ahead + 1)
    return replace(microbatch, ahead=tuple(Microbatch(*(shifted(each, n) for each in parts)) for n in modules))


@dataclass(frozen=True)
class Expected:
    loss_sum: Tensor
    num_tokens: Tensor
    grads: dict[str, Tensor]


def reference_run(
    model: ReferenceGPT, microbatch: Microbatch, tp: int = 1, sequence_parallel: bool = False
) -> Expected:
    """Return loss and gradients of the reference with the dropout masks that a grid of this tp size draws."""
    model.zero_grad()
    masks = None
    if microbatch.dropout_key is not None:
        masks = GridMasks(model.config, microbatch.dropout_key, tp, sequence_parallel and tp > 1)
    m = microbatch
    loss_sum, num_tokens = model(m.tokens, m.labels, m.loss_mask, m.position_ids, m.document_ids, masks)
    loss_sum.backward()
    return Expected(loss_sum.detach(), num_tokens, {name: p.grad for name, p in model.named_parameters()})


@dataclass(frozen=True)
class GridMasks:
    """Dropout masks for the reference, assembled from the slices that the tp ranks of a grid draw."""

    config: ReferenceConfig
    key: DropoutKey
    tp: int
    sequence_parallel: bool

    def __call__(self, layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
        if site == "attention_probs":
            rate, (batch, heads, *square) = self.config.attention_dropout, shape
            local = (batch, heads // self.tp, *square)
            kept = torch.cat([keyed_mask(local, rate, self.key, layer, site, rank) for rank in range(self.tp)], dim=1)
            return kept.double() / (1 - rate)
        rate, (batch, seq, hidden) = self.config.hidden_dropout, shape
        if self.sequence_parallel:
            local = (seq // self.tp, batch, hidden)
            kept = torch.cat([keyed_mask(local, rate, self.key, layer, site, rank) for rank in range(self.tp)])
        else:
            kept = keyed_mask((seq, batch, hidden), rate, self.key, layer, site)
        return kept.transpose(0, 1).double() / (1 - rate)


def assert_equal(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-10) -> None:
    """Assert max|a - b| <= tolerance max|b|, or 1e-13 if that is larger.

    The second bound is for gradients that are mathematically zero (a key norm's bias).
    """
    difference, size = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= max(tolerance * size, 1e-13), f"{name}: differs by {difference} of {size}"


def assert_gradients(
    stage: GPTStage, config: ModelConfig, expected: Expected, rank: int, world_size: int, sequence_parallel: bool
) -> int:
    """Assert that this rank's gradient slices, with partial ones summed, equal the reference's; return their number."""
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    specs = {spec.name: spec for spec in model_parameters(config, sequence_parallel)}
    assert grads.keys() == specs.keys()
    for name, grad in grads.items():
        spec, parts = (
            specs[name],
            [],
        )  # every rank's gradient, so that replicas can be summed where their rows are declared partial
        for source in range(world_size):
            part = (
                grad.clone() if source == rank else torch.empty(spec.local_shape(source, world_size), dtype=grad.dtype)
            )
            dist.broadcast(part, source)
            parts.append(part)
        for interval, mine in zip(spec.intervals(rank, world_size), split(spec, grad, rank, world_size), strict=True):
            total = mine.clone()
            if len(interval.replicas) > 1 and spec.needs_replica_sum(interval):
                total = sum(rows_of(spec, parts[r], interval, r, world_size) for r in interval.replicas)
            dim = spec.slicing.dim or 0
            assert_equal(
                total,
                expected.grads[name].narrow(dim, interval.start, interval.stop - interval.start),
                f"{name} {interval}",
            )
    return len(grads)


def split(spec: Any, local: torch.Tensor, tp_rank: int, tp: int) -> list[torch.Tensor]:
    return list(local.split([i.stop - i.start for i in spec.intervals(tp_rank, tp)], dim=spec.slicing.dim or 0))


def rows_of(spec: Any, local: torch.Tensor, interval: Any, tp_rank: int, tp: int) -> torch.Tensor:
    """Return the same global rows from another rank's local tensor."""
    (part,) = (
        p
        for i, p in zip(spec.intervals(tp_rank, tp), split(spec, local, tp_rank, tp), strict=True)
        if (i.start, i.stop) == (interval.start, interval.stop)
    )
    return part

"""Megatron-LM's memory estimate (its report of theoretical memory footprints), for comparison with `plan.memory`.

Its conventions:
- 18 bytes per parameter (bf16 weight, fp32 gradient, fp32 master and two moments), 6 + 12 / dp with the distributed
  optimizer
- only the first pipeline rank, with 1 / pp of the layers and one embedding
- activations by table 2 of Korthikanti et al. 2022 (arXiv:2205.05198): s b h 34 / t per layer (for an ffn of 4h) under
  sequence parallelism and selective recompute, else s b h (10 + 24 / t) plus 5 %

It ignores the cut of the layers, grouped or gated activations, full recompute, schedules other than 1F1B and
interleaving, messages, the head's activations in a pipeline, and padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import ACTIVATIONS
from megapipe.plan.run_plan import RunPlan

BYTES_OF_A_PARAMETER = 18.0
OVERHEAD = 1.05  # on activations without sequence parallelism


@dataclass(frozen=True)
class MegatronMemory:
    """The estimate for the first pipeline rank. parameters: the number that it holds."""

    parameters: float
    state_bytes: float
    activation_bytes: float

    @property
    def total(self) -> float:
        return self.state_bytes + self.activation_bytes


def megatron_memory(plan: RunPlan) -> MegatronMemory:
    """Return the estimate for a plan of any schedule; chunks count as interleaving."""
    config, t = plan.config, plan.topology
    embedding = config.model.hidden_size * config.model.padded_vocab_size
    held = block_parameters(config.model) / t.pp + embedding
    if config.model.untie_embeddings_and_output_weights and t.pp == 1:
        held += embedding
    parameters = held / t.tp
    each = 6.0 + 12.0 / t.dp if config.parallel.use_distributed_optimizer else BYTES_OF_A_PARAMETER
    return MegatronMemory(parameters, parameters * each, _activation_bytes(plan))


def block_parameters(model: ResolvedModelConfig) -> float:
    """Return the parameters of all layers and the final norm, without the biases of linears."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    norm = 1 if model.normalization == "RMSNorm" else 2
    gated = 1.5 if ACTIVATIONS[model.activation].is_gated else 1.0
    queries = model.kv_channels * model.num_attention_heads
    attention = 2.0 * h * queries * (1.0 + model.num_query_groups / model.num_attention_heads)
    return model.num_layers * (2.0 * h * (gated * ffn + norm) + attention) + norm * h


def _activation_bytes(plan: RunPlan) -> float:
    config, t = plan.config, plan.topology
    model = config.model
    tokens = float(model.seq_length * config.training.micro_batch_size)
    h, vocabulary = model.hidden_size, model.padded_vocab_size
    is_short = config.parallel.sequence_parallel and config.recompute.recompute_granularity == "selective"
    layer = tokens * h * (18.0 + 4.0 * model.ffn_hidden_size / h) if is_short else tokens * h * (10.0 + 24.0 / t.tp)
    # plus token ids and the embedding's dropout of pp microbatches
    kept = model.num_layers * layer + tokens * (8.0 + h) * t.pp
    # microbatches in flight on the first rank, divided by pp
    if plan.num_chunks > 1:
        kept *= 1.0 + (t.pp - 1) / (t.pp * plan.num_chunks)
    else:
        kept *= min(1.0, plan.batch.num_microbatches / t.pp)
    if is_short:
        return (kept + (4.0 * tokens * (h + vocabulary) if t.pp == 1 else 0.0)) / t.tp
    return OVERHEAD * (kept + (2.0 * tokens * (h + vocabulary / t.tp) if t.pp == 1 else 0.0))

"""Megatron-LM's memory estimate (its report of theoretical memory footprints), for comparison with `plan.memory`.

Its conventions:
- 18 bytes per parameter (bf16 weight, fp32 gradient, fp32 master and two moments), 6 + 12 / dp with the distributed
  optimizer
- only the first pipeline rank, with 1 / pp of the layers and one embedding
- attention, MLPs and shared experts are cut over tp, experts over ep and etp; norms, routers and gates are whole; a
  parameter of experts has edp in place of dp
- activations by table 2 of Korthikanti et al. 2022 (arXiv:2205.05198): s b h 34 / t per layer (for an ffn of 4h) under
  sequence parallelism and selective recompute, else s b h (10 + 24 / t) plus 5 %

It ignores the cut of the layers, grouped or gated activations, full recompute, schedules other than 1F1B and
interleaving, messages, the head's activations in a pipeline, padding, biases of linears, norms of heads, and the
activations of experts: a layer counts as one with an MLP of --ffn-hidden-size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.model import model_parameters
from megapipe.plan.run_plan import RunPlan

BYTES_OF_A_PARAMETER = 18.0
WHOLE = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "router")  # modules on every rank of tp
NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")
TABLES = ("word_embeddings", "position_embeddings", "output_layer")
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
    block, embedding = block_parameters(config.model), config.model.hidden_size * config.model.padded_vocab_size
    if config.model.untie_embeddings_and_output_weights and t.pp == 1:
        embedding *= 2
    dense = (block["sharded"] / t.pp + embedding) / t.tp + block["replicated"] / t.pp
    experts = block["experts"] / t.pp / (t.ep * t.etp)

    def of_each(copies: int) -> float:
        return 6.0 + 12.0 / copies if config.parallel.use_distributed_optimizer else BYTES_OF_A_PARAMETER

    state = dense * of_each(t.dp) + experts * of_each(t.edp)
    return MegatronMemory(dense + experts, state, _activation_bytes(plan))


def block_parameters(model: ResolvedModelConfig) -> Counter[str]:
    """Return the parameters of all layers and the final norm, as Megatron counts them, by how ranks hold them.

    'sharded': over tp; 'experts': over ep and etp; 'replicated'.
    """
    counts = Counter[str]()
    for spec in model_parameters(model, sequence_parallel=False):
        module, _, name = spec.name.rpartition(".")
        is_whole = module.endswith(WHOLE) or name == "gate_weight"
        is_of_heads = module.endswith(NORMS_OF_HEADS) and not model.multi_latent_attention
        is_bias = name.startswith("bias") and not is_whole
        if not is_bias and not is_of_heads and name != "softmax_offset" and not module.endswith(TABLES):
            counts["experts" if spec.is_expert else "replicated" if is_whole else "sharded"] += spec.num_elements
    return counts


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

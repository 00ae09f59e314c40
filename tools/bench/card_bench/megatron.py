"""Megatron-Core's Llama with its local kernels and torch's attention, in the plain loop of the other peers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from bench_megatron import gpt_model, initialize, redirect_cuda
from bench_processes import free_port
from torch import Tensor

from card_bench.contenders import Peer, dtype_of
from megapipe.config.config import ResolvedModelConfig
from megapipe.plan.run_plan import RunPlan


def megatron_llama(plan: RunPlan, device: torch.device, weights: Mapping[str, Tensor]) -> Peer:
    """Return Megatron-Core's GPTModel with the weights of transformers' names.

    Its own optimizer and buffers are left out: fused AdamW without masters, as for the other peers. It makes a process
    group of one rank, which stays.
    """
    shape, dtype = plan.config.model, dtype_of(plan)
    if device.type == "cpu":
        redirect_cuda()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        initialize("nccl" if device.type == "cuda" else "gloo", 0, 1, free_port())
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    sizes = {name: getattr(shape, name) for name in same} | {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "add_bias_linear": False,
        "bf16": dtype is torch.bfloat16,
    }
    model = gpt_model(
        sizes, dtype, shape.vocab_size, shape.seq_length, tuned=True, tied=False, position_embedding_type="rope"
    )
    missing = model.load_state_dict(megatron_weights(shape, weights), strict=False).missing_keys
    if lost := [name for name in missing if not name.endswith("_extra_state")]:
        raise RuntimeError(f"Megatron-Core's model has other tensors than expected: {', '.join(lost)}")
    model = model.to(device, dtype)
    positions = torch.arange(shape.seq_length, device=device).expand(plan.config.training.micro_batch_size, -1)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(tokens, positions, None, labels=labels).mean()

    return Peer(plan, device, model, loss)


def megatron_weights(shape: ResolvedModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights. Megatron has q, k and v of each group in turn, and gate and up as one matrix."""
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for number in range(shape.num_layers):
        own, theirs = f"model.layers.{number}.", f"decoder.layers.{number}."
        parts = [
            weights[f"{own}self_attn.{name}_proj.weight"].unflatten(0, (shape.num_query_groups, -1)) for name in "qkv"
        ]
        found[f"{theirs}self_attention.linear_qkv.weight"] = torch.cat(parts, 1).flatten(0, 1)
        found[f"{theirs}self_attention.linear_proj.weight"] = weights[f"{own}self_attn.o_proj.weight"]
        gate_and_up = [weights[f"{own}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found[f"{theirs}mlp.linear_fc1.weight"] = torch.cat(gate_and_up)
        found[f"{theirs}mlp.linear_fc2.weight"] = weights[f"{own}mlp.down_proj.weight"]
        found[f"{theirs}input_layernorm.weight"] = weights[f"{own}input_layernorm.weight"]
        found[f"{theirs}pre_mlp_layernorm.weight"] = weights[f"{own}post_attention_layernorm.weight"]
    return found

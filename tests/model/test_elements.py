"""A layer's list of elements and its table in `layers` have the same steps, in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from megapipe.model.moe import MoE
from megapipe.model.segments import Again, Element, Operator
from tests.tiny import LLAMA, tiny_config
from tests.train.grids import runtime_of

LATENT = LLAMA | {"multi_latent_attention": True, "kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4}
LATENT |= {"v_head_dim": 6, "kv_channels": None, "num_query_groups": None}
EXPERTS = LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
UP = {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "layernorm")}
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {},
    "norms around, of q and k": LLAMA | {"norm_position": "around", "qk_layernorm": True},
    "recomputed": LLAMA | RECOMPUTE,
    "latent attention": LATENT | {"q_lora_rank": 4, "qk_layernorm": True},
    "latent attention, queries without latents": LATENT,
    "latent attention, recomputed": LATENT | {"q_lora_rank": 4, "qk_layernorm": True} | UP,
    "latent attention, core recomputed too": LATENT | UP | {"recompute_modules": ("mla_up_proj", "core_attn")},
    "experts": EXPERTS,
    "shared experts": EXPERTS | {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
}
# elements that keep and multiply nothing, or are counted with the linear after them: no operation of a table
UNCOUNTED = {"heads", "add", "latent", "q_layernorm", "kv_layernorm", "copies", "rows", "results", "sums", "output"}
# operations that stand for what a branch keeps as a whole: no element
OF_BRANCHES = {"residual sum", "residual stream"}


def names(elements: Iterable[Element], experts: Any) -> Iterator[str]:
    for element in elements:
        if isinstance(element, Again):
            yield from names(element.elements, experts)
        elif element.name == "shared_experts":
            yield from names(experts.shared_experts.inner, experts)
            yield from () if experts.shared_experts.gate_weight is None else ("shared_gate",)
        else:
            yield element.name


@pytest.mark.parametrize("name", CASES)
def test_elements_are_the_operations_of_the_table(name: str) -> None:
    runtime = runtime_of(tiny_config(**CASES[name]), 0, 1)
    (stage,) = runtime.stages.values()
    block: Any = stage.decoder.layers["0"]
    found = list(names(block.elements, block.mlp))
    parts = runtime.plan.model.layers[0].parts
    planned = [each.name for part in parts for each in part.table(runtime.plan.shape).operations]
    planned = [each for each in planned if each not in OF_BRANCHES]
    assert [each for each in found if each not in UNCOUNTED - set(planned)] == planned
    if isinstance(block.mlp, MoE):  # products and exchanges are never inside a graph
        kinds = {element.name: type(element) for element in block.elements}
        assert all(kinds[each] is Operator for each in ("router", "dispatch", "expert_fc1", "expert_fc2", "combine"))

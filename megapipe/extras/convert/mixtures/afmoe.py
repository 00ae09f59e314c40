"""Trinity (AfmoeForCausalLM): gated attention, rotary positions in layers with a window alone, norms around branches,
sigmoid scores with biases, shared experts.
"""

from __future__ import annotations

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NORMS_AFTER, llama_relative
from megapipe.extras.convert.layer_types import every, windows_with_rope
from megapipe.extras.convert.tables import Rule, always, fixed, rows_of, unwritten

MUP, PERIOD = "mup_enabled", "global_attn_every_n_layers"
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_mlp_layernorm"}
NORMS |= NORMS_AFTER | {"post_mlp_layernorm": "post_mlp_layernorm"}
ONE_GROUP = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")

FAMILY = llama_relative(
    "AfmoeForCausalLM",
    always(attention_output_gate=True, norm_position="around"),
    windows_with_rope(lambda settings, count: every(settings.get(PERIOD) or 4)(count), 1024, PERIOD),
    Rule(
        (MUP,),
        lambda settings: {"embedding_scale": settings["hidden_size"] ** 0.5 if settings.get(MUP) else 1.0},
        lambda layers: {MUP: layers[0].embedding_scale != 1.0},
    ),
    experts.SIGMOID,
    unwritten(experts.normalized(True)),
    experts.scaling(name="route_scale"),
    experts.shared_experts(2, name="num_shared_experts"),
    experts.dense_layers(1, "num_dense_layers"),
    unwritten(fixed("route_norm", True, "weights of the chosen experts are divided by their sum in this architecture")),
    unwritten(fixed("score_func", "sigmoid", "scores of this architecture are sigmoids")),
    *(unwritten(fixed(name, 1, "this architecture has one group of experts")) for name in ONE_GROUP),
    Rule(("load_balance_coeff", "use_grouped_mm"), lambda settings: {}, lambda layers: {}),  # of training, and kernels
    norms=NORMS,
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 6),
    more_rows=(
        *rows_of("afmoe"),
        *experts.expert_rows(router="router.gate", shared="shared_experts", bias="expert_bias"),
    ),
)

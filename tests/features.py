"""The features of a run that can be combined, with the flags of each: the rows and columns of docs/composition.md.

`RECIPES` are combinations of them that published runs use.
"""

from __future__ import annotations

from dataclasses import dataclass

EXACT, ROUNDED, ON_GPU, LIBRARY = "exact", "rounded", "on a GPU", "with a library"


@dataclass(frozen=True)
class Feature:
    """A feature of a run.

    needs: how a run without a GPU compares it. EXACT: in fp64. ROUNDED: only in low precision, or beside a process in
    low precision. ON_GPU: not at all, only its memory is counted. LIBRARY: neither, the library is not installed.
    """

    name: str
    flags: str
    needs: str = EXACT


@dataclass(frozen=True)
class Recipe:
    """A published combination, on a tiny model.

    flags: those of the recipe that are no feature. run: what it stands for. lacks: what of it does not exist yet, and
    is left out here.
    """

    name: str
    features: tuple[str, ...]
    flags: str
    run: str
    lacks: str = ""


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
ZERO1 = "--use-distributed-optimizer"
ZERO3 = f"{ZERO1} --data-parallel-sharding-strategy optim_grads_params"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 64 --moe-router-topk 2"
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
FEATURES = (
    Feature("tp2+sp", TP2),
    Feature("pp2 1f1b", PP2),
    Feature("vpp2", f"{PP2} --num-layers-per-virtual-pipeline-stage 2"),
    Feature("zb-v", f"{PP2} --pipeline-schedule zb-v"),
    Feature("zb-h1", f"{PP2} --pipeline-schedule zb-h1"),
    Feature("dualpipe-v", f"{PP2} --pipeline-schedule dualpipe-v"),
    Feature("slices2", f"{PP2} --pipe-sp-splits 2"),
    Feature("cp2 p2p", f"{CP2} --cp-comm-type p2p"),
    Feature("cp2 a2a", f"{CP2} --cp-comm-type a2a"),
    Feature("cp2 ag", f"{CP2} --cp-comm-type all_gather"),
    Feature("zero1", ZERO1),
    Feature("zero2", f"{ZERO1} --data-parallel-sharding-strategy optim_grads"),
    Feature("zero3", ZERO3),
    Feature("hsdp", f"{ZERO3} --num-distributed-optimizer-instances 2"),
    Feature("moe ep2", EXPERTS),
    Feature("moe grouped", f"{EXPERTS} --moe-grouped-gemm"),
    Feature(
        "mla", "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
    ),
    Feature("mtp", "--mtp-num-layers 1"),
    Feature("fp8 local", "--fp8-format hybrid", ROUNDED),
    Feature("fp8 te", "--fp8-format hybrid --transformer-impl transformer_engine", LIBRARY),
    Feature("te bf16", "--transformer-impl transformer_engine", LIBRARY),
    Feature("flash", "--attention-impl flash", LIBRARY),
    Feature("compile blocks", "--compile-blocks on", ON_GPU),
    Feature("cuda graphs", "--cuda-graph-impl local", ON_GPU),
    Feature("act offload", "--cpu-offloading-num-layers 1"),
    Feature("opt offload", "--optimizer-cpu-offload", ROUNDED),
    Feature("recompute sel", "--recompute-granularity selective"),
    Feature("recompute full", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Feature("recompute budget", "--recompute-memory-budget 0.5"),
    Feature("muon", "--optimizer muon --muon-tp-mode duplicated"),
    Feature("precision-aware", f"{ZERO1} {NARROW}", ROUNDED),
    Feature("documents", "--reset-attention-mask --reset-position-ids"),
    Feature("tp overlap", f"{TP2} --tp-comm-overlap"),
    Feature("grad overlap", "--overlap-grad-reduce"),
    Feature("param gather overlap", f"{ZERO1} --overlap-param-gather"),
    Feature("window", "--window-size 16"),
    Feature("sinks", "--softmax-type learnable"),
    Feature("chunked loss", "--cross-entropy-chunk-size 64"),
    Feature("moe overlap", f"{PP2} --pipeline-schedule dualpipe-v {EXPERTS} --overlap-moe-expert-parallel-comm"),
    Feature("layer pattern", "--window-size 16 --window-attn-skip-freq 2"),
    Feature("frozen", "--freeze embedding.* decoder.layers.0.* decoder.layers.5.*.weight"),
    Feature("balance auto", f"{PP2} --pipeline-balance auto"),
)

NORMED_HEADS = "--qk-layernorm --group-query-attention --num-query-groups 2"
CORRECTED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
CP_OF_TWO_LEVELS = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
RECIPES = (
    Recipe(
        "DeepSeek-V3",
        ("mla", "moe overlap", "mtp", "precision-aware", "fp8 local"),
        f"{CORRECTED} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-shared-expert-intermediate-size 64 "
        "--recompute-granularity selective --recompute-modules layernorm mla_up_proj --fp8-recipe blockwise",
        "arXiv:2412.19437",
    ),
    Recipe(
        "Megatron mixture",
        ("moe grouped", "vpp2", "cp2 p2p", "tp2+sp", "zero1", "fp8 local"),
        "--recompute-granularity selective --recompute-modules moe_act layernorm",
        "Megatron-Core's guide to mixtures of experts, 2026",
    ),
    Recipe("torchtitan mixture", ("moe grouped", "zero3", "pp2 1f1b", "compile blocks"), "", "torchtitan, Llama-4"),
    Recipe(
        "torchtitan mixture in fp8",
        ("moe grouped", "zero3", "pp2 1f1b", "compile blocks", "fp8 local"),
        "",
        "torchtitan, DeepSeek-V3",
    ),
    Recipe("torchtitan Llama-3", ("zero3", "tp2+sp", "compile blocks", "fp8 local"), "", "arXiv:2410.06511"),
    Recipe(
        "torchtitan long sequences",
        ("zero3", "tp2+sp", "compile blocks", "fp8 local", "cp2 p2p"),
        "",
        "torchtitan, Llama-3 with context parallelism",
    ),
    Recipe("Llama-3 405B", ("tp2+sp", "cp2 ag", "vpp2", "zero2", "documents"), "", "arXiv:2407.21783"),
    Recipe(
        "Llama-4",
        ("moe ep2", "zero3", "fp8 local"),
        "--attention-kind chunked --window-size 16 --window-attn-skip-freq 4 --moe-layer-freq 2 --no-rope-freq 4 "
        "--moe-shared-expert-intermediate-size 64",
        "Llama-4 Maverick",
    ),
    Recipe(
        "GPT-OSS",
        ("sinks", "layer pattern", "moe ep2", "pp2 1f1b"),
        "--activation-func-clamp-value 7 --glu-linear-offset 1 --no-bias-swiglu-fusion --rope-scaling-type yarn "
        "--rope-scaling-factor 4",
        "gpt-oss-120b",
    ),
    Recipe("Qwen3-235B", ("moe ep2", "vpp2", "tp2+sp", "zero1", "fp8 local"), NORMED_HEADS, "arXiv:2505.09388"),
    Recipe(
        "Kimi K2",
        ("mla", "moe ep2", "muon", "pp2 1f1b", "zero1", "act offload", "recompute sel"),
        CORRECTED,
        "arXiv:2507.20534",
    ),
    Recipe(
        "GLM-4.5",
        ("moe ep2", "muon", "mtp"),
        f"{CORRECTED} {NORMED_HEADS} --rotary-percent 0.5",
        "arXiv:2508.06471",
    ),
    Recipe("OLMo-3", ("hsdp", "layer pattern", "compile blocks", "cp2 a2a"), NORMED_HEADS, "OLMo-3 32B, long phase"),
    Recipe("Gemma-3 27B", ("layer pattern", "zero3", "compile blocks"), NORMED_HEADS, "arXiv:2503.19786"),
    Recipe(
        "8B with 1M tokens",
        ("recompute full", "act offload", "chunked loss", "zero3"),
        f"{CP_OF_TWO_LEVELS} --recompute-keep-attention",
        "Megatron-Core, Llama-3 8B with long sequences",
    ),
    Recipe("finetuned mixture", ("documents", "moe ep2", "zero3"), "", "packed conversations, Mixtral-like"),
    Recipe("nanochat", ("muon", "zero2", "compile blocks", "chunked loss"), "", "nanochat on one node"),
    Recipe(
        "hybrid", ("pp2 1f1b", "cp2 p2p", "moe ep2"), "", "Qwen3-Next, Nemotron-H", lacks="layers of linear attention"
    ),
)

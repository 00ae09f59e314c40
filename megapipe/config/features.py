"""The features of a run that can be combined, with the flags of each: the rows and columns of docs/composition.md."""

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
    Feature("p2p fp8", f"{PP2} --pipeline-message-dtype fp8", ROUNDED),
    Feature("post validation", f"{PP2} --pipeline-schedule zb-h1 --optimizer-post-validation {ZERO1}", ROUNDED),
    Feature("layer pattern", "--window-size 16 --window-attn-skip-freq 2"),
    Feature("balance auto", f"{PP2} --pipeline-balance auto"),
)

"""One layer with experts, one with latent attention, a ring of two ranks, Muon's step, and the optimizer's bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from card_bench.contenders import Contender, Job, transformers_model
from card_bench.jobs import EAGER_BLOCKS, LLAMA, OF_8B, QWEN_05B, STEPS, TINY, plan_of, predicted_ms
from card_bench.layers import is_installed
from card_bench.processes import LOGGED, MEGAPIPE, steps_of
from card_bench.report import Report
from card_bench.timing import copy_rate
from card_bench.turns import build, take_turns
from megapipe.extras.convert.families import choose_family
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import optimizer_bytes

# vocabularies of 4,096: one layer would disappear beside a head of the model's own
BATCH = "--micro-batch-size 1 --global-batch-size 4"
EXPERTS = (  # of Qwen/Qwen3-30B-A3B
    "--num-layers 1 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --seq-length 4096 --vocab-size 4096 --rotary-base 1000000 "
    "--untie-embeddings-and-output-weights --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
    f"--moe-router-dtype fp32 {BATCH}"
)
TINY_EXPERTS = (
    f"{TINY} --num-experts 4 --moe-router-topk 2 --qk-layernorm --untie-embeddings-and-output-weights {BATCH}"
)
LATENT = (  # of deepseek-ai/DeepSeek-V3-Base: its attention whole, with the MLP of its first layers
    "--num-layers 1 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --seq-length 4096 --vocab-size 4096 "
    f"--untie-embeddings-and-output-weights {BATCH}"
)
TINY_LATENT = (
    f"{TINY} --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-layernorm --qk-head-dim 16 "
    f"--qk-pos-emb-head-dim 16 --v-head-dim 16 --untie-embeddings-and-output-weights {BATCH}"
)
OTHER_LAYERS = (  # the first dense, as in DeepSeek-V3
    "--num-layers 2 --num-experts 8 --moe-layer-freq [0,1] --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-shared-expert-intermediate-size 64 --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
SMALL_BATCH = "--micro-batch-size 1 --global-batch-size 1"
UPDATED = f"--num-layers 4 {OF_8B} --seq-length 1024 {SMALL_BATCH}"
RING_HEADS = {"cuda": "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 8192 --vocab-size 4096"}
RING_STEPS = 3
LOSS_BOUND = {"cuda": 5e-3, "cpu": 5e-3}  # in bf16: 2^-8 an element, much less in the mean over tokens


def experts(report: Report) -> None:
    """One layer of Qwen3-30B-A3B with all experts: grouped products, a loop over experts, and transformers."""
    sizes = EXPERTS if report.on_gpu else TINY_EXPERTS
    grouped, loop = (plan_of(report, sizes, f"--{no}moe-grouped-gemm") for no in ("", "no-"))
    settings = choose_family(loop.config.model, "Qwen3MoeForCausalLM")[1]
    _compare(report, {"grouped products": grouped, "loop": loop}, settings)


def latent(report: Report) -> None:
    """One layer with DeepSeek-V3's latent attention, and transformers'."""
    sizes = LATENT if report.on_gpu else TINY_LATENT
    with_experts = plan_of(report, sizes, OTHER_LAYERS).config.model  # transformers has no model without
    settings = choose_family(with_experts, "DeepseekV3ForCausalLM")[1] | {"num_hidden_layers": 1}
    _compare(report, {"megapipe": plan_of(report, sizes)}, settings)


def _compare(report: Report, plans: Mapping[str, RunPlan], settings: Mapping[str, Any]) -> None:
    """Let jobs of plans of one model, and transformers' model of a config.json, take turns."""
    makers: dict[str, Callable[[], Contender]] = {
        name: partial(Job, plan, report.device) for name, plan in plans.items()
    }
    first = next(iter(plans.values()))
    if is_installed("transformers"):
        makers["transformers"] = partial(transformers_model, settings, first, report.device)
    else:
        report.say("transformers is not installed")
    contenders = build(report, makers)
    for name, job in contenders.items():
        if isinstance(job, Job):
            report.say(f"{name}: {job.choice or 'blocks are not compiled'}")
    flops = step_flops(first.config.model, first.batch.full, causal=True)
    measured = take_turns(report, contenders, flops)
    best = min(plans.keys() & contenders.keys(), key=measured.step_seconds)
    for name in contenders:
        seconds = measured.step_seconds(name)
        expected = predicted_ms(report, plans[name]) if name in plans else None
        report.figure(f"{name}.step", 1e3 * seconds, "ms", expected)
        report.figure(f"{name}.model", flops / seconds / 1e12, "TFLOP/s")
        if name != best:
            report.figure(f"{best} to {name}", measured.ratio(best, name), "of its speed, forward and backward")


def ring(report: Report) -> None:
    """Ring attention over two ranks against one process: losses alone, since ranks that share a card take turns."""
    kind = report.device.type
    sizes = RING_HEADS.get(kind, TINY)
    run = f"{LLAMA} --bf16 {STEPS} {sizes} {SMALL_BATCH} --device {kind} --train-iters {RING_STEPS} {LOGGED}"
    ranks = "--ranks-per-gpu 2 --nproc-per-node 2" if report.on_gpu else "--nproc-per-node 2"
    alone = [*MEGAPIPE, "pretrain", *run.split()]
    both = [*MEGAPIPE, "launch", *ranks.split(), "pretrain", *run.split()]
    both += "--context-parallel-size 2 --cp-comm-type p2p".split()
    one, two = (steps_of(words) for words in (alone, both))
    pairs = list(zip([step["loss"] for step in one], [step["loss"] for step in two], strict=True))
    difference = max(abs(ours / theirs - 1) for theirs, ours in pairs)
    report.figure("largest difference of a loss", difference, "relative")
    report.bar("largest difference of a loss", difference, LOSS_BOUND[kind], at_most=True)
    report.say(f"{len(pairs)} steps of a ring of 2 ranks and of one process; no times, which would mean nothing here")


def muon(report: Report) -> None:
    """The update of the 0.5B model by Muon and by AdamW."""
    sizes = f"{QWEN_05B if report.on_gpu else TINY} {SMALL_BATCH}"
    plans = {name: plan_of(report, sizes, f"--optimizer {name}", EAGER_BLOCKS) for name in ("adam", "muon")}
    updates = _updates(report, plans)
    if len(updates) == 2:
        report.figure("muon to adam", updates["muon"] / updates["adam"], "times the update's time")


def optimizer(report: Report) -> None:
    """The bytes per second of AdamW's update by torch's fused kernel and compiled, beside a copy's."""
    sizes = UPDATED if report.on_gpu else f"{TINY} {SMALL_BATCH}"
    names = ("torch", "compiled") if report.on_gpu else ("torch",)  # nothing is compiled in a twin
    plans = {name: plan_of(report, sizes, f"--optimizer-impl {name}", EAGER_BLOCKS) for name in names}
    copy = copy_rate(report.device)
    sheet = None if report.hardware is None else report.hardware.memory_bytes_per_second / 1e12
    report.figure("copy", copy / 1e12, "TB/s", sheet)
    for name, seconds in _updates(report, plans).items():
        plan = plans[name]
        zeroed = plan.num_elements(plan.placement.stages_of(0)) * plan.state_dtypes.gradient_bytes
        rate = (optimizer_bytes(plan, 0, name == "compiled") - zeroed) / seconds
        report.figure(f"{name}.bytes a second", rate / 1e12, "TB/s", sheet)
        report.bar(f"{name}, of the copy's rate", rate / copy, 0.8, is_goal=True)


def _updates(report: Report, plans: Mapping[str, RunPlan]) -> dict[str, float]:
    """Return the median seconds of the update of jobs that take turns; add them as figures."""
    jobs = build(report, {name: partial(Job, plan, report.device) for name, plan in plans.items()})
    measured, found = take_turns(report, jobs), {}
    for name in jobs:
        found[name] = measured.update_seconds(name)
        report.figure(f"{name}.update", 1e3 * found[name], "ms", predicted_ms(report, plans[name], "optimizer"))
    return found

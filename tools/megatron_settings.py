#!/usr/bin/env python3
"""Write the settings that Megatron-Core 0.19.2 itself derives from random sets of flags.

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-core==0.19.2
    unzip megatron_core-0.19.2-*.whl -d wheel
    python tools/megatron_settings.py wheel --output tests/fixtures/megatron_settings/settings.jsonl.xz

Each set of flags goes through Megatron's own parser, `validate_args` and `core_transformer_config_from_args`, and
through its optimizer, data-parallel and scheduler settings, on a CPU and without starting ranks. What these hold
afterwards is written, as values by name; a test compares it with what megapipe derives from the same flags. The same
seed writes the same sets of flags. Packages that Megatron imports and that are not there are replaced by empty ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib.abc
import importlib.machinery
import io
import json
import logging
import lzma
import random
import sys
import types
import typing
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from megapipe.environment import set_for_libraries

ABSENT = ("triton",)  # packages that Megatron imports on every path
FUSED = (  # kernels of Transformer Engine that Megatron looks for
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_thd",
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
REFUSALS = (AssertionError, ValueError, RuntimeError, SystemExit)  # of Megatron
WHICH_ARGUMENTS = (  # of args, those that no other object holds
    "add_position_embedding",
    "data_parallel_size",
    "eval_global_batch_size",
    "eval_interval",
    "eval_iters",
    "eval_micro_batch_size",
    "exit_duration_in_mins",
    "exit_interval",
    "global_batch_size",
    "manual_gc",
    "manual_gc_eval",
    "manual_gc_interval",
    "max_position_embeddings",
    "micro_batch_size",
    "save_interval",
    "seed",
    "seq_length",
    "skip_train",
    "split",
    "train_iters",
)


# Flags that a set may have. A line: the share of the sets that have one of its choices, which `|` separates; names in
# braces are filled in by `random_flags`.
SHAPE = """
0.35 --ffn-hidden-size {four} | --ffn-hidden-size {three} | --ffn-hidden-size 96
0.60 --swiglu | --swiglu | --squared-relu --no-bias-gelu-fusion | --quick-geglu --no-bias-gelu-fusion | --quick-geglu
     | --squared-relu --disable-bias-linear | --quick-geglu --disable-bias-linear
     | --swiglu --activation-func-clamp-value 7.0 | --quick-geglu --disable-bias-linear --glu-linear-offset 1.0
0.15 --no-bias-gelu-fusion | --no-bias-swiglu-fusion
0.40 --disable-bias-linear
0.10 --add-qkv-bias
0.50 --normalization RMSNorm | --normalization LayerNorm
0.20 --norm-epsilon 1e-6 | --norm-epsilon 1e-8
0.15 --apply-layernorm-1p
0.40 --untie-embeddings-and-output-weights
0.40 --hidden-dropout 0 --attention-dropout 0 | --hidden-dropout 0.05 | --attention-dropout 0.2
0.20 --init-method-std 0.01 | --init-method-std 0.006
0.20 --make-vocab-size-divisible-by 64 | --make-vocab-size-divisible-by 1
0.05 --openai-gelu | --use-mcore-models
"""
ATTENTION = """
0.65 --position-embedding-type rope | --use-rotary-position-embeddings | --position-embedding-type none
     | --position-embedding-type rope --rotary-percent 0.5 | --position-embedding-type rope --use-rope-scaling
     | --position-embedding-type learned_absolute
     | --position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32
     | --position-embedding-type rope --rotary-seq-len-interpolation-factor 4
     | --position-embedding-type rope --no-rope-freq 2 | --position-embedding-type rope --no-rope-freq [0]*{rest}+[1]
0.40 --group-query-attention --num-query-groups {heads} | --group-query-attention --num-query-groups {half}
     | --group-query-attention --num-query-groups {quarter} | --num-query-groups 2 | --group-query-attention
     | --num-query-groups {heads}
0.10 --window-size 31,0 | --window-size 15,0 --window-attn-skip-freq 2
     | --window-size 7,0 --window-attn-skip-freq [1]*{rest}+[0]
0.10 --softmax-type learnable | --softmax-type off-by-one
0.10 --kv-channels {wide} | --kv-channels 32
"""
LATENT_ATTENTION = """
1.00 --multi-latent-attention
0.95 --position-embedding-type rope
0.50 --q-lora-rank 24
0.70 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
0.30 --rotary-scaling-factor 4 | --rotary-scaling-factor 40 --mscale 0.7 --mscale-all-dim 0.7
     | --rope-type rope --no-rope-fusion | --rope-type yarn --rotary-scaling-factor 8
     | --rotary-scaling-factor 4 --yarn-beta-fast 16 --yarn-beta-slow 2
     | --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 2048
"""
ALL_ATTENTION = """
0.20 --rotary-base 500000 | --rotary-base 1000000
0.20 --qk-layernorm
0.10 --attention-softmax-in-fp32
0.05 --apply-query-key-layer-scaling | --no-position-embedding
0.05 --attention-backend flash | --attention-backend unfused
"""
EXPERTS = """
1.00 --num-experts 4 | --num-experts 8 | --num-experts 16
1.00 --expert-model-parallel-size 1 | --expert-model-parallel-size {ep}
0.70 --disable-bias-linear
0.60 --expert-tensor-parallel-size 1
0.90 --sequence-parallel
0.50 --moe-ffn-hidden-size 48 | --moe-ffn-hidden-size 128
0.30 --moe-layer-freq 2 | --moe-layer-freq [0]+[1]*{rest} | --moe-layer-freq ([0,1])*{pairs}
0.50 --moe-aux-loss-coeff 1e-2 | --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
     | --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3
     | --moe-router-load-balancing-type none
     | --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3
0.20 --moe-z-loss-coeff 1e-3
0.30 --moe-shared-expert-intermediate-size 64 | --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate
0.60 --moe-router-topk 1 --moe-router-pre-softmax | --moe-router-topk 4 | --moe-router-pre-softmax
     | --moe-router-score-function sigmoid --moe-router-enable-expert-bias
     | --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
     | --moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1
     | --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2
0.30 --moe-router-dtype fp32 | --moe-router-dtype fp64
0.20 --moe-expert-capacity-factor 1.25 --moe-token-dispatcher-type alltoall
     | --moe-expert-capacity-factor 1.0 --moe-token-drop-policy position --moe-token-dispatcher-type alltoall
     | --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall
0.60 --moe-token-dispatcher-type alltoall | --moe-token-dispatcher-type allgather
0.15 --moe-grouped-gemm | --moe-permute-fusion | --moe-layer-recompute | --moe-router-force-load-balancing
     | --overlap-moe-expert-parallel-comm
"""
PIPELINE = """
0.40 --num-layers-per-virtual-pipeline-stage {chunk} | --num-virtual-stages-per-pipeline-rank 2
     | --num-virtual-stages-per-pipeline-rank 1 | --decoder-first-pipeline-num-layers {share}
     | --decoder-last-pipeline-num-layers {share} | --pipeline-model-parallel-layout {layout}
     | --microbatch-group-size-per-virtual-pipeline-stage {pp} --num-virtual-stages-per-pipeline-rank 2
     | --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication
"""
CONTEXT = """
0.50 --cp-comm-type p2p | --cp-comm-type all_gather | --cp-comm-type a2a
     | --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes {cp} 1
"""
MEMORY = """
0.40 --sequence-parallel
0.40 --recompute-activations | --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
     | --recompute-granularity full --recompute-method block --recompute-num-layers 1
     | --recompute-granularity selective | --recompute-granularity selective --recompute-modules mlp
     | --recompute-granularity selective --recompute-modules core_attn layernorm
0.05 --cpu-offloading-num-layers 1 | --tp-comm-overlap --sequence-parallel | --cuda-graph-impl local
0.05 --mtp-num-layers 1 | --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
"""
TRAINING = """
1.00 --train-{unit} {number}
0.40 --lr-decay-{unit} {less} | --lr-decay-{unit} {more}
0.60 --lr-warmup-{unit} {tenth} | --lr-warmup-fraction 0.05 | --lr-warmup-fraction 0.123
0.70 --lr-decay-style cosine | --lr-decay-style linear | --lr-decay-style constant
     | --lr-decay-style inverse-square-root | --lr-decay-style WSD --lr-wsd-decay-{unit} {fifth}
     | --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-{unit} {tenth}
0.20 --eval-interval 50 | --eval-iters 0 | --eval-interval 10 --eval-iters 2
0.10 --calculate-per-token-loss
0.10 --manual-gc | --manual-gc --manual-gc-interval 10 | --disable-manual-gc-eval
0.10 --exit-interval 50 | --exit-duration-in-mins 30 | --seed 42
0.05 --save runs --save-interval 10 | --rampup-batch-size {first} {first} 64 | --split 9,1,0
0.05 --no-check-for-nan-in-loss-and-grad | --skip-train | --deterministic-mode
"""
OPTIMIZER = """
1.00 --lr 1e-3 | --lr 3e-4 | --lr 1.5e-4
0.60 --min-lr 1e-5 | --min-lr 0 | --min-lr 1e-6 --lr-warmup-init 1e-7
0.25 --optimizer adam | --optimizer sgd | --optimizer sgd --sgd-momentum 0.8 | --optimizer muon
     | --optimizer muon --muon-momentum 0.95 --muon-tp-mode distributed --muon-no-split-qkv --muon-nesterov
     | --optimizer muon --muon-tp-mode duplicated --muon-scale-mode unit_rms_norm --muon-num-ns-steps 10
     | --optimizer muon --muon-tp-mode duplicated --muon-coefficient-type simple --muon-fp32-matmul-prec high
     | --optimizer muon --muon-tp-mode duplicated --muon-extra-scale-factor 0.2
0.60 --adam-beta1 0.8 --adam-beta2 0.95 | --adam-beta2 0.98 --adam-eps 1e-5 | --adam-eps 1e-6
0.50 --weight-decay 0.1 | --weight-decay 0
     | --weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1
     | --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1
0.40 --clip-grad 0.5 | --clip-grad 0 | --clip-grad 1.0
0.10 --decoupled-lr 5e-4 | --decoupled-lr 5e-4 --decoupled-min-lr 2e-5
0.50 --use-distributed-optimizer | --use-distributed-optimizer --overlap-grad-reduce | --overlap-grad-reduce
     | --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
0.05 --ddp-bucket-size 10000000 | --override-opt-param-scheduler
     | --use-distributed-optimizer --num-distributed-optimizer-instances 2
"""
PRECISION = """
0.65 --bf16 | --bf16 | --bf16 | --fp16 | --fp16 --loss-scale 1024 | --fp16 --initial-loss-scale 65536
     | --fp16 --loss-scale-window 500 --hysteresis 1 --min-loss-scale 2 | --bf16 --grad-reduce-in-bf16
     | --bf16 --accumulate-allreduce-grads-in-fp32 | --fp16 --accumulate-allreduce-grads-in-fp32
     | --bf16 --fp8-format hybrid | --bf16 --fp8-format e4m3 --fp8-recipe tensorwise
     | --bf16 --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-margin 1
     | --bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16
     | --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 2
     | --bf16 --use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16
     | --bf16 --use-precision-aware-optimizer --use-distributed-optimizer --main-grads-dtype bf16
     | --fp16 --use-precision-aware-optimizer --use-distributed-optimizer --main-params-dtype fp16
     | --bf16 --use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-sq-dtype fp16
"""


def random_flags(number: int, seed: int) -> tuple[int, list[str]]:
    """Return the ranks and the flags of one set."""
    draw = random.Random(f"{seed} {number}")
    tp, pp, cp, dp = (draw.choice(sizes) for sizes in ((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 1, 2), (1, 2, 4)))
    layers, heads, length = pp * draw.choice((2, 4, 6)), 4 * draw.choice((1, 2, 4)), draw.choice((64, 128, 192))
    size, micro, steps = heads * draw.choice((16, 32, 80)), draw.choice((1, 2, 4)), draw.choice((20, 100, 1000))
    batch = micro * dp * draw.choice((4, 8))
    unit, span = draw.choice((("iters", steps), ("iters", steps), ("samples", steps * batch)))
    fillers = {
        "heads": heads, "half": heads // 2, "quarter": heads // 4, "wide": size // heads * 2, "four": 4 * size,
        "three": 3 * size, "rest": layers - 1, "pairs": layers // 2, "ep": min(dp, 4), "share": layers // pp,
        "chunk": layers // pp // 2, "pp": pp, "cp": cp, "unit": unit, "number": span, "less": span // 2,
        "more": span * 2, "tenth": span // 10, "fifth": span // 5, "first": micro * dp,
        "layout": "E" + "|".join(["t" * (layers // pp)] * pp) + "L",
    }  # fmt: skip
    words = (
        f"--num-layers {layers} --hidden-size {size} --num-attention-heads {heads} --seq-length {length} "
        f"--max-position-embeddings {length * draw.choice((1, 1, 2))} --vocab-size {draw.choice((100, 1000, 50257))} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp} "
        f"--mock-data --micro-batch-size {micro}"
    ).split()
    words += ["--global-batch-size", str(batch)] if unit == "samples" or draw.random() < 0.9 else []
    tables = [SHAPE, LATENT_ATTENTION if draw.random() < 0.15 else ATTENTION, ALL_ATTENTION, MEMORY, TRAINING]
    tables += [EXPERTS] * (draw.random() < 0.35) + [PIPELINE] * (pp > 1) + [CONTEXT] * (cp > 1)
    for table in (*tables, OPTIMIZER, PRECISION):
        for line in table.strip().replace("\n     ", " ").splitlines():
            share, _, choices = line.partition(" ")
            if draw.random() < float(share):
                words += draw.choice(choices.split(" | ")).format(**fillers).split()
    return tp * pp * cp * dp, words


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports packages that are not there as empty ones, whose classes and functions do nothing."""

    class Module(types.ModuleType):
        __path__: list[str] = []  # noqa: RUF012
        __version__ = "3.4.0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name[0].isupper():
                return type(name, (), {"__init__": lambda self, *given, **named: None})
            return MagicMock(name=name)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_megatron(wheel: Path) -> Any:
    """Import Megatron's training module from an unpacked wheel, as on a Hopper GPU with Transformer Engine."""
    import torch
    import torch._inductor.compile_fx  # these before triton is replaced
    import torch.nn.attention.flex_attention

    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    set_for_libraries(CUDA_DEVICE_MAX_CONNECTIONS=1)
    sys.path.insert(0, str(wheel))
    sys.meta_path.append(AbsentPackages())
    torch.cuda.get_device_capability = lambda *given: (9, 0)  # type: ignore[assignment]
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda *given: properties  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training import arguments, training
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))  # once: it takes a while
    arguments.add_megatron_arguments = lambda _: parser
    for name, module in list(sys.modules.items()):
        for attribute in ("is_te_min_version", *FUSED) if name.startswith("megatron.") else ():
            if hasattr(module, attribute):
                setattr(module, attribute, lambda *given, **named: True)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[name].FusedAdam = fused_adam  # type: ignore[attr-defined]
    return training


def fused_adam(master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any) -> None:
    """Stand for Transformer Engine's optimizer, of which Megatron reads the names of the arguments."""


def derived(training: Any, ranks: int, words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that Megatron derives from flags on some ranks. Raises what Megatron raises."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    sys.argv = ["pretrain_gpt.py", *words]
    rates: dict[str, Any] = {}
    args = parse_args()
    args.world_size = ranks
    validate_args(args)
    model = core_transformer_config_from_args(args)
    optimizer, _ = training.get_megatron_optimizer_config(args)
    buffers = training.get_megatron_ddp_config(args)
    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(
        0, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    training.get_args, training.OptimizerParamScheduler = lambda: args, lambda _, **named: rates.update(named)
    training.get_optimizer_param_scheduler(None)
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    sections = {
        "model": fields_of(model),
        "gpt": fields_of(gpt_config_from_args(args, model)),
        "optimizer": fields_of(optimizer),
        "ddp": fields_of(buffers),
        "schedule": rates,
        "args": {name: getattr(args, name) for name in WHICH_ARGUMENTS},
    }
    found = {f"{section}.{name}": plain(value) for section, named in sections.items() for name, value in named.items()}
    return found | {"num_microbatches": microbatches.get_num_microbatches()}


def fields_of(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dtypes, functions and members of enumerations by name."""
    import torch

    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__name__", type(value).__name__)


def lines_of(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the fixture: what most cases have in common, then each case with what differs."""
    accepted = [case["settings"] for case in cases if case["settings"] is not None]
    common = {}
    for name in sorted({name for settings in accepted for name in settings}):
        texts = [json.dumps(settings[name]) for settings in accepted if name in settings]
        common[name] = json.loads(max(set(texts), key=lambda text: (texts.count(text), text)))
    yield json.dumps(common)
    for case in cases:
        settings = case["settings"]
        if settings is not None:
            absent = {name: "absent" for name in common if name not in settings}
            settings = absent | {name: value for name, value in settings.items() if common[name] != value}
        yield json.dumps(case | {"settings": settings})


def main() -> None:
    """Read the command line, and write the fixture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("--output", type=Path, required=True, help="compressed JSON lines, .jsonl.xz")
    parser.add_argument("--cases", type=int, default=1000, help="sets of flags (1000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other sets (0)")
    parser.add_argument("--why", action="store_true", help="print why Megatron refuses a set")
    asked = parser.parse_args()
    training = import_megatron(asked.wheel)
    logging.disable()
    cases, refused = [], Counter[str]()
    for number in range(asked.cases):
        ranks, words = random_flags(number, asked.seed)
        settings = None
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                settings = derived(training, ranks, words)
            except REFUSALS as error:
                refused[str(error)[:100]] += 1
        cases.append({"ranks": ranks, "flags": " ".join(words), "settings": settings})
    asked.output.write_bytes(lzma.compress("\n".join(lines_of(cases)).encode() + b"\n", preset=9))
    accepted = sum(case["settings"] is not None for case in cases)
    for why, times in refused.most_common() if asked.why else ():
        print(f"{times:5} {why}")
    print(f"{accepted} of {len(cases)} sets of flags accepted by Megatron; {asked.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()

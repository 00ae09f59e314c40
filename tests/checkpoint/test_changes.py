"""A run that continues names what has changed since its checkpoint, and refuses what must not change unasked."""

from __future__ import annotations

import shutil
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.assembly.datasets import planned
from megapipe.checkpoint.folder import CheckpointFolder, saved_config
from megapipe.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from megapipe.checkpoint.shard import BLOCK_BYTES
from megapipe.config.changes import CLASSES, DATA, EXCEPTIONS, FUNCTION, NEUTRAL, OF_SECTION, OPTIMIZER, classes
from megapipe.config.config import all_fields, fields_by_key
from megapipe.config.load import LoadedConfig, load_config
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.train.loading import told_changes
from megapipe.train.state import Schedules
from tests.checkpoint.conftest import RUN
from tests.checkpoint.test_crafted import rewrite
from tests.train.jobs import TINY, job

BASE = f"{TINY} --train-iters 6 --lr-decay-style constant"
MOE = "--num-experts 4 --disable-bias-linear"
BIAS = f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
BALANCE = "--moe-router-load-balancing-type"
MUON, SGD = "--optimizer muon", "--optimizer sgd"
MTP = "--position-embedding-type rope --mtp-num-layers 1"
NARROW, WIDE = "--bf16 --use-precision-aware-optimizer", "!--use-precision-aware-optimizer"
FP16, FP8 = "--fp16 --loss-scale 256", "--hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --fp8 hybrid"
DOCUMENTS = "--tokenizer-type NullTokenizer --vocab-size 31"
CHATS = "--sft --train-data-path chat.jsonl --tokenizer-type HuggingFaceTokenizer --tokenizer-model unread !--mock-data"
PP2 = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --clip-grad 0"
OVERRIDE = "--override-opt-param-scheduler"
# field that is named | flags that change it | class | flags of both runs | ranks. `!--flag` leaves a flag out
CHANGES = f"""
model.num_layers | --num-layers 2 | function
model.num_query_groups | --group-query-attention --num-query-groups 2 | function
model.norm_epsilon | --norm-epsilon 1e-6 | function
model.normalization | --normalization RMSNorm | function
model.activation | --activation gelu | function
model.window_size | --window-size 4 | function
model.position_embedding_type | --position-embedding-type rope | function
model.softmax_scale | --softmax-scale 0.3 | function
model.embedding_scale | --embedding-scale 2 | function
model.final_logit_softcapping | --final-logit-softcapping 30 | function
model.moe_router_topk | --moe-router-topk 3 | function | {MOE}
model.moe_router_pre_softmax | --moe-router-pre-softmax | function | {MOE}
model.mtp_num_layers | --mtp-num-layers 2 | function | {MTP}
optimizer.clip_grad | --clip-grad 0.5 | optimizer
optimizer.adam_beta1 | --adam-beta1 0.8 | optimizer
optimizer.adam_beta2 | --adam-beta2 0.95 | optimizer
optimizer.adam_eps | --adam-eps 1e-6 | optimizer
optimizer.adam_beta2 | --adam-beta2 0.95 | optimizer | {MUON}
optimizer.optimizer | --optimizer muon | optimizer
optimizer.freeze | --freeze embedding.* | optimizer
optimizer.sgd_momentum | --sgd-momentum 0.5 | optimizer | {SGD}
optimizer.muon_momentum | --muon-momentum 0.95 | optimizer | {MUON}
optimizer.muon_nesterov | --muon-nesterov | optimizer | {MUON}
optimizer.muon_coefficient_type | --muon-coefficient-type simple | optimizer | {MUON}
optimizer.muon_num_ns_steps | --muon-num-ns-steps 10 | optimizer | {MUON}
optimizer.muon_scale_mode | --muon-scale-mode shape_scaling | optimizer | {MUON}
optimizer.muon_extra_scale_factor | --muon-extra-scale-factor 0.2 | optimizer | {MUON}
optimizer.muon_no_split_qkv | --muon-no-split-qkv | optimizer | {MUON}
optimizer.muon_fp32_matmul_prec | --muon-fp32-matmul-prec high | optimizer | {MUON}
optimizer.main_grads_dtype | --main-grads-dtype bf16 | optimizer | {NARROW}
optimizer.exp_avg_dtype | --exp-avg-dtype bf16 | optimizer | {NARROW}
optimizer.exp_avg_sq_dtype | --exp-avg-sq-dtype bf16 | optimizer | {NARROW}
optimizer.main_grads_dtype | --use-precision-aware-optimizer --main-grads-dtype bf16 | optimizer | --bf16
optimizer.exp_avg_dtype | --use-precision-aware-optimizer --exp-avg-dtype bf16 | optimizer | --bf16
optimizer.exp_avg_sq_dtype | {WIDE} !--exp-avg-sq-dtype | optimizer | {NARROW} --exp-avg-sq-dtype bf16
parallel.pipeline_schedule | --pipeline-schedule pipedream | optimizer | {PP2} | 2
data.reset_position_ids | --reset-position-ids | data | {DOCUMENTS}
data.reset_attention_mask | --reset-attention-mask | data | {DOCUMENTS}
data.tokenizer_type | --tokenizer-type ByteTokenizer --tokenizer-model none | data | \
--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model unread --vocab-size 300
data.sft_packing | --no-sft-packing | data | {CHATS}
data.sft_overlong | --sft-overlong drop | data | {CHATS} --sft-overlong truncate
model.moe_aux_loss_coeff | --moe-aux-loss-coeff 0.1 | loss | {MOE}
model.moe_router_load_balancing_type | --moe-router-load-balancing-type seq_aux_loss | loss | {MOE}
model.moe_z_loss_coeff | --moe-z-loss-coeff 1e-3 | loss | {MOE}
model.moe_router_dtype | --moe-router-dtype fp64 | loss | {MOE}
model.moe_router_bias_update_rate | --moe-router-bias-update-rate 0.1 | loss | {BIAS}
model.moe_router_force_load_balancing | --moe-router-force-load-balancing | loss | {MOE}
model.moe_expert_capacity_factor | --moe-expert-capacity-factor 2 | loss | {MOE}
model.moe_token_drop_policy | --moe-token-drop-policy position | loss | {MOE} --moe-expert-capacity-factor 2
model.mtp_loss_scaling_factor | --mtp-loss-scaling-factor 0.3 | loss | {MTP}
model.attention_softmax_in_fp32 | --attention-softmax-in-fp32 | loss
model.hidden_dropout | --hidden-dropout 0 | loss
model.attention_dropout | --attention-dropout 0 | loss
training.micro_batch_size | --micro-batch-size 4 | loss | {MOE} --moe-aux-loss-coeff 0.1
training.micro_batch_size | --micro-batch-size 4 | loss | {MOE} --moe-aux-loss-coeff 0.1 {BALANCE} global_aux_loss
training.micro_batch_size | --micro-batch-size 4 | loss | {MOE} {BALANCE} sinkhorn
training.micro_batch_size | --micro-batch-size 4 | loss | {MOE} --moe-expert-capacity-factor 2
training.micro_batch_size | --micro-batch-size 4 | loss | {DOCUMENTS} --eod-mask-loss
training.micro_batch_size | --micro-batch-size 4 | loss | {DOCUMENTS} --eod-mask-loss --calculate-per-token-loss {MTP}
training.label_smoothing | --label-smoothing 0.1 | loss
training.z_loss | --z-loss 1e-4 | loss
training.calculate_per_token_loss | --calculate-per-token-loss | loss
data.eod_mask_loss | --eod-mask-loss | loss | {DOCUMENTS}
precision.dtype | --bf16 | loss
precision.loss_scale | --loss-scale 512 | loss | {FP16}
precision.fp8_format | --fp8 e4m3 | loss | {FP8}
precision.fp8_margin | --fp8-margin 1 | loss | {FP8}
parallel.grad_reduce_in_bf16 | --grad-reduce-in-bf16 | loss
training.global_batch_size | --global-batch-size 16 | schedule
training.rampup_batch_size | --rampup-batch-size 2 2 16 | schedule | !--train-iters --train-samples 64
training.step_batch_size_schedule | --step-batch-size-schedule 0:2 1K:8 | schedule
training.train_iters | --train-iters 8 | schedule
training.train_samples | --train-samples 80 | schedule | !--train-iters --train-samples 64
training.seed | --seed 7 | schedule
training.spike_rollback | --spike-rollback 2 --save unused --save-interval 1 | schedule
optimizer.lr | --lr 1e-3 | schedule | {OVERRIDE}
optimizer.min_lr | --min-lr 1e-3 | schedule | {OVERRIDE} --lr-decay-style cosine
optimizer.lr_decay_style | --lr-decay-style cosine | schedule | {OVERRIDE}
optimizer.weight_decay | --weight-decay 0.1 | schedule | {OVERRIDE}
optimizer.decoupled_lr | --decoupled-lr 0.1 | schedule | {OVERRIDE}
model.moe_token_dispatcher_type | --moe-token-dispatcher-type allgather | neutral | {MOE}
model.init_method_std | --init-method-std 0.01 | neutral
model.make_vocab_size_divisible_by | --make-vocab-size-divisible-by 8 | neutral
training.micro_batch_size | --micro-batch-size 4 | neutral
training.micro_batch_size | --micro-batch-size 4 | neutral | {MOE}
training.micro_batch_size | --micro-batch-size 4 | neutral | {MOE} --moe-aux-loss-coeff 0.1 {BALANCE} seq_aux_loss
training.micro_batch_size | --micro-batch-size 4 | neutral | {DOCUMENTS} --eod-mask-loss --calculate-per-token-loss
optimizer.use_precision_aware_optimizer | --use-precision-aware-optimizer | neutral | --bf16
optimizer.use_precision_aware_optimizer | {WIDE} | neutral | {NARROW}
training.eval_iters | --eval-iters 3 | neutral
training.cross_entropy_chunk_size | --cross-entropy-chunk-size 4 | neutral
parallel.tensor_model_parallel_size | --tensor-model-parallel-size 2 | neutral | | 2
parallel.pipeline_schedule | --pipeline-schedule zb-h1 | neutral | {PP2} | 2
parallel.use_distributed_optimizer | --use-distributed-optimizer | neutral
recompute.recompute_granularity | --recompute-granularity selective | neutral
kernels.compile_blocks | --compile-blocks off | neutral
data.sft_overlong | --sft-overlong drop | neutral | {CHATS}
data.tokenizer_type | --tokenizer-type ByteTokenizer --vocab-size 32 | neutral
optimizer.muon_momentum | --muon-momentum 0.95 | neutral
logging.log_interval | --log-interval 3 | neutral
"""
SAVED = Path(__file__).with_name("saved_config.yaml")  # of a run of the version that wrote this test
OLD = Path(__file__).parents[1] / "golden" / "run" / "step_00000003" / "config.yaml"  # lacks fields that came later
ROWS = [[cell.strip() for cell in (*line.split("|"), "", "1")] for line in CHANGES.strip().splitlines()]
REFUSED = {FUNCTION: "--allow-changed-model", OPTIMIZER: "--allow-changed-optimizer", DATA: "--allow-changed-data"}


def given(flags: str) -> LoadedConfig:
    """Return the configuration of BASE with other flags, without those of `!--flag`."""
    words = [*BASE.split(), *(word for word in flags.split() if not word.startswith("!"))]
    for name in (word[1:] for word in flags.split() if word.startswith("!")):
        at = words.index(name)
        stop = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
        del words[at:stop]
    return load_config(words)


def plan_of(flags: str, ranks: int = 1) -> RunPlan:
    return resolve(given(flags).config, ranks)


def saved_by(plan: RunPlan, folder: Path, text: str | None = None) -> CheckpointFolder:
    """Write the configuration of a checkpoint and return it as one of step 3, without tensors."""
    content = (to_yaml(plan.config) if text is None else text).encode()
    (folder / "config.yaml").write_bytes(content)
    state = {
        "training": {"step": 3, "consumed_samples": 24},
        "random": {"seed": plan.config.training.seed},
        "schedules": asdict(Schedules.of(plan.config)),
        "global_batch_size": plan.batch.full,
        "data": {"kind": "generated", "seq_length": 8, "tokens": 32},
    }
    files = {"config.yaml": SavedFile(len(content), zlib.crc32(content))}
    rows = {f"master/{WORD_EMBEDDING}": SavedTensor("F32", (plan.config.model.vocab_size, 16), ())}
    return CheckpointFolder(folder, 3, Manifest(3, 1, BLOCK_BYTES, state, files, rows))


def told(folder: CheckpointFolder, plan: RunPlan, **flags: bool) -> str:
    """Return what a run that continues is told, or the error."""
    config = plan.config
    try:
        return "\n".join(told_changes(folder, config, Schedules.of(config), None, replace(config.checkpoint, **flags)))
    except CheckpointError as error:
        return f"refused: {error}"


def test_every_exception_is_a_field_whose_section_has_another_class() -> None:
    wrong = [key for key, kind in EXCEPTIONS.items() if OF_SECTION.get(fields_by_key()[key].section, NEUTRAL) == kind]
    assert wrong == []
    assert {*EXCEPTIONS.values()} < {*CLASSES} and {*OF_SECTION} < {field.section for field in all_fields()}


def test_fields_of_the_function_are_of_the_model_alone() -> None:
    assert {key.partition(".")[0] for key, kind in classes().items() if kind == FUNCTION} == {"model"}


@pytest.mark.parametrize(("key", "change", "kind", "base", "ranks"), [row[:5] for row in ROWS], ids=lambda cell: cell)
def test_a_change_is_named_by_its_class(
    key: str, change: str, kind: str, base: str, ranks: str, tmp_path: Path
) -> None:
    before, after = plan_of(base, int(ranks or 1)), plan_of(f"{base} {change}", int(ranks or 1))
    folder = saved_by(before, tmp_path, given(base).text(before.config))
    assert told(folder, before) == "", "nothing has changed"
    said, flag = told(folder, after), fields_by_key()[key].main_flag
    if kind == NEUTRAL:
        assert said == ""
        return
    assert f"changed since step 3 ({tmp_path}):\n" in said
    block = said.partition(f"\n  {kind}:\n")[2]
    assert any(
        line.startswith("    --") and flag in line and " in the checkpoint, " in line for line in block.splitlines()
    ), said
    assert said.startswith("refused: ") == (kind in REFUSED)
    if kind in REFUSED:
        assert REFUSED[kind] in said
        name = REFUSED[kind][2:].replace("-", "_")
        assert f"\n  {kind} ({REFUSED[kind]}):\n    {flag}" in told(folder, after, **{name: True})


def test_the_table_has_the_changes_that_a_resume_must_name() -> None:
    kinds = [row[2] for row in ROWS]
    assert len(ROWS) >= 66 and {*kinds} == {*CLASSES}


def test_all_changes_are_in_one_block_and_one_refusal(tmp_path: Path) -> None:
    folder = saved_by(plan_of(""), tmp_path)
    after = plan_of("--norm-epsilon 1e-6 --adam-beta2 0.95 --clip-grad 0 --z-loss 1e-4 --global-batch-size 16")
    assert told(folder, after) == (
        f"refused: this run is not the one that was saved; changed since step 3 ({tmp_path}):\n"
        "  function:\n"
        "    --norm-epsilon: 1.0e-05 in the checkpoint, 1.0e-06 here\n"
        "  optimizer:\n"
        "    --clip-grad: 1.0 in the checkpoint, 0.0 here\n"
        "    --adam-beta2: 0.999 in the checkpoint, 0.95 here\n"
        "  loss:\n"
        "    --z-loss: 0.0 in the checkpoint, 0.0001 here\n"
        "  schedule:\n"
        "    --global-batch-size: 8 in the checkpoint, 16 here\n"
        "Set them alike (--use-checkpoint-args takes the checkpoint's model; --no-load-optim starts with a fresh "
        "optimizer), or give --allow-changed-model --allow-changed-optimizer if the change is wanted"
    )


def test_finetuning_compares_function_and_tokenizer(tmp_path: Path) -> None:
    named = "--tokenizer-model unread --vocab-size 300 --tokenizer-type"
    folder = saved_by(plan_of(f"{named} GPTSentencePieceTokenizer"), tmp_path)
    anew = "--finetune --load unused --adam-beta2 0.9 --z-loss 1 --seed 3 --reset-position-ids"
    assert told(folder, plan_of(f"{named} GPTSentencePieceTokenizer {anew}")) == ""
    said = told(folder, plan_of(f"{named} Llama2Tokenizer {anew} --norm-epsilon 1e-6"))
    assert "--tokenizer-type: GPTSentencePieceTokenizer in the checkpoint, Llama2Tokenizer here\n" in said
    assert "--norm-epsilon: " in said and "--adam-beta2" not in said and "--seed" not in said
    assert "give --allow-changed-model --allow-changed-data if" in said


def test_a_fresh_optimizer_may_be_another_one(tmp_path: Path) -> None:
    folder = saved_by(plan_of(""), tmp_path)
    said = told(folder, plan_of("--load unused --no-load-optim --optimizer muon --clip-grad 0"))
    assert "    --optimizer: adam in the checkpoint, muon here" in said and not said.startswith("refused")


@pytest.mark.parametrize("text", [SAVED, OLD], ids=["present", "older"])
def test_configurations_saved_by_other_versions_are_read(text: Path, tmp_path: Path) -> None:
    before = planned(load_config(["--config", str(text)]), 4, None)
    folder = saved_by(before, tmp_path, text.read_text())
    assert told(folder, before) == ""
    after = replace(before.config, training=replace(before.config.training, label_smoothing=0.2))
    said = told(folder, replace(before, config=after))
    assert "    --label-smoothing: 0.0 in the checkpoint, 0.2 here" in said


def test_an_option_that_the_checkpoint_does_not_know_is_named_if_it_is_used(tmp_path: Path) -> None:
    plan = plan_of("")
    lines = [line for line in to_yaml(plan.config).splitlines() if "z_loss:" not in line and "adam_eps:" not in line]
    folder = saved_by(plan, tmp_path, "\n".join(lines))
    assert told(folder, plan) == ""
    said = told(folder, plan_of("--z-loss 1e-4"))
    assert said == f"{tmp_path} was written by another version, so these were not compared: training.z_loss"


def test_an_option_that_this_version_lacks_is_named_if_the_checkpoint_used_it(tmp_path: Path) -> None:
    plan = plan_of("")
    text = to_yaml(plan.config).replace("parallel:\n", "parallel:\n  pipeline_message_dtype: {}\n")
    assert told(saved_by(plan, tmp_path, text.format("null")), plan) == ""
    said = told(saved_by(plan, tmp_path, text.format("fp8")), plan)
    assert (
        said
        == f"{tmp_path} was written by another version, so these were not compared: parallel.pipeline_message_dtype"
    )


def test_moments_in_a_dtype_of_an_earlier_version_go_on_in_another_one_if_that_is_allowed(tmp_path: Path) -> None:
    plan = plan_of(f"{NARROW} --exp-avg-dtype bf16")
    text = to_yaml(plan.config).replace("exp_avg_dtype: bf16", "exp_avg_dtype: fp8\n  main_params_dtype: fp32")
    folder, change = saved_by(plan, tmp_path, text), "--exp-avg-dtype: fp8 in the checkpoint, bf16 here"
    refused = told(folder, plan)
    assert all(word in refused for word in ("refused", change, "--no-load-optim", "--allow-changed-optimizer"))
    assert change in told(folder, plan, allow_changed_optimizer=True)
    assert saved_config(folder).optimizer.exp_avg_dtype == "fp32"


def test_names_of_extensions_that_are_not_loaded_are_compared_as_text(tmp_path: Path) -> None:
    plan = plan_of("")
    text = to_yaml(plan.config).replace("  optimizer: adam", "  optimizer: lion").replace("logger: []", "logger: [csv]")
    said = told(saved_by(plan, tmp_path, text), plan)
    assert "    --optimizer: lion in the checkpoint, adam here" in said and "logger" not in said


def test_a_resumed_job_is_refused_or_told(saved: Path) -> None:
    resumed = f"{RUN} --load {saved} --adam-beta2 0.95 --hidden-dropout 0"
    code, said = job(resumed)
    assert code == 1 and "  optimizer:\n    --adam-beta2: 0.999 in the checkpoint, 0.95 here\n" in said
    code, said = job(f"{resumed} --allow-changed-optimizer")
    assert code == 0 and said.count("changed since step 2 (") == 1 and "continuing after step 2" in said
    assert "  optimizer (--allow-changed-optimizer):\n    --adam-beta2: " in said
    assert "  loss:\n    --hidden-dropout: 0.1 in the checkpoint, 0.0 here\n" in said


def test_an_unchanged_job_is_told_nothing(saved: Path) -> None:
    code, said = job(f"{RUN} --load {saved} --micro-batch-size 4 --log-interval 2")
    assert code == 0 and "changed since" not in said and "written by another version" not in said


def test_other_versions_are_named_in_one_line(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)

    def older(content: dict[str, Any]) -> None:
        content["state"]["versions"] |= {"torch": "2.0.1", "apex": "0.1"}

    rewrite(root / "step_00000002", older)
    code, said = job(f"{RUN} --load {root} --save {root}")
    lines = [line for line in said.splitlines() if "other versions" in line]
    assert code == 0 and len(lines) == 1, said
    assert f"torch 2.0.1 then and {torch.__version__} now" in lines[0] and "apex 0.1 then and none now" in lines[0]
    assert "numpy" not in lines[0]
    rewrite(root / "step_00000004", older)  # a finished run that is started once more saves nothing
    code, said = job(f"{RUN} --load {root} --save {root}")
    assert code == 0 and "other versions" in said, said


def test_a_checkpoint_without_versions_is_read(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    rewrite(root / "step_00000002", lambda content: content["state"].pop("versions"))
    code, said = job(f"{RUN} --load {root}")
    assert code == 0 and "other versions" not in said, said

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
from megapipe.config.changes import CLASSES, DATA, FUNCTION, NEUTRAL, OPTIMIZER, classes
from megapipe.config.changes import ROWS as CHANGES
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
from tests.tables import rows
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
SAVED = Path(__file__).with_name("saved_config.yaml")  # of a run of the version that wrote this test
OLD = Path(__file__).parents[1] / "golden" / "run" / "step_00000003" / "config.yaml"  # lacks fields that came later
ROWS = [[*row, "", "1"] for row in rows(Path(__file__).with_name("changes.txt"), globals())]
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
        "grid": {"dp": plan.topology.dp},
        "data": {"kind": "generated", "seq_length": 8, "tokens": 32},
    }
    files = {"config.yaml": SavedFile(len(content), zlib.crc32(content))}
    rows = {f"master/{WORD_EMBEDDING}": SavedTensor("F32", (plan.config.model.vocab_size, 16), ())}
    return CheckpointFolder(folder, 3, Manifest(3, 1, BLOCK_BYTES, state, files, rows))


def told(folder: CheckpointFolder, plan: RunPlan, **flags: bool) -> str:
    """Return what a run that continues is told, or the error."""
    config = plan.config
    try:
        own = replace(config.checkpoint, **flags)
        return "\n".join(told_changes(folder, config, Schedules.of(config), None, own, plan.topology.dp))
    except CheckpointError as error:
        return f"refused: {error}"


def test_every_field_is_classified_on_purpose() -> None:
    """A new field joins its section where its changes are then refused or named; it may not be passed over unseen."""
    shared = {key.removesuffix(".*"): kind for key, kind in CHANGES.items() if key.endswith(".*")}
    assert [field.key for field in all_fields() if field.key not in CHANGES and field.section not in shared] == []
    assert [section for section, kind in shared.items() if kind == NEUTRAL] == ["recompute", "logging"]


def test_every_row_is_of_a_field_or_section_and_says_something_new() -> None:
    own = {key: kind for key, kind in CHANGES.items() if not key.endswith(".*")}
    assert own.keys() <= fields_by_key().keys()
    assert [key for key, kind in own.items() if CHANGES.get(f"{key.partition('.')[0]}.*") == kind] == []
    assert {*CHANGES.values()} == {*CLASSES}


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


@pytest.mark.parametrize(
    ("flags", "ranks", "is_named"),
    [
        (f"{MOE} {BALANCE} global_aux_loss --moe-aux-loss-coeff 0.1", 2, True),
        (f"{MOE} --moe-aux-loss-coeff 0.1", 2, False),
        (f"{PP2} --pipeline-schedule paci --micro-batch-size 1", 4, True),
        (f"{PP2} --pipeline-schedule pipedream-2bw --micro-batch-size 1", 4, False),
    ],
)
def test_another_number_of_replicas_is_named_where_results_depend_on_it(
    flags: str, ranks: int, is_named: bool, tmp_path: Path
) -> None:
    before, after = plan_of(flags, ranks // 2), plan_of(flags, ranks)
    folder = saved_by(before, tmp_path)
    assert told(folder, before) == ""
    assert ("  loss:\n    data-parallel size: 1 in the checkpoint, 2 here" in told(folder, after)) == is_named
    assert is_named or told(folder, after) == ""


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

"""The table of Megatron's flags is complete, has each flag in one class, and matches our fields and defaults."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megapipe.config.config import all_fields, fields_by_key
from megapipe.config.flags import field_flags, read_command_line, takes_values
from megapipe.config.load import from_yaml, load_config
from megapipe.config.megatron_flags import (
    ALREADY_SO,
    CLASSES,
    DELIBERATE_DIFFERENCES,
    NEUTRAL,
    SUPPORTED,
    WITHOUT,
    MegatronFlag,
    megatron_flags,
    removed_flags,
)
from megapipe.config.options import TAKES_VALUE
from megapipe.config.training import OptimizerConfig
from megapipe.errors import ConfigError
from tests.config.examples import job
from tools.write_flags_page import flags_document

ROWS = list(megatron_flags().values())

# flags of common launch scripts, including Megatron's own GPT-3 and Llama examples
HAS_TO_BE_SUPPORTED = """
    --pipeline-model-parallel-layout --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --microbatch-group-size-per-virtual-pipeline-stage --train-data-path --valid-data-path --test-data-path
    --data-cache-path --exit-interval --exit-duration-in-mins --skip-train --eval-interval --eval-iters
    --use-checkpoint-args --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler --no-load-optim
    --no-load-rng --no-save-optim --no-save-rng --exit-on-missing-checkpoint --log-params-norm --log-num-zeros-in-grad
    --log-throughput --timing-log-level --profile --profile-step-start --profile-step-end --profile-ranks
    --deterministic-mode --start-weight-decay --end-weight-decay --weight-decay-incr-style --decoupled-lr
    --decoupled-min-lr --rampup-batch-size --recompute-activations --recompute-granularity --recompute-method
    --recompute-num-layers --recompute-modules --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --grad-reduce-in-bf16 --sequence-parallel --tensor-model-parallel-size
    --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
    --bf16 --fp16 --swiglu --group-query-attention --num-query-groups --use-rope-scaling --rotary-base
    --rotary-percent --untie-embeddings-and-output-weights --normalization
"""


def test_the_table_has_all_flags_of_0_19_2_and_those_of_other_versions() -> None:
    assert len(ROWS) == 886
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_each_flag_is_in_one_class_and_has_a_note() -> None:
    for row in ROWS:
        assert row.kind in CLASSES, row
        assert row.name.startswith("--"), row
        assert row.name == row.name.replace("_", "-"), row
        assert row.values in ("", "1", "+"), row
        assert row.note, row


def test_supported_flags_are_those_of_our_fields() -> None:
    assert {row.name for row in ROWS if row.kind == SUPPORTED} == set(field_flags()) & set(megatron_flags())
    for row in ROWS:
        if row.kind == SUPPORTED:
            field, flag = field_flags()[row.name]
            assert row.note == field.key
            assert (takes_values(field, flag) == "") == (row.values == ""), row


def test_each_field_is_reached_by_a_flag() -> None:
    reached = {field.key for field, _ in field_flags().values()}
    assert reached == set(fields_by_key())


def test_flags_of_common_launch_scripts_are_supported() -> None:
    assert [name for name in HAS_TO_BE_SUPPORTED.split() if megatron_flags()[name].kind != SUPPORTED] == []


# of Megatron's script for DeepSeek-V3
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--kv-channels 8 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
    "--position-embedding-type rope --no-rope-fusion --normalization RMSNorm"
)


def test_the_rotary_flags_of_latent_attention_are_yarn_with_megatrons_original_length() -> None:
    model = load_config(job(LATENT, "--rope-type yarn")).config.model
    assert (model.rope_scaling_type, model.rope_scaling_factor) == ("yarn", 40.0)
    assert (model.yarn_mscale, model.yarn_mscale_all_dim, model.rope_original_max_position_embeddings) == (1, 1, 4096)
    assert model.attention_scale() == pytest.approx(12**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    longer = load_config(job(LATENT, "--yarn-original-max-position-embeddings 512")).config.model
    assert longer.rope_original_max_position_embeddings == 512
    with pytest.raises(ConfigError, match=r"--rotary-scaling-factor .*--rope-type"):
        load_config(job(LATENT, "--rope-type rope"))
    with pytest.raises(ConfigError, match=r"--rotary-scaling-factor .*--multi-latent-attention"):
        load_config(job("--position-embedding-type rope --rotary-scaling-factor 40"))
    plain = load_config(job("--position-embedding-type rope --rope-type rope")).config.model
    assert plain.rope_scaling_type == "none"


def test_the_same_name_has_the_same_default_unless_the_difference_is_listed() -> None:
    listed = {difference.flag for difference in DELIBERATE_DIFFERENCES}
    other = set()
    for field in all_fields():
        row = megatron_flags().get(field.main_flag)
        if row is None or field.option.required or field.kind.scalar is bool:
            continue
        default = field.default
        theirs = row.default or None
        ours = (
            None
            if default is None
            else " ".join(str(item) for item in default)
            if isinstance(default, tuple)
            else str(default)
        )
        if isinstance(default, int | float) and theirs is not None:
            same = float(default) == float(theirs)
        else:
            same = theirs in (ours, field.option.derived or None)
        if not same:
            other.add(field.main_flag)
    assert other <= listed, other - listed


def test_a_switch_of_megatron_is_off_unless_the_difference_is_listed() -> None:
    listed = {difference.flag for difference in DELIBERATE_DIFFERENCES}
    # fp32 main gradients are the default here and follow from --bf16 in Megatron; YaRN rounds there unless told not to
    same = {"--accumulate-allreduce-grads-in-fp32", "--yarn-correction-range-round-to-int"}
    for row in ROWS:
        if row.kind == SUPPORTED and row.values == "":
            field, flag = field_flags()[row.name]
            assert field.default != flag.value or row.name in {*listed, *same}, row.name


def test_every_difference_is_about_a_flag_of_ours() -> None:
    assert {difference.flag for difference in DELIBERATE_DIFFERENCES} <= set(field_flags())


def test_a_refused_flag_is_named_with_what_to_do_instead_and_whether_the_result_differs() -> None:
    for row in ROWS:
        if row.kind in WITHOUT:
            with pytest.raises(ConfigError) as error:
                read_command_line([row.name] if row.values == "" else [row.name, "unheard-of"])
            assert str(error.value).startswith(row.name + " ")
            assert str(error.value).endswith(f"{WITHOUT[row.kind]}; {row.note}")


def test_a_flag_at_megatrons_default_is_accepted() -> None:
    for row in ROWS:
        if row.kind != SUPPORTED and row.default:
            words = [row.name, *row.default.split()]
            assert read_command_line(words).accepted == (" ".join(words),)


def words_of(row: MegatronFlag) -> list[str]:
    """Return the flag with a value that is accepted."""
    value = {"int": "3", "float": "0.5"}.get(row.accepts[0], row.accepts[0]) if row.accepts else "anything"
    return [row.name] if row.values == "" else [row.name, value]


def test_accepted_flags_without_effect_are_remarked_in_one_line() -> None:
    rows = [row for row in ROWS if row.kind in (ALREADY_SO, NEUTRAL)]
    assert len(rows) > 400
    argv = [word for row in rows for word in words_of(row)]
    remarks = load_config([*job(), *argv]).remarks
    assert len(remarks) == 2
    assert remarks[0].startswith("flags of Megatron that change no result here (docs/flags.md): ")
    assert all(f" {' '.join(words_of(row))}" in remarks[0] for row in rows)
    assert remarks[1].startswith("defaults that differ from Megatron's: ")


def test_other_values_of_an_accepted_flag_are_refused() -> None:
    rows = [row for row in ROWS if row.kind in (ALREADY_SO, NEUTRAL) and row.accepts]
    assert len(rows) > 80
    for row in rows:
        words = f"{row.name} unheard-of: (megapipe accepts|expected a)"
        with pytest.raises(ConfigError, match=words):
            read_command_line([row.name, "unheard-of"])


def test_an_accepted_flag_takes_as_many_values_as_in_megatron() -> None:
    for row in ROWS:
        if row.kind in (ALREADY_SO, NEUTRAL):
            wrong = {"": ["x"], "1": [], "+": []}[row.values]
            with pytest.raises(ConfigError, match=f"^{row.name}"):
                read_command_line([row.name, *wrong])
            if row.values == "1":
                with pytest.raises(ConfigError, match=f"^{row.name} .*: expected one value, got 2"):
                    read_command_line([*words_of(row), "x"])


def test_the_defaults_that_differ_are_told_for_scripts_of_megatron_alone() -> None:
    told = "defaults that differ from Megatron's: "
    assert load_config(job()).remarks == ()
    assert [line[: len(told)] for line in load_config(job("--explain-defaults")).remarks] == [told]
    assert load_config(job("--use-mcore-models")).remarks[1].startswith(told)


def test_a_flag_outside_megatron_is_marked_as_ours() -> None:
    for name in (
        "--z-loss",
        "--activation",
        "--fp64",
        "--rank-order",
        "--metrics-file",
        "--keep-last",
        "--device",
        "--pipeline-schedule",
    ):
        assert name not in megatron_flags()


def test_a_gpt3_launch_script_for_megatron_runs_as_it_is() -> None:
    words = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-samples 146484375 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
    --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
    --lr-warmup-fraction .001 --lr-decay-samples 126953125 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16 --data-path my_text_document --vocab-file v.json --merge-file m.txt
    --tokenizer-type GPT2BPETokenizer --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000
    --save ckpt --load ckpt --eval-iters 10 --tensorboard-dir logs
""".replace("--lr-warmup-fraction .001 ", "")
    config = load_config(words.split()).config
    assert config.training.rampup_batch_size == (16, 16, 5859375)
    assert config.precision.dtype == "fp16"


def test_a_llama3_launch_script_for_megatron_runs_as_it_is() -> None:
    words = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout
    0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
    --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
    --calculate-per-token-loss --manual-gc-interval 0 --tensor-model-parallel-size 1 --context-parallel-size 1
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --data-path d
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model t --split 99,1,0 --no-create-attention-mask-in-dataloader
    --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60
    --save c --load c --tensorboard-dir t
"""
    loaded = load_config(words.split())
    assert [flag.split()[0] for flag in loaded.accepted] == [
        "--use-mcore-models",
        "--attention-backend",
        "--cross-entropy-loss-fusion",
        "--no-create-attention-mask-in-dataloader",
        "--ckpt-format",
    ]
    assert loaded.config.model.activation == "swiglu"


def test_files_named_in_notes_exist() -> None:
    repository = Path(__file__).parents[2]
    named = {path for row in ROWS for path in re.findall(r"\b(?:tools|launch|docs|configs)/[\w./-]*\w", row.note)}
    assert not [path for path in named if not (repository / path).exists()]


def test_the_document_of_flags_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "flags.md"
    assert page.read_text(encoding="utf-8") == flags_document(), (
        "generate it again: python tools/write_flags_page.py > docs/flags.md"
    )


def test_constants_of_flags_are_values_of_their_fields() -> None:
    for field, flag in field_flags().values():
        if flag.value is not TAKES_VALUE and field.option.choices:
            values = flag.value if isinstance(flag.value, tuple) else (flag.value,)
            assert set(values) <= set(field.option.choices), flag.name
        for name, constant in flag.also_sets:
            other = fields_by_key()[f"{field.section}.{name}"]
            assert not other.option.choices or constant in other.option.choices


@pytest.mark.parametrize("row", removed_flags().values(), ids=lambda row: row.name)
def test_a_flag_of_an_earlier_version_is_refused_with_what_holds_now(row: MegatronFlag) -> None:
    assert row.name not in field_flags() and row.name not in megatron_flags()
    name, *value = row.name.split()
    if not value and row.values:
        value = ["8"]
    with pytest.raises(ConfigError, match=re.escape(row.note)):
        load_config([*job(), name, *value])


def test_a_configuration_saved_by_an_earlier_version_loads_if_what_was_removed_was_not_in_use(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text("parallel:\n  pipeline_message_dtype: null\n")
    assert load_config([*job(), "--config", str(saved)]).config == load_config(job()).config
    saved.write_text("parallel:\n  pipeline_message_dtype: fp8\n")
    with pytest.raises(ConfigError, match="pipeline-message-dtype fp8 was removed"):
        load_config([*job(), "--config", str(saved)])


def test_a_model_saved_by_an_earlier_version_is_read_whatever_it_was_trained_with() -> None:
    of_optimizer = "optimizer:\n  lr: 0.5\n  exp_avg_dtype: fp8\n  main_params_dtype: fp32\n"
    text = f"parallel:\n  pipeline_message_dtype: fp8\n{of_optimizer}"
    assert from_yaml(text).optimizer == OptimizerConfig(lr=0.5)

"""Pairs of options that exclude each other: a command line meets each row of the table, and each option runs alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.config.rules.gpu import LACKING
from megapipe.config.rules.pairs import CONTRADICTION, NOT_BUILT, OPTIONS, REFUSED, Refusal
from megapipe.errors import ConfigError
from megapipe.extras.cli.plan import main
from megapipe.plan.resolve import resolve
from megapipe.plan.world_rules import REFUSED_BY_SCHEDULES, SCHEDULES_CHOSEN
from tests.config.examples import job
from tests.tables import rows

PIPELINE = "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 64 --disable-bias-linear"
LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
BASE = (
    "--position-embedding-type rope --hidden-size 64 --ffn-hidden-size 128 --num-layers 4 --device cuda "
    "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --global-batch-size 16"
)
NAMES = {"PIPELINE": PIPELINE, "EXPERTS": EXPERTS, "LATENT": LATENT}
EXAMPLES = dict(rows(Path(__file__).with_name("pair_examples.tsv"), NAMES))


def flags_of(*names: str) -> list[str]:
    """Return the command line of a small job with these options, in bf16 unless one gives a dtype."""
    flags = " ".join([BASE, *(EXAMPLES[name] for name in names)])
    return job(flags if "--dtype" in flags else f"{flags} --bf16")


MODULES, ATTENTION = "kernels.transformer_impl", "kernels.attention_impl"
OF_EXTENSIONS = {name for name in OPTIONS if name.endswith("of an extension")}  # tests/test_extend.py has some
ROWS = (*REFUSED, *REFUSED_BY_SCHEDULES)
PAIRS = [(row, other) for row in ROWS for other in row.others if not {row.option, other} & OF_EXTENSIONS]


@pytest.mark.parametrize(("row", "other"), PAIRS, ids=[f"{row.option} and {other}" for row, other in PAIRS])
def test_a_pair_in_the_table_is_refused_with_its_reason(row: Refusal, other: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(load_config(flags_of(row.option, other)).config, 8)
    (line,) = [line for line in str(error.value).splitlines() if f": {row.reason}; " in line]
    assert line.endswith(row.way) and (" yet: " in line) == (row.kind == NOT_BUILT)


def test_every_option_is_named_in_a_row_and_has_an_example() -> None:
    named = {name for row in ROWS for name in (row.option, *row.others)}
    named.add("multi-token prediction")  # one of the parts in "fp8 of parts without its modules"
    assert named.union(*LACKING.values()) == set(OPTIONS) | set(SCHEDULES_CHOSEN) == set(EXAMPLES) | OF_EXTENSIONS
    assert {row.kind for row in ROWS} == {CONTRADICTION, NOT_BUILT}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name in OPTIONS])
def test_an_option_alone_is_accepted_and_no_other_configuration_has_it(name: str) -> None:
    chooses, plain = OPTIONS[name], load_config(flags_of()).config
    found = load_config(flags_of(name)).config
    assert chooses(found) and not chooses(plain)
    assert str(chooses(found)).startswith("-")


@pytest.mark.parametrize("name", sorted(set(LACKING[MODULES]) - OF_EXTENSIONS))
def test_what_transformer_engine_lacks_is_computed_by_our_own_kernels_and_said(name: str) -> None:
    library = ("--transformer-impl", "transformer_engine")
    loaded = load_config([*flags_of(name), *library])
    assert any(LACKING[MODULES][name] in remark for remark in loaded.remarks)
    assert resolve(loaded.config, 8).config.kernels.transformer_impl == "local"
    kept = load_config([*flags_of(), *library])
    assert resolve(kept.config, 8).config.kernels.transformer_impl == "transformer_engine"
    assert not any(LACKING[MODULES][name] in remark for remark in kept.remarks)


def test_a_plan_says_which_modules_compute(capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of("sharded gradients")
    assert main(["--world-size", "8", *flags, "--transformer-impl", "transformer_engine"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert LACKING[MODULES]["sharded gradients"] in first and second.startswith("plan: 8 ranks")


@pytest.mark.parametrize("name", LACKING[ATTENTION])
def test_what_attention_of_a_library_lacks_is_computed_by_torch_and_said(name: str) -> None:
    loaded = load_config([*flags_of(name), "--attention-impl", "flash"])
    assert any(LACKING[ATTENTION][name] in remark for remark in loaded.remarks)
    assert resolve(loaded.config, 8).config.kernels.attention_impl == "sdpa"
    assert resolve(load_config([*flags_of(), "--attention-impl", "flash"]).config, 8).shape.attention_impl == "flash"

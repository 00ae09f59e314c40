"""Public Megatron-LM launch scripts and NVIDIA's functional tests: how many run here as they are."""

from __future__ import annotations

import re

import pytest

from megapipe.extras.migrate.judge import judge
from megapipe.extras.migrate.shell_script import read_script
from tests.extras.migrate.public_scripts import (
    END,
    EXAMPLE,
    FOLDERS,
    PAGE,
    example,
    functional_tests,
    public_scripts,
    table,
)

SCRIPTS = {script.name: script for script in public_scripts()}
MIXTURES = {script.name: script for script in public_scripts("scripts_of_experts")}
MIXTURES_THAT_RUN = (
    "nvidia_fsdp_deepseek_v3 nvidia_gpt_oss_20b nvidia_mixtral_8x7b nvidia_test_fp8_mtp nvidia_test_fsdp "
    "nvidia_test_muon nvidia_test_sinkhorn primus_deepseek_v2_lite primus_mixtral_8x7b primus_qwen3_30b "
    "rocm_mixtral_8x7b swissai_mixtral_8x7b zoo_deepseek_v2_lite zoo_deepseek_v3_b200 zoo_deepseek_v3_gb200 "
    "zoo_deepseek_v3_h100 zoo_deepseek_v3_proxy zoo_mixtral_8x22b_fp8 zoo_mixtral_8x2b zoo_mixtral_8x7b "
    "zoo_qwen3_235b_gb200 zoo_qwen3_235b_h100 zoo_qwen3_30b"
).split()
RUN_AS_THEY_ARE = (
    "alibaba_gpt3_7b aws_gpt3 aws_llama2_70b azure_gpt3_175b azure_gpt3_175b_aks bigscience_gpt2 hygon_llama2_7b "
    "hygon_llama3_70b hygon_qwen3_14b lumiopen_viking_7b nvidia_gpt3_175b nvidia_gpt3_175b_2024 "
    "nvidia_llama3_8b_fp8 rocm_llama3_70b rocm_qwen2 surf_1_7b"
).split()


@pytest.mark.parametrize("name", RUN_AS_THEY_ARE)
def test_a_public_script_runs_as_it_is(name: str) -> None:
    migration = SCRIPTS[name].migration()
    assert migration.to_change == ()
    assert migration.runs


@pytest.mark.parametrize("name", MIXTURES)
def test_a_public_script_of_a_mixture_runs_or_names_what_to_change(name: str) -> None:
    migration = MIXTURES[name].migration()
    assert migration.runs == (name in MIXTURES_THAT_RUN), migration.to_change
    assert migration.runs == (not migration.to_change)


def test_the_share_of_public_scripts_of_mixtures_is_on_the_page() -> None:
    assert len(MIXTURES) >= 24
    text = f"{len(MIXTURES_THAT_RUN)} of {len(MIXTURES)} scripts of mixtures run as they are"
    assert text in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_has_the_verdict_on_every_repository(folder: str) -> None:
    written = PAGE.read_text(encoding="utf-8").partition(FOLDERS[folder])[2].partition(END)[0]
    assert written == table(folder), "write it again: python -m tests.extras.migrate.public_scripts"


def test_the_page_shows_a_real_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert EXAMPLE.search(page) is not None
    assert example(page) == page, "write it again: python -m tests.extras.migrate.public_scripts"


def test_every_script_names_its_source_and_a_free_licence() -> None:
    for script in (*SCRIPTS.values(), *MIXTURES.values()):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+ \S+", script.source), script.name
        assert re.fullmatch(r"[0-9a-f]{40}", script.commit), script.name
        assert re.match(r"MIT|Apache-2|Megatron-LM licence \(BSD", script.licence), script.name


def test_the_share_of_functional_tests_accepted_is_on_the_page() -> None:
    tests = functional_tests()
    accepted = {name for name, arguments in tests.items() if runs(arguments)}
    distinct = {tuple(arguments) for arguments in tests.values()}
    runs_distinct = {tuple(tests[name]) for name in accepted}
    share = f"{len(accepted)} of {len(tests)} ({len(runs_distinct)} of {len(distinct)} that differ)"
    assert share in PAGE.read_text(encoding="utf-8")
    assert len(accepted) / len(tests) > 70 / 115


def runs(arguments: list[str]) -> bool:
    """Return True if these arguments, whose paths are variables, run as they are."""
    words = " ".join(f"'{word}'" if not word.startswith("$") else word for word in arguments)
    (call,) = read_script(f"torchrun pretrain_gpt.py {words}").calls
    return judge(call.arguments).runs

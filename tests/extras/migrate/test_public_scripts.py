"""Public Megatron-LM launch scripts and NVIDIA's functional tests: how many run here as they are."""

from __future__ import annotations

import re

import pytest

from megapipe.extras.migrate.judge import judge
from megapipe.extras.migrate.shell_script import read_script
from tests.extras.migrate.public_scripts import (
    BEGIN,
    END,
    EXAMPLE,
    PAGE,
    example,
    functional_tests,
    public_scripts,
    table,
)

SCRIPTS = {script.name: script for script in public_scripts()}
RUN_AS_THEY_ARE = (
    "alibaba_gpt3_7b aws_gpt3 aws_llama2_70b azure_gpt3_175b azure_gpt3_175b_aks bigscience_gpt2 hygon_llama2_7b "
    "hygon_llama3_70b hygon_qwen3_14b lumiopen_viking_7b nvidia_gpt3_175b_2024 nvidia_llama3_8b_fp8 surf_1_7b"
).split()


@pytest.mark.parametrize("name", RUN_AS_THEY_ARE)
def test_a_public_script_runs_as_it_is(name: str) -> None:
    migration = SCRIPTS[name].migration()
    assert migration.to_change == ()
    assert migration.runs


def test_the_page_has_the_verdict_on_every_script() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert written == table(), "write it again: python -m tests.extras.migrate.public_scripts"


def test_the_page_shows_a_real_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert EXAMPLE.search(page) is not None
    assert example(page) == page, "write it again: python -m tests.extras.migrate.public_scripts"


def test_every_script_names_its_source_and_a_free_licence() -> None:
    for script in SCRIPTS.values():
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

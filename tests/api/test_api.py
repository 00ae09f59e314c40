"""The public API: one list, imported lazily, described on one page whose examples run."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megapipe
from megapipe.api.config import Config
from megapipe.api.planning import make_plan, make_schedule
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.plan.report import plan_text
from megapipe.schedule.families import SCHEDULES
from tests.train.jobs import TINY
from tools.write_config_types import options_text

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_page_lists_what_is_public() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted(megapipe.__all__)
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)", PAGE, re.MULTILINE))
    errors = {
        name
        for name in megapipe.__all__
        if inspect.isclass(getattr(megapipe, name)) and issubclass(getattr(megapipe, name), MegapipeError)
    }
    assert documented | errors == set(megapipe.__all__)


def test_every_public_name_has_a_docstring_and_annotations() -> None:
    for name in megapipe.__all__:
        value = getattr(megapipe, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value) and value.__module__.startswith("megapipe.api"):
            for member, function in vars(value).items():
                if inspect.isfunction(function) and not member.startswith("_"):
                    assert inspect.getdoc(function) and "return" in function.__annotations__, f"{name}.{member}"


def test_no_public_name_is_a_package() -> None:
    packages = {path.stem for path in (REPOSITORY / "megapipe").iterdir()}
    assert not packages & set(megapipe.__all__)


def test_importing_megapipe_is_instant_and_planning_again_needs_no_torch() -> None:
    make_plan(Config.from_flags(TINY), 2)  # traces its layers
    code = (
        "import sys, megapipe\n"
        "assert not {'torch', 'numpy', 'megapipe.config'} & set(sys.modules)\n"
        "from megapipe import plan, schedule\n"
        "from megapipe import Config, make_plan, make_schedule, plan_text\n"
        f"make_plan(Config.from_flags({TINY!r}), 2); make_schedule('zb-v', 2, 4).draw()\n"
        "assert plan.__name__ == 'megapipe.plan' and schedule.__name__ == 'megapipe.schedule'\n"
        "assert 'torch' not in sys.modules and 'Trainer' in dir(megapipe)\n"
        "try: megapipe.Trainr\n"
        "except AttributeError as error: assert 'Trainer' in str(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_none_unsets_a_list() -> None:
    config = megapipe.Config(recompute_granularity="selective", recompute_modules=["layernorm"], window_size=8)
    unset = config.replace(recompute_modules=None, window_size=None).values
    assert (unset.recompute.recompute_modules, unset.model.window_size) == (("core_attn",), None)
    balanced = config.replace(num_experts=4, moe_router_load_balancing_type=None).values
    assert balanced.model.moe_router_load_balancing_type == ("none",)  # one of its values


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {"__name__": "page"})
    assert (tmp_path / "zb-h1.svg").read_text().startswith("<svg")


def test_keywords_flags_and_yaml_give_the_same_configuration(tmp_path: Path) -> None:
    options = {
        "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, "lr": 1e-3, "bf16": True,
        "fp16": False, "add_bias_linear": False, "data_path": ["a", "0.5"], "split": None, "save": tmp_path,
        "recompute_modules": ("mlp",),
    }  # fmt: skip
    config = Config(**options)
    words = (
        "--num-layers 4 --hidden_size 16 --num-attention-heads=4 --seq-length 8 --lr 0.001 --bf16 --disable-bias-linear"
    )
    flags = Config.from_flags(f"{words} --data-path a 0.5 --split none --recompute-modules mlp --save {tmp_path}")
    assert config == flags and hash(config) == hash(flags) and config.values.precision.dtype == "bf16"
    assert config.values.data.data_path == ("a", "0.5") and config.values.model.add_bias_linear is False
    assert Config(num_query_groups=2, num_attention_heads=4).values.model.num_query_groups == 2
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert Config.from_yaml(tmp_path / "run.yaml") == config != config.replace(num_layers=8)
    assert Config.from_yaml(tmp_path / "run.yaml", num_layers=8) == config.replace(num_layers=8)


def test_all_mistakes_of_a_configuration_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(num_layer=4, hidden_size="wide", lr=-1, bf16="yes", split=True)
    assert str(caught.value).splitlines() == [
        "unknown option num_layer; did you mean num_layers? (docs/flags.md lists all flags)",
        "hidden_size wide: expected a whole number, at least 1",
        "lr -1: expected a value above 0",
        "bf16 takes no value, but yes follows it",
        "split true: expected up to three numbers of at least 0 (training, validation, test), not all 0, such as "
        "969,30,1",
    ]
    for options, message in (
        ({"plan": True}, "plan is a request of the command line, not an option of a run"),
        ({"help": True}, "help is a request of the command line"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(**options)
    with pytest.raises(ConfigError, match="needs the path of a YAML file"):
        Config.from_yaml()


def test_the_types_of_options_are_those_of_the_flags() -> None:
    written = REPOSITORY / "megapipe" / "api" / "options.pyi"
    command = "python tools/write_config_types.py > megapipe/api/options.pyi"
    assert written.read_text("utf-8") == options_text(), f"run: {command}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mypy_finds_a_misspelt_option_and_a_value_of_another_type(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from megapipe import Config\n"
        "config = Config(num_layers=12, hiden_size=3, bf16=True, data_path=['a', 'b'], lr=6e-4, save='runs')\n"
        "config = config.replace(lr='high', tensor_model_parallel_size=2)\n"
        "config = Config.from_yaml('a.yaml', attention_impl='flush', save_interval=None)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(script)]
    environment = os.environ | {"MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    errors = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    assert len(errors) == 3, done.stdout + done.stderr
    assert 'did you mean "hidden_size"' in errors[0] and '"lr"' in errors[1] and '"attention_impl"' in errors[2]


def test_a_plan_is_that_of_the_command_line() -> None:
    plan = make_plan(Config.from_flags(TINY).replace(pipeline_model_parallel_size=2), 4)
    assert (plan.topology.pp, plan.topology.dp, plan.schedule_name) == (2, 2, "1f1b")
    assert "4 ranks = tp 1 x pp 2 x dp 2" in plan_text(plan)
    with pytest.raises(ConfigError, match="a world of 3 ranks cannot hold"):
        make_plan(Config.from_flags(TINY).replace(pipeline_model_parallel_size=2), 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_proven_simulated_and_drawn(name: str) -> None:
    schedule = make_schedule(name, 2, 4)
    assert schedule.name == name and len(schedule.rows) == 2 and str(schedule.rows[0][0]).endswith("F0")
    assert schedule.validate().num_actions > 16
    timeline = schedule.simulate(1.0, 2.0, 3.0)
    assert timeline.makespan_seconds >= 4 * 6.0 and 0.0 <= timeline.barrier_bubble.share < 0.8
    assert len(schedule.draw().splitlines()) >= 2 and schedule.svg().startswith("<svg")
    if not SCHEDULES[name].is_mirrored(2):  # whose placement a CSV does not say
        assert from_csv(schedule.csv()).rows == schedule.rows


def test_wrong_arguments_of_a_schedule_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory_limit is for zb-auto"):
        make_schedule("1f1b", 2, 4, memory_limit=2)
    assert make_schedule("zb-auto", 2, 4, memory_limit=2).simulate().peak_live_chunks <= (2, 2)
    with pytest.raises(ConfigError, match=r"zb-v .*2 stages per rank, .*1"):
        make_schedule("zb-v", 2, 4, chunks=1)
    with pytest.raises(ConfigError, match="transfer -1: expected seconds, at least 0"):
        make_schedule("1f1b", 2, 4).simulate(transfer=-1)

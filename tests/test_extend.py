"""Extensions: how they are found, what they may register, and the examples, which train and equal one process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.checkpoint.folder import find_checkpoint, saved_config
from megapipe.checkpoint.manifest import read_manifest
from megapipe.config.files import DATASETS
from megapipe.config.load import load_config
from megapipe.config.model import ACTIVATIONS, ATTENTIONS, AttentionHeads
from megapipe.config.training import UpdateKind
from megapipe.data.batch import Batch, DocumentRules
from megapipe.data.registered import DatasetPart, RegisteredDataset
from megapipe.errors import ConfigError, DataError
from megapipe.extend import Action, Op, Placement, Shape, register_schedule, two_directions
from megapipe.extras.cli.schedule import main as schedule_command
from megapipe.extras.dry_run.rank import STATE, count_rank, random_reader
from megapipe.model.registered import replayed
from megapipe.optimizer.registered import try_rule
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.registry import BUILT_IN, EXTENSIONS, Registry
from megapipe.schedule.families import SCHEDULES, build_lowered
from megapipe.schedule.generate.split_backward import dualpipe
from megapipe.tokenizers.tokenizer import build_tokenizer, checked
from tests.extras.dry_run.grids import make_plan
from tests.extras.verify.grids import compared
from tests.harness import run_ranks
from tests.tables import rows, value
from tests.tiny import tiny_config
from tests.train.jobs import TINY, job, job_on_rank, steps_of

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = {
    "schedule": ["schedule eager-1f1b", "schedule waves"],
    "layer": ["norm lp-norm", "activation gated-relu2", "attention kind sigmoid"],
    "mixer": ["attention kind decay"],
    "update_rule": ["update rule lion"],
    "matrix_rule": ["update rule whitened"],
    "dataset": ["data set sums"],
    "tokenizer": ["tokenizer characters"],
    "logger": ["logger csv"],
}
LAYER = {"normalization": "lp-norm", "activation": "gated-relu2", "attention_kind": "sigmoid"}
PREFIX = "from megapipe.extend import *\n"


def example(name: str) -> str:
    return str(EXAMPLES / f"extend_{name}.py")


def written(tmp_path: Path, text: str, name: str = "mine.py") -> str:
    (tmp_path / name).write_text(PREFIX + text)
    return str(tmp_path / name)


def test_the_page_links_the_examples_and_shows_parts_as_they_are() -> None:
    page = (EXAMPLES.parent / "docs" / "extend.md").read_text()
    assert [name for name in NAMES if f"](../examples/extend_{name}.py)" not in page] == []
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    texts = [Path(example(name)).read_text() for name in NAMES]
    assert blocks and all(any(block in text for text in texts) for block in blocks)


# finding and loading


@pytest.mark.parametrize("name", NAMES)
def test_an_example_registers_its_names_and_is_short(name: str) -> None:
    assert list(EXTENSIONS.load(example(name)).provides) == NAMES[name]
    assert len(Path(example(name)).read_text().splitlines()) < 80


WRONG = {name: (value(text), said) for name, text, said in rows(Path(__file__).with_name("wrong_extensions.tsv"))}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_extension_is_refused_with_its_place_and_leaves_nothing_behind(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    before = [len(registry) for registry in Registry.every]
    with pytest.raises(ConfigError, match=message):
        EXTENSIONS.load(written(tmp_path, text))
    assert [len(registry) for registry in Registry.every] == before and not EXTENSIONS.loaded


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match="not a regular file"):
        EXTENSIONS.load(str(tmp_path / "pipe.py"))


def test_two_extensions_with_one_name_are_both_named(tmp_path: Path) -> None:
    one, two = (written(tmp_path, "register_norm('a')(print)", name) for name in ("one.py", "two.py"))
    EXTENSIONS.load(one)
    with pytest.raises(ConfigError, match=r"norm 'a' of \S*two.py .*\S*one.py"):
        EXTENSIONS.load(two)


def test_a_file_is_run_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = written(tmp_path, "register_activation('a', is_gated=False)(print)")
    assert EXTENSIONS.load(path) is EXTENSIONS.load(path)
    written(tmp_path, "register_activation('a', is_gated=True)(print)")
    EXTENSIONS.load(path)
    assert ACTIVATIONS["a"].is_gated


def test_flags_and_yaml_files_add_up_and_may_use_the_names(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"extension: [{example('schedule')}]\npipeline_schedule: eager-1f1b\n")
    flags = f"--config {tmp_path / 'c.yaml'} --extension {example('layer')} --extension={example('logger')}"
    config = load_config([*flags.split(), "--normalization", "lp-norm", "--logger", "csv"], is_job=False).config
    assert config.training.extension == tuple(map(example, ("schedule", "layer", "logger")))
    assert (config.model.normalization, config.logging.logger) == ("lp-norm", ("csv",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--extension /no/such.py", r"--extension /no/such.py: cannot be read: No such file or directory"),
        ("--extension no.such.module", "--extension no.such.module: ModuleNotFoundError"),
        ("--normalization lp-norm", r"LayerNorm, RMSNorm or .*--extension FILE\.py"),
        ("--pipeline-schedule eager-1f1b", "choose auto, naive"),
        ("--dataset sums", r"choose one .*--extension FILE\.py"),
    ],
)
def test_a_name_without_its_extension_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load_config([*TINY.split(), "--train-iters", "1", *flags.split()]).config, 1)


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: str) -> None:
    """Put a package with entry points on the path."""
    folder = tmp_path / "of_extensions-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: of-extensions\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text(f"[megapipe.extensions]\n{entries}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(EXTENSIONS, "_has_installed", False)
    monkeypatch.setattr(EXTENSIONS, "failures", [])


def test_entry_points_are_loaded_only_for_names_that_nothing_else_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "register_norm('installed-norm')(print)", "installed_good.py")
    written(tmp_path, "raise RuntimeError('no driver')", "installed_bad.py")
    installed(tmp_path, monkeypatch, "bad = installed_bad\ngood = installed_good")
    words = [*TINY.split(), "--train-iters", "1"]
    load_config([*words, "--normalization", "RMSNorm"])
    assert not EXTENSIONS.loaded and not EXTENSIONS.failures
    load_config([*words, "--normalization", "installed-norm"])
    assert list(EXTENSIONS.loaded) == ["installed_good of of-extensions 1.2"]
    with pytest.raises(ConfigError, match=r"installed_bad of of-extensions 1.2.*no driver"):
        load_config([*words, "--normalization", "another"])


def test_commands_without_a_configuration_load_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "eager-1f1b", "-p", "4", "-m", "8", "--extension", example("schedule")]
    assert schedule_command(words) == 0
    assert "valid" in capsys.readouterr().out


# schedules


def test_the_example_schedule_runs_further_ahead_than_1f1b() -> None:
    EXTENSIONS.load(example("schedule"))
    row = build_lowered("eager-1f1b", 4, 1, 8).compute_only().rows[0]
    assert [str(action) for action in row[:7]] == ["0F0", "0F1", "0F2", "0F3", "0F4", "0F5", "0F6"]
    assert SCHEDULES["eager-1f1b"].is_synchronous and SCHEDULES.origin("eager-1f1b") != BUILT_IN


def test_the_example_of_waves_is_hanayo() -> None:
    EXTENSIONS.load(example("schedule"))
    for shape in ((4, 2, 8), (3, 4, 5)):
        assert build_lowered("waves", *shape).rows == build_lowered("hanayo", *shape).rows


def directions_of_my_own(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """Compare DualPipe under another name, its placement in a function of its own, with one process."""
    properties = {"placement": two_directions, "splits_backward": True, "counts": SCHEDULES["dualpipe"].counts}
    register_schedule("mine", "", **properties)(dualpipe)
    steps, report = compared(rank, world_size, tiny_config(**options, pipeline_schedule="mine"), "fp64")
    return len(steps), all(step.passes for step in steps), report


def test_copies_of_a_stage_are_summed_whatever_function_has_placed_them() -> None:
    options = {"pp": 2, "global_batch_size": 8, "zero": True}
    found = run_ranks(directions_of_my_own, 2, options)[0]
    assert found[:2] == (3, True), found[2]


def test_an_embedding_at_ends_that_its_group_does_not_hold_is_refused() -> None:
    EXTENSIONS.loading = "test"
    try:
        register_schedule("rotated", "", placement=lambda p, v: Placement(p, rotated_ranks(p)))(rotated)
        message = "--pipeline-schedule rotated, which has the first stage on pp_rank 0 and the last on 1"
        with pytest.raises(ConfigError, match=message):
            resolve(tiny_config(pp=4, num_layers=4, pipeline_schedule="rotated"), 4)
        options = {"pp": 4, "num_layers": 4, "pipeline_schedule": "rotated"}
        resolve(tiny_config(**options, untie_embeddings_and_output_weights=True), 4)
    finally:
        EXTENSIONS.loading = None
        EXTENSIONS.unload("test")


def rotated_ranks(num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of the stages: the last is on rank 1."""
    return (0, *range(2, num_ranks), 1)


def rotated(shape: Shape) -> list[list[Action]]:
    """All forwards, then all backwards."""
    stages = [rotated_ranks(shape.num_ranks).index(rank) for rank in range(shape.num_ranks)]
    return [[Action(s, op, m) for op in (Op.F, Op.B) for m in range(shape.num_microbatches)] for s in stages]


# norms, activations, attention


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[..., 0], r"norm 'a' returned \[2\] in torch.float32, expected \[2, 3\] in torch.float32"),
        (lambda x: x.double(), "expected .* in torch.float32"),
        (lambda x: 1.0, "norm 'a' returned float, not a tensor"),
        (lambda x: x.mul_(2), "norm 'a' changed its input in place"),
    ],
)
def test_a_function_with_a_wrong_result_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replayed(function, "norm 'a'", (2, 3), torch.ones(2, 3))


def test_replayed_functions_have_autograds_gradients_and_keep_their_inputs_alone() -> None:
    EXTENSIONS.load(example("layer"))
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    heads, mask = AttentionHeads(0.5, range(3), 3), torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    function = ATTENTIONS["sigmoid"].function
    assert function is not None
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = replayed(lambda q, k, v: function(q, k, v, mask, heads), "a", (2, 3, 5, 4), q, k, v)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (q, k, v)}
    gradients = torch.autograd.grad(output.square().sum(), (q, k, v))
    expected = torch.autograd.grad(function(q, k, v, mask, heads).square().sum(), (q, k, v))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "bf16": (1, {"dtype": "bf16", "num_query_groups": 2}),
    "sequence parallel, recompute": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
        | {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "activation")},
    ),
    "split backward": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "qk_layernorm": True}),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_the_planned_memory_of_the_example_layer_is_the_counted_one(grid: str) -> None:
    EXTENSIONS.load(example("layer"))
    world_size, changes = GRIDS[grid]
    plan = make_plan(world_size, {"hidden_dropout": 0.0, "device": "cpu", **LAYER, **changes})
    counted = count_rank(plan, 0, random_reader(plan), "cpu")
    memory = rank_memory(plan, 0)
    assert {item: counted.items[item] for item in STATE} == {item: memory.items.get(item, 0) for item in STATE}
    assert counted.peak == pytest.approx(memory.total, rel=0.05), (counted, dict(memory.items))


# update rules


def lion_like(weights: torch.Tensor, gradient: torch.Tensor, states: dict[str, torch.Tensor], step: Any) -> None:
    states["m"].lerp_(gradient, 0.1)
    weights.sub_(states["m"], alpha=step.lr)


def replaces(weights: Any, gradient: Any, states: Any, step: Any) -> None:
    states["m"] = torch.zeros(3)


def normalizes(weights: Any, gradient: Any, states: Any, step: Any) -> None:
    weights.sub_(gradient / gradient.norm())


def scales_gradient(weights: Any, gradient: Any, states: Any, step: Any) -> None:
    weights.sub_(gradient.mul_(0.5))


def adds_state(weights: Any, gradient: Any, states: Any, step: Any) -> None:
    weights.sub_(states.setdefault("v", torch.ones_like(gradient)))


def returns(weights: Any, gradient: Any, states: Any, step: Any) -> Any:
    return weights - gradient


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (replaces, r"state 'm' of shape \[64\] was replaced by one of shape \[3\]; write states in place"),
        (normalizes, "is not elementwise: weights differ when it updates a tensor in two parts"),
        (scales_gradient, "changed the gradient"),
        (adds_state, "adds the state v, which it does not declare"),
        (returns, "left the weights as they were"),
        (lambda *arguments: 1 / 0, "failed on a trial: ZeroDivisionError"),
    ],
)
def test_a_rule_that_cannot_be_applied_to_parts_is_refused(rule: Callable[..., None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        try_rule("mine", UpdateKind(("m",), update=rule), {})
    try_rule("mine", UpdateKind(("m",), update=lion_like), {})


def test_the_planned_memory_of_the_example_rule_is_the_counted_one() -> None:
    EXTENSIONS.load(example("update_rule"))
    plan = make_plan(1, {"optimizer": "lion", "device": "cpu", "hidden_dropout": 0.0, "dtype": "bf16"})
    counted, memory = count_rank(plan, 0, random_reader(plan), "cpu"), rank_memory(plan, 0)
    assert memory.items["optimizer"] == counted.items["optimizer"] > 0
    assert counted.peak == pytest.approx(memory.total, rel=0.05)


# data sets and tokenizers


class Data:
    """A data set whose samples are `sample`."""

    def __init__(self, sample: Any, length: int = 5) -> None:
        self.value, self.length = sample, length

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> Any:
        return self.value(index) if callable(self.value) else self.value


PART = DatasetPart("train", 12, seq_length=3, vocab_size=10, seed=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data([1, 2, 3]), r"--dataset d, part train: sample \d is \[3\] of int64; expected 4 token ids"),
        (Data([1, 2, 3, 4.5]), r"sample \d is \[4\] of float64; expected 4 token ids"),
        (Data([1, 2, 3, 10]), r"sample \d has token 10, the vocabulary has 10"),
        (Data(lambda index: {}[index]), r"sample \d: KeyError"),
        (Data([], length=0), "is empty, but the run takes 12 samples"),
        ([1, 2], "list has no sample"),
    ],
)
def test_a_wrong_data_set_is_refused(data: Any, message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        RegisteredDataset("d", PART, lambda part: data)[0]


def test_a_wrong_loss_mask_is_refused() -> None:
    for found in ([1, 1, 1], [1, 1, 1, 2]):
        with pytest.raises(DataError, match=r"loss mask of sample \d .* 4 numbers"):
            RegisteredDataset("d", PART, lambda part, found=found: Data(([1, 2, 3, 4], found)), has_loss_mask=True)[0]


def test_epochs_hold_each_sample_once_in_orders_of_the_seed() -> None:
    dataset = RegisteredDataset("d", PART, lambda part: Data(lambda index: [index] * 4, length=6))
    first, second = ([int(dataset[i][0]) for i in epoch] for epoch in (range(6), range(6, 12)))
    assert sorted(first) == sorted(second) == list(range(6)) and first != second
    plain = RegisteredDataset("d", PART, lambda part: Data(lambda index: [index] * 4, length=6), shuffle=False)
    assert [int(plain[i][0]) for i in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_the_example_data_set_masks_its_questions() -> None:
    EXTENSIONS.load(example("dataset"))
    dataset = DATASETS["sums"].build(DatasetPart("train", 4, seq_length=31, vocab_size=257, seed=1))
    sample = dataset[0]
    assert np.array_equal(sample, dataset[0]) and sample.shape == (2, 32)
    text = "".join(chr(token) if token < 256 else "|" for token in sample[0])
    trained = "".join(chr(token) if token < 256 else "|" for token in sample[0][sample[1] == 1])
    question, answer = text.split("|")[0].split("=")
    assert eval(question) == int(answer) and trained.split("|")[0] == answer
    batch = Batch.of(sample[None], (0,), DocumentRules())
    assert batch.loss_mask is not None and np.array_equal(batch.loss_mask[0], sample[1][1:])
    assert np.array_equal(batch.labels[0], sample[0][1:])


def test_the_example_tokenizer_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    EXTENSIONS.load(example("tokenizer"))
    (tmp_path / "letters.txt").write_text("hello world")
    tokenizer = build_tokenizer("characters", str(tmp_path / "letters.txt"))
    assert tokenizer.decode(tokenizer.encode("hold?")) == "hold\ufffd" and tokenizer.vocab_size == 10
    tokenizer.save(tmp_path / "saved")
    assert build_tokenizer("characters", str(tmp_path / "saved")).encode("low") == tokenizer.encode("low")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 3}, "token 4 is outside its vocab_size of 3 tokens"),
        ({"eod": 5}, "token 5 is outside"),
        ({"decode": None}, "has no decode"),
    ],
)
def test_a_wrong_tokenizer_is_refused(changes: dict[str, Any], message: str) -> None:
    members = {"vocab_size": 5, "encode": lambda self, text: [4], "decode": lambda self, ids: "", **changes}
    kind = type("Mine", (), {name: value for name, value in members.items() if value is not None})
    with pytest.raises(ConfigError, match=f"--tokenizer-type mine: .*{message}"):
        checked(kind(), "mine")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("".join(map(chr, range(65, 115))))
    flags = f"--extension {example('tokenizer')} --tokenizer-type characters --tokenizer-model {tmp_path}/letters.txt"
    code, said = job(f"{flags} --train-iters 1")
    assert code == 2 and "--vocab-size 32 is smaller than the 52 tokens" in said


# whole jobs


def with_extensions(rank: int, world_size: int, names: tuple[str, ...], options: dict[str, Any]) -> Any:
    """Compare a grid with one process."""
    for name in names:
        EXTENSIONS.load(example(name))
    steps, report = compared(rank, world_size, tiny_config(**options), "fp64")
    return len(steps), all(step.passes for step in steps), report


def test_the_examples_on_tp2_pp2_equal_one_process() -> None:
    options = {"tp": 2, "sp": True, "pp": 2, "num_query_groups": 2, "zero": True, **LAYER}
    options |= {"pipeline_schedule": "eager-1f1b", "optimizer": "lion", "optimizer_options": ("beta2=0.9",)}
    found = run_ranks(with_extensions, 4, ("schedule", "layer", "update_rule"), options)[0]
    assert found[:2] == (3, True), found[2]


def test_a_rule_over_matrices_equals_one_process_on_tp2_dp2() -> None:
    options = {
        "tp": 2,
        "sp": True,
        "num_query_groups": 2,
        "zero": True,
        "activation": "swiglu",
        "optimizer": "whitened",
    }
    found = run_ranks(with_extensions, 4, ("matrix_rule",), options)[0]
    assert found[:2] == (3, True), found[2]


def test_a_rule_over_matrices_returns_a_matrix_of_the_same_shape(tmp_path: Path) -> None:
    mine = written(tmp_path, "register_matrix_rule('flat')(lambda momentum, step: momentum[:, 0])")
    code, said = job(f"--extension {mine} --optimizer flat --train-iters 1")
    assert code == 2 and "update rule 'flat' returned [" in said and "return a tensor of that shape" in said


def test_the_examples_train_on_tp2_pp2_and_resume_on_one_rank(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(Path(example("layer")).read_text())
    loaded = " ".join(f"--extension {path}" for path in (example("schedule"), example("update_rule"), mine))
    model = "--normalization lp-norm --activation gated-relu2 --attention-kind sigmoid --attention-dropout 0"
    base = f"{loaded} {model} --optimizer lion --hidden-dropout 0 --lr-decay-style constant --save {tmp_path}/run"
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule eager-1f1b"
    said, kind, text = run_ranks(job_on_rank, 4, f"{base} {grid} --train-iters 3")[0]
    assert (kind, text) == ("", None)
    assert re.search(rf"extension {mine} \(sha256 \w{{12}}\): norm lp-norm, activation gated-relu2", said)
    (folder,) = tmp_path.glob("run/step_*3")
    saved = read_manifest(folder).state["extensions"]
    assert [one["provides"][0] for one in saved] == ["schedule eager-1f1b", "update rule lion", "norm lp-norm"]
    mine.write_text(mine.read_text() + "# changed\n")
    code, said = job(f"{base} --load {tmp_path}/run --train-iters 5")
    assert code == 0 and "continuing after step 3" in said
    assert re.search(
        rf"extension {mine} .* is not the {mine} .* norm lp-norm, activation gated-relu2, .* may be something else",
        said,
    )
    losses = [line["loss"] for line in steps_of(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 5 and losses[-1] < losses[0]
    for name in list(EXTENSIONS.loaded):
        EXTENSIONS.unload(name)
    found = find_checkpoint(tmp_path / "run")
    assert found is not None
    with pytest.raises(ConfigError, match=rf"was saved with .*--extension {mine} \(norm lp-norm, .*give it here too"):
        saved_config(found)


def other_content(rank: int, folder: str) -> None:
    """Write an extension that is another one on rank 1."""
    Path(folder, str(rank)).mkdir()
    Path(folder, str(rank), "mine.py").write_text(f"{PREFIX}register_norm('n')(print)\n# {rank}\n")
    import os

    os.chdir(Path(folder, str(rank)))


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    found = run_ranks(job_on_rank, 2, "--extension mine.py --train-iters 1", other_content, str(tmp_path))
    for _, kind, text in found:
        said = r"--extension: mine.py \(sha256 .*\) on rank 0 \(.*\), but mine.py \(sha256 .*\) on rank 1 "
        assert kind == "DisagreementError" and re.search(said, text or "")


def test_a_job_on_the_example_data_set_learns_the_answers_alone(tmp_path: Path) -> None:
    flags = f"--extension {example('dataset')} --dataset sums --tokenizer-type ByteTokenizer --lr-decay-style constant"
    base = TINY.replace("--mock-data ", "").replace("--vocab-size 32 ", "")
    code, said = job(f"{flags} --dataset-options digits=1 --train-iters 2 --save {tmp_path}/run", base)
    assert code == 0, said
    code, said = job(
        f"{flags.replace('digits=1', 'digits=2')} --lr-decay-style constant --train-iters 3 --load {tmp_path}/run", base
    )
    assert code == 1 and "fingerprint 1 digits in the checkpoint" in said and "fingerprint 2 digits here" in said


def test_the_example_logger_writes_csv_files_and_a_failing_one_is_left_out(tmp_path: Path) -> None:
    failing = written(
        tmp_path,
        "@register_logger('breaks')\nclass Breaks:\n    def __init__(self, config): pass\n"
        "    def log(self, step, metrics): raise OSError('disk full')\n"
        "@register_logger('never')\nclass Never:\n    def __init__(self, config): raise OSError('no server')\n",
    )
    flags = f"--extension {example('logger')} {failing} --logger csv breaks never --save {tmp_path}/run --train-iters 3"
    code, said = job(flags)
    assert code == 0, said
    assert "--logger breaks stopped: OSError: disk full" in said
    assert "--logger never did not start: OSError: no server" in said
    lines = (tmp_path / "run" / "csv" / "train_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["1", "2", "3"]

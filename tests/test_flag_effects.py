"""Each flag has an effect.

tests/flag_effects.txt has one row per configuration field; each row is run with and without its flags.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import re
import shlex
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.assembly.datasets import with_vocabulary
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import read_manifest
from megapipe.comm.bootstrap import join
from megapipe.comm.meeting import digest_of
from megapipe.comm.trace import Tracer
from megapipe.config.config import all_fields
from megapipe.config.flags import field_flags
from megapipe.config.load import load_config
from megapipe.data.dataset import SyntheticDataset
from megapipe.data_parallel.copies import Copies
from megapipe.environment import read_environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.pretrain import main
from megapipe.extras.report.kernels import graph_words
from megapipe.optimizer.schedule import Rates
from megapipe.pipeline.engine import Step
from megapipe.plan.layer_costs import LayerTimes, PartCost, setting_of, to_json
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.chat import FORMATS
from megapipe.train import facts
from megapipe.train.gpu_setup import snapshot_path
from megapipe.train.guard import StopRequest
from megapipe.train.loop import Training
from tests.flag_effects import TABLE
from tests.harness import RankPool
from tests.token_files import IndexedWriter
from tests.tokenizers.chat_tokenizers import write_tokenizer
from tests.train.grids import runtime_of, step_microbatches, trainer
from tests.train.jobs import job_on_rank, steps_of

BASE = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 4 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 "
    "--hidden-dropout 0 "
    "--attention-dropout 0 --mock-data --num-workers 0 --eval-iters 1 --log-interval 1 --device cpu --metrics-file "
    "{tmp}/metrics.jsonl"
)
TIMES = (
    "time",
    "step_seconds",
    "tokens_per_second",
    "seconds_left",
    "memory_bytes",
    "seconds",
    "tflops",
    "mfu",
    "phases",
)


@dataclass(frozen=True)
class Row:
    field: str
    flags: str
    seen: str
    given: str = ""
    ranks: int = 1


def rows() -> list[Row]:
    found = []
    for field, flags, seen, *rest in TABLE:
        given, ranks = [*rest, "", ""][:2]
        found.append(Row(field, flags, seen, given, int(ranks or 1)))
    return found


def words(text: str) -> list[list[str]]:
    """Split flags into lists of a flag and its values."""
    found: list[list[str]] = []
    for word in shlex.split(text):
        if word.lstrip("!").startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


class Case:
    """A command line with its plan and its run, both computed on first use."""

    def __init__(self, texts: list[str], folders: dict[str, Path], tmp: Path) -> None:
        flags: dict[str, list[str]] = {}
        for name, *values in (flag for text in texts for flag in words(text)):
            if name.startswith("!"):
                del flags[name[1:]]
            else:
                flags[name] = values
        paths = {name: str(path) for name, path in folders.items()} | {"tmp": str(tmp)}
        self.tmp = tmp
        self.argv = [word.format(**paths) for name, values in flags.items() for word in (name, *values)]

    def plan(self, num_ranks: int) -> RunPlan:
        return resolve(with_vocabulary(load_config(self.argv).config), num_ranks, 2)

    @cached_property
    def done(self) -> tuple[int, str]:
        """The exit code and the output."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(self.argv)
        return code, re.sub(r"[\d.,]+ (tokens/s|s\b)", "", said.getvalue().replace(str(self.tmp), ""))

    def records(self) -> list[dict[str, Any]]:
        code, said = self.done
        assert code == 0, said
        lines = (self.tmp / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]

    def files(self, pattern: str) -> list[Path]:
        code, said = self.done
        assert code == 0, said
        return list(self.tmp.glob(pattern))


Pools = Callable[[int], RankPool]


@dataclass(frozen=True)
class Pair:
    """A run without the flags, and one with them."""

    row: Row
    base: Case
    changed: Case
    pools: Pools
    monkeypatch: pytest.MonkeyPatch

    def both(self, look: Callable[[Case], Any]) -> tuple[Any, Any]:
        return look(self.base), look(self.changed)


def records(pair: Pair, _: str) -> None:
    before, after = pair.both(Case.records)
    assert before != after


def outcome(pair: Pair, _: str) -> None:
    before, after = pair.both(lambda case: case.done)
    assert before != after
    assert 0 in (before[0], after[0]), after[1]


def said(pair: Pair, text: str) -> None:
    before, after = pair.both(lambda case: text in case.done[1])
    assert (before, after) == (False, True), pair.changed.done[1]


def file(pair: Pair, pattern: str) -> None:
    before, after = pair.both(lambda case: bool(case.files(pattern)))
    assert (before, after) == (False, True)


def plan(pair: Pair, part: str) -> None:
    def look(case: Case) -> Any:
        try:
            made = case.plan(pair.row.ranks)
        except ConfigError as error:
            return str(error)
        topology = made.topology
        parts = {
            "topology": lambda: [topology.groups(name) for name in ("tp", "cp_a2a", "pp", "dp")],
            "placement": lambda: made.placement,
            "partition": lambda: made.partition,
            "specs": lambda: made.specs,
            "batch": lambda: made.batch,
            "rows": lambda: (
                (made.schedule if made.parts is None else made.part_schedule)(made.batch.num_microbatches_at(0)).rows
            ),
            "memory": lambda: [rank_memory(made, pp_rank).items for pp_rank in range(topology.pp)],
            "buffers": lambda: [made.buffers(stage, 0) for stage in range(made.placement.num_stages)],
        }
        return parts[part]()

    before, after = pair.both(look)
    assert before != after
    assert not isinstance(after, str), after


def layer_times(pair: Pair, _: str) -> None:
    """Write a file in which the head takes as long as nine layers, and check that it changes the cut."""
    made, one = pair.base.plan(2), PartCost(1.0, 2.0, 1.0, 1.0)
    file = pair.changed.argv[pair.changed.argv.index("--pipeline-layer-times") + 1]
    Path(file).write_text(to_json(LayerTimes(setting_of(made.config), PartCost(), (one,), one * 9)))
    plan(pair, "partition")


def saved_bytes(pair: Pair, _: str) -> None:
    def look(case: Case) -> int:
        runtime = runtime_of(load_config(case.argv).config, 0, 1)
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        microbatches = step_microbatches(runtime, batch_rows(), 0)
        runtime.stores.begin_step(len(microbatches))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runtime.engine(len(microbatches)).run(
                Step(microbatches, runtime.message, lambda output, payload: (output.loss_sum, output.loss_sum.detach()))
            )
        return total

    before, after = pair.both(look)
    assert before != after


def batch_rows() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 32, (4, 9))


def steps_on_a_rank(rank: int, world_size: int, argv: list[str]) -> dict[str, Any]:
    tracer = Tracer()
    runtime = runtime_of(load_config(argv).config, rank, world_size, tracer=tracer)
    step = trainer(runtime)
    losses = [step.run(step_microbatches(runtime, batch_rows(), index), Rates(1e-2, 0.0)).loss for index in range(2)]
    runtime.stores.finish_weights()
    # collectives are sorted by launch, since completion times vary
    events = sorted((event.start_ns, event.name) for event in tracer.events)
    names = [name for _, name in events]
    return {"losses": losses, "events": names, "collectives": [name for name in names if name.startswith("tp ")]}


def ranks(pair: Pair, part: str) -> None:
    before, after = pair.both(lambda case: pair.pools(2).run(steps_on_a_rank, case.argv)[0])
    assert before[part] != after[part]
    if part == "events" and not pair.row.field.startswith("parallel.expert"):
        assert before["losses"] == after["losses"]
    elif part != "losses":  # GEMMs of other sizes round differently
        assert before["losses"] == pytest.approx(after["losses"], rel=1e-6)


def time_out(pair: Pair, _: str) -> None:
    before, after = pair.both(
        lambda case: join(case.plan(1).config, read_environment({}), lambda _: {}).timeout_seconds
    )
    assert (before, after) == (600.0, 120.0)


def handlers(pair: Pair, _: str) -> None:
    train = Training._train
    seen = []
    pair.monkeypatch.setattr(
        Training, "_train", lambda self: (seen.append(signal.getsignal(signal.SIGTERM)), train(self))[1]
    )
    for case in (Case([" ".join(pair.base.argv)], {}, pair.base.tmp), pair.changed):
        assert case.done[0] == 0
    asks_to_stop = [getattr(handler, "__func__", None) is StopRequest.receive for handler in seen]
    assert asks_to_stop == [True, False]


def determinism(pair: Pair, _: str) -> None:
    run, seen = Training.run, []
    pair.monkeypatch.setattr(
        Training, "run", lambda self: (seen.append(torch.are_deterministic_algorithms_enabled()), run(self))[1]
    )
    for case in (Case([" ".join(pair.base.argv)], {}, pair.base.tmp), pair.changed):  # the base may have run before
        assert case.done[0] == 0
    assert seen == [False, True]


def comparisons(pair: Pair, _: str) -> None:
    seen = []
    pair.monkeypatch.setattr(Copies, "differ", lambda self: seen.append(0) or False)
    assert pair.base.done[0] == 0 and not seen
    assert pair.changed.done[0] == 0 and len(seen) == 1 + 3  # before the first step and after each


def extremes(pair: Pair, _: str) -> None:
    said = pair.both(lambda case: pair.pools(4).run(job_on_rank, " ".join(case.argv))[0][0])
    assert [re.findall(r"longest (.*?); shortest", text)[-1].count("rank ") for text in said] == [1, 2]


def losses_on_two_ranks(pair: Pair, _: str) -> None:
    def look(case: Case) -> list[float]:
        pair.pools(2).run(job_on_rank, " ".join(case.argv))
        return [line["loss"] for line in steps_of(case.tmp / "metrics.jsonl")]

    before, after = pair.both(look)
    assert len(before) == len(after) == 3
    assert before != after


def device(pair: Pair, _: str) -> None:
    before, after = pair.both(lambda case: case.done)
    assert before[0] == 0
    assert after[0] == 0 if torch.cuda.is_available() else "--device cuda: torch sees no GPU" in after[1]


def snapshot(pair: Pair, _: str) -> None:
    assert pair.both(lambda case: snapshot_path(case.plan(1).config.gpu, 3).name) == (
        "snapshot_rank_00003.pickle",
        "here_rank_00003.pickle",
    )


def recorded_after(pair: Pair, _: str) -> None:
    (before,), (after,) = pair.both(lambda case: graph_words(case.plan(1)))
    assert "recorded after 3 steps" in before and "recorded after 5 steps" in after


def readers(pair: Pair, _: str) -> None:
    seen = set()
    read = SyntheticDataset.__getitem__

    def recorded(self: SyntheticDataset, index: int) -> Any:
        seen.add(threading.current_thread().name)
        return read(self, index)

    pair.monkeypatch.setattr(SyntheticDataset, "__getitem__", recorded)
    assert pair.changed.done[0] == 0
    assert {name.rpartition("_")[0] for name in seen} == {"train-loader", "validation-loader", "test-loader"}
    assert Case([" ".join(pair.base.argv)], {}, pair.base.tmp).done[0] == 0
    assert threading.current_thread().name in seen


def manifest(pair: Pair, key: str) -> None:
    def look(case: Case) -> bool:
        (path,) = case.files("ckpt/*/manifest.json")
        return read_manifest(path.parent).state[key] is None

    assert pair.both(look) == (False, True)


def checkpoints(pair: Pair, counts: str) -> None:
    assert "{} {}".format(*pair.both(lambda case: len(case.files("ckpt/*/manifest.json")))) == counts


def failing_save(pair: Pair, _: str) -> None:
    create = Disk.create

    def full(disk: Disk, path: Path) -> Any:
        if path.parent.name.startswith(".step_00000001"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(disk, path)

    pair.monkeypatch.setattr(Disk, "create", full)
    assert pair.both(lambda case: case.done[0]) == (0, 1)
    assert "the save of step 1 FAILED: rank 0 cannot write" in pair.base.done[1]
    assert sorted(path.parent.name for path in pair.base.files("ckpt/*/manifest.json")) == [
        "step_00000002",
        "step_00000003",
    ]


def wandb(pair: Pair, argument: str) -> None:
    given: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=lambda scalars, step: None, finish=lambda: None)
    fake = types.SimpleNamespace(
        Settings=lambda **settings: settings, init=lambda **arguments: given.append(arguments) or run
    )
    pair.monkeypatch.setitem(sys.modules, "wandb", fake)
    assert pair.changed.done[0] == 0, pair.changed.done[1]
    assert given[0][argument] == pair.row.flags.split()[-1]


def collections(pair: Pair, count: str) -> None:
    """The collector is off during the run, which asks for that many collections itself."""
    asked: list[bool] = []
    fake = types.SimpleNamespace(isenabled=gc.isenabled, enable=gc.enable, disable=gc.disable)
    fake.collect = lambda: asked.append(gc.isenabled())
    pair.monkeypatch.setattr("megapipe.train.loop.gc", fake)
    assert pair.changed.done[0] == 0, pair.changed.done[1]
    assert (len(asked), asked[0], gc.isenabled()) == (int(count), False, True)


def mixed_hosts(pair: Pair, _: str) -> None:
    """Another GPU on one rank is a disagreement without the flag, and none with it."""
    pair.monkeypatch.setattr(facts, "choose_backend", lambda *_: ("nccl", torch.device("cuda", 0)))

    def digests(case: Case) -> int:
        found = set()
        for name in ("H100", "A100"):
            pair.monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
            found.add(digest_of(facts.facts_of(case.plan(2), read_environment({}), {})))
        return len(found)

    assert pair.both(digests) == (2, 1)


SEEN: dict[str, Callable[[Pair, str], None]] = {
    function.__name__: function
    for function in (
        layer_times,
        records, outcome, said, file, plan, saved_bytes, ranks, time_out, handlers, determinism, comparisons, device,
        readers, manifest, mixed_hosts,
        extremes, losses_on_two_ranks, checkpoints, failing_save, wandb, collections, snapshot, recorded_after,
    )
}  # fmt: skip
ROWS = rows()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Create the folders and files that rows name in braces."""
    root = tmp_path_factory.mktemp("given")
    for name in "AB":
        random = np.random.RandomState(ord(name))
        with IndexedWriter(root / name, "u2") as writer:
            for _ in range(1000):
                writer.add_document(random.randint(0, 32, 20))
    (root / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    write_tokenizer(root / "chats", FORMATS["chatml"])
    answers = [f"answer {number}" * (1 + 15 * (number == 3)) for number in range(8)]
    pairs = [{"prompt": "ask", "completion": answer} for answer in answers]
    (root / "chats" / "chat.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = {"A": root / "A", "B": root / "B", "saved": root / "saved", "vocab": root / "vocab.json"}
    found["chats"] = root / "chats"
    saving = Case([BASE, "--train-iters 2 --lr-decay-style constant --save {saved} --save-interval 1"], found, root)
    assert saving.done[0] == 0, saving.done[1]
    return found


@pytest.fixture(scope="module")
def bases() -> dict[str, Case]:
    """Return a cache of the runs without the flags, by the flags given to both runs."""
    return {}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_field_has_one_row() -> None:
    assert sorted(row.field for row in ROWS) == sorted(field.key for field in all_fields())


@pytest.mark.parametrize("row", ROWS, ids=[row.field for row in ROWS])
def test_the_flag_has_an_effect(
    row: Row,
    folders: dict[str, Path],
    bases: dict[str, Case],
    tmp_path_factory: pytest.TempPathFactory,
    rank_pools: Pools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert row.field in {field_flags()[name][0].key for name, *_ in words(row.flags)}
    if row.given not in bases:
        bases[row.given] = Case([BASE, row.given], folders, tmp_path_factory.mktemp("base"))
    changed = Case([BASE, row.given, row.flags], folders, tmp_path_factory.mktemp("changed"))
    kind, _, rest = row.seen.partition(" ")
    SEEN[kind](Pair(row, bases[row.given], changed, rank_pools, monkeypatch), rest)

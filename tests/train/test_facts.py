"""The facts that ranks compare before a run: every setting, file and version that one rank alone may not have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.assembly.datasets import planned
from megapipe.checkpoint.lock import Owner, SaveLock, acquire
from megapipe.comm.meeting import Facts, Side, disagreement
from megapipe.config.config import all_fields
from megapipe.config.load import load_config
from megapipe.environment import Environment, read_environment
from megapipe.registry import EXTENSIONS
from megapipe.train import facts as facts_module
from megapipe.train.facts import FOLDERS, MAY_DIFFER, SPECIAL, _versions, facts_of
from tests.harness import RankPool
from tests.tables import rows
from tests.token_files import IndexedWriter
from tests.train.jobs import TINY, job, job_on_rank

BASE = f"{TINY} --train-iters 4"
ENVIRONMENT = replace(read_environment({}), world_size=2, local_world_size=2)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MOE = "--num-experts 4 --disable-bias-linear"
FILES = "!--mock-data --data-path {A}"
TOKENS = "--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges} !--vocab-size"


def facts(flags: str, environment: Environment = ENVIRONMENT, notes: dict[str, str] | None = None) -> Facts:
    words = BASE.split()
    for word in flags.split():
        if not word.startswith("!"):
            continue
        at = words.index(word[1:])
        del words[at : at + 1 + (at + 1 < len(words) and not words[at + 1].startswith("--"))]
    loaded = load_config([*words, *(word for word in flags.split() if not word.startswith("!"))])
    return facts_of(planned(loaded, 2, environment.local_world_size), environment, notes or {})


def compared(one: Facts, other: Facts) -> str:
    """Return the message of four ranks of which rank 1 differs, without its first and last line; "" if none does."""
    sides = [Side((0, 2, 3), "host-a", one), Side((1,), "host-b", other)]
    return "\n".join(line.strip() for line in disagreement(sides, 4).splitlines()[1:-1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Token files A and other, equal in size, and the files of a tokenizer."""
    root = tmp_path_factory.mktemp("facts")
    for name in ("A", "other"):
        random = np.random.RandomState(len(name))
        with IndexedWriter(root / name, "u2") as writer:
            for _ in range(200):
                writer.add_document(random.randint(0, 32, 20))
    vocab = {character: index for index, character in enumerate("abcdefg")}
    (root / "vocab.json").write_text(json.dumps(vocab | {"ab": 7, "ba": 8, "<|endoftext|>": 9}))
    (root / "merges.txt").write_text("#version: 0.2\na b\n")
    (root / "merges2.txt").write_text("#version: 0.2\nb a\n")
    names = {"vocab": "vocab.json", "merges": "merges.txt", "other_merges": "merges2.txt"}
    found = {"root": str(root), "A": str(root / "A"), "other": str(root / "other")}
    return found | {key: str(root / name) for key, name in names.items()}


TABLE = rows(Path(__file__).with_name("facts.txt"))


@pytest.mark.parametrize("row", TABLE, ids=[f"{odd} {common}" for common, odd, _ in TABLE])
def test_one_rank_that_differs_is_named_with_key_and_both_values(row: list[str], files: dict[str, str]) -> None:
    common, odd, said = (text.format_map(files) for text in row)
    found = compared(facts(common), facts(f"{common} {odd}"))
    assert said in found and "on rank 1 (host-b), but " in found, found
    assert " on ranks 0, 2 to 3 (the first on host-a)" in found


MAY = {
    "paths of outputs": "--tensorboard-dir {root}/tb --metrics-file {root}/metrics.jsonl --quiet",
    "threads that read data": "--num-workers 3",
    "index caches": "--data-cache-path {root}/cache",
    "network devices of a node": "--nccl-settings NCCL_SOCKET_IFNAME=eth1 NCCL_IB_HCA=mlx5 NCCL_DEBUG=INFO",
    "the memory's history": "--memory-snapshot-path {root}/history.pickle",
}


@pytest.mark.parametrize("name", MAY)
def test_what_may_differ_is_not_compared(name: str, files: dict[str, str]) -> None:
    assert compared(facts(""), facts(MAY[name].format_map(files))) == ""


def test_copies_of_data_and_tokenizer_at_other_paths_are_the_same(files: dict[str, str], tmp_path: Path) -> None:
    moved = {key: str(shutil.copy(path, tmp_path)) for key, path in files.items() if key not in ("root", "A", "other")}
    for ending in (".bin", ".idx"):
        shutil.copy(files["A"] + ending, tmp_path)
    here = facts(f"{FILES} {TOKENS}".format_map(files))
    there = facts(f"{FILES} {TOKENS}".format_map(moved | {"A": str(tmp_path / "A")}))
    assert here != there and compared(here, there) == ""


def test_a_stale_copy_at_the_same_path_is_named(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give all ranks one relative path, in different working directories."""
    found = []
    for content in ("A", "other"):
        (tmp_path / content).mkdir()
        for ending in (".bin", ".idx"):
            shutil.copy(files[content] + ending, tmp_path / content / f"text{ending}")
        monkeypatch.chdir(tmp_path / content)
        found.append(facts(FILES.replace("{A}", "text")))
    text = compared(*found)
    assert text.startswith("--data-path: text (.bin of 8,000 bytes, checksum ") and len(text.splitlines()) == 1


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[SaveLock]:
    held = acquire(tmp_path / "runs", Owner.here(ENVIRONMENT), print)
    yield held
    held.release()


def test_save_is_compared_as_a_folder_by_whatever_path(
    lock: SaveLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mount").symlink_to(tmp_path / "runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(facts_module, "FOLDER_SECONDS", 0.1)
    notes = {"save": lock.mark}
    own = facts(f"--save {tmp_path}/runs", notes=notes)
    assert compared(own, facts(f"--save {tmp_path}/mount", notes=notes)) == ""
    monkeypatch.chdir(tmp_path)
    assert compared(own, facts("--save runs", notes=notes)) == ""
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compared(own, facts("--save runs", notes=notes)) == (
        f"--save: {tmp_path}/elsewhere/runs, a folder without rank 0's lock (another one, or a disk of this node) on "
        f"rank 1 (host-b), but {tmp_path}/runs, which holds rank 0's lock on ranks 0, 2 to 3 (the first on host-a)"
    )


def test_the_loaded_checkpoint_is_compared_by_its_manifest(tmp_path: Path) -> None:
    code, said = job(f"--train-iters 2 --save {tmp_path}/one --save-interval 1")
    assert code == 0, said
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    shutil.copytree(tmp_path / "one", tmp_path / "stale")
    (newest,) = (tmp_path / "stale").glob("*2")
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"crc32": ', '"crc32": 1', 1))
    (older,) = (tmp_path / "one").glob("*1")
    notes = facts_module.notes_of(None, load_config([*BASE.split(), "--load", f"{tmp_path}/one"]).config.checkpoint)
    assert notes == {"checkpoint": newest.name, "is_restart": ""} and older.name != newest.name
    own = facts(f"--load {tmp_path}/one", notes=notes)
    assert compared(own, facts(f"--load {tmp_path}/copy", notes=notes)) == ""
    text = compared(own, facts(f"--load {tmp_path}/stale", notes=notes))
    assert text.startswith(f"--load: {newest} (manifest of ") and f"but {tmp_path}/one/{newest.name} (manifest" in text
    shutil.rmtree(newest)
    assert "manifest.json, which cannot be read (No such file" in compared(
        own, facts(f"--load {tmp_path}/stale", notes=notes)
    )
    assert "--load: unset on rank 1 (host-b), but " in compared(own, facts("", notes=notes))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param("torch", "torch", id="torch"),
        pytest.param("numpy", "numpy", id="a library"),
        pytest.param("megapipe", "megapipe", id="megapipe"),
    ],
)
def test_another_version_is_named(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = facts("")
    versions = tuple((known, "9.9" if known == name else text) for known, text in _versions(False))
    monkeypatch.setattr(facts_module, "_versions", lambda _: versions)
    assert compared(own, facts("")).startswith(f"{key}: 9.9 on rank 1 (host-b), but ")


def test_another_source_of_the_same_version_of_megapipe_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").write_text("changed = True\n")
    own = dict(_versions(False))["megapipe"]
    _versions.cache_clear()
    monkeypatch.setattr(facts_module, "PACKAGE", tmp_path)
    other = dict(_versions(False))["megapipe"]
    _versions.cache_clear()
    assert own.startswith("0.") and own.split()[0] == other.split()[0] and own != other


def test_an_extension_of_another_content_is_named(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "mine.py"
        path.write_text(f"from megapipe.extend import register_norm\nregister_norm('mine')(print)\n# {number}\n")
        found.append(facts(f"--extension {path}"))
        EXTENSIONS.unload(str(path))
    assert compared(*found).startswith(f"--extension: {tmp_path}/1/mine.py (sha256 ")


@pytest.mark.parametrize("variable", ["NVIDIA_TF32_OVERRIDE", "NCCL_ALGO"])
def test_a_variable_that_changes_results_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    own = facts("")
    monkeypatch.setenv(variable, "1")
    assert compared(own, facts("")).startswith(f"variable {variable}: 1 on rank 1 (host-b), but unset on ranks")


def test_nodes_of_other_sizes_are_named() -> None:
    other = facts("", replace(ENVIRONMENT, local_world_size=1))
    assert compared(facts(""), other).startswith("ranks per node: 1 on rank 1 (host-b), but 2 on ranks")


def test_kinds_of_gpu_may_differ_only_with_allow_mixed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(name: str, flags: str = "") -> Facts:
        monkeypatch.setattr(facts_module, "choose_backend", lambda *_: ("nccl", torch.device("cuda", 0)))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        return facts(flags)

    text = compared(on("H100"), on("A100"))
    assert text.startswith("device: A100 over nccl; --allow-mixed-hosts allows several kinds of GPU on rank 1 (host-b)")
    mixed = "--allow-mixed-hosts"
    assert compared(on("H100", mixed), on("A100", mixed)) == ""
    monkeypatch.undo()
    assert "device: cpu over gloo on rank 1" in compared(on("H100"), _on_cpu(monkeypatch))


def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Facts:
    monkeypatch.undo()
    return facts("")


def test_every_field_is_compared_or_in_the_table_of_those_that_may_differ() -> None:
    keys = {one.key for one in all_fields()}
    fields = {key for key in MAY_DIFFER if "." in key}
    assert fields <= keys and set(SPECIAL) <= keys and set(FOLDERS) <= keys
    assert not fields & (set(SPECIAL) | set(FOLDERS))
    flags = {key for key in facts("") if key.startswith("--")}
    assert flags == {facts_module.flag_of(one.name) for one in all_fields() if one.key not in fields}
    assert all(reason for reason in MAY_DIFFER.values())


def job_with(rank: int, world_size: int, common: str, odd: str) -> tuple[str, str, str | None]:
    """Run a job whose last rank has flags of its own."""
    return job_on_rank(rank, world_size, f"{common} {odd if rank == world_size - 1 else ''}")


@pytest.mark.parametrize(
    ("common", "odd", "said"),
    [
        pytest.param(
            "--check-weight-hash-across-dp-replicas-interval 1",
            "--seed 7",
            "--seed: 1234 on rank 0 (",
            id="initial weights, before the check of copies",
        ),
        pytest.param("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size: 1 on rank 0 (", id="groups"),
        pytest.param("", "--save {root}/one", "--save: unset on rank 0 (", id="save on one rank"),
    ],
)
def test_ranks_that_differ_end_before_anything_is_built(
    common: str, odd: str, said: str, tmp_path: Path, rank_pools: Callable[[int], RankPool]
) -> None:
    flags = common, odd.format(root=tmp_path)
    found = rank_pools(2).run(job_with, *(f"--train-iters 2 {flags[0]}", flags[1]))
    assert {kind for _, kind, _ in found} == {"DisagreementError"}
    assert all(text is not None and f"so nothing was started:\n  {said}" in text for *_, text in found)

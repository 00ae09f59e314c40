"""Damaged files: refused with one message, built again, or read with the same result; never another one.

Damage is a changed bit or byte, a cut, an insertion, an empty file, a folder in its place, or deeply nested JSON.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.index_cache import IndexCache
from megapipe.data.indexed_file import IndexedFile
from megapipe.extras.cli.report import main as report
from megapipe.extras.cli.report import status
from megapipe.extras.convert.snapshot import read_checkpoint
from tests.fuzz.outcome import drawn, fault, read_or_refused, said
from tests.harness import REPOSITORY
from tests.token_files import IndexedWriter

GOLDEN = REPOSITORY / "tests" / "golden"
NUM_BATCHES = 5
REPORTED = (
    *("run.jsonl", "metrics.jsonl", "pipeline_profile_00000002_00000003.json"),
    *("heartbeats/roster.json", "heartbeats/host_vm.bin"),
)


def flip_bit(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def change_byte(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] = generator.choice((0, 1, 127, 128, 255, generator.randrange(256)))
    path.write_bytes(content)


def cut(path: Path, generator: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: generator.randrange(path.stat().st_size)])


def insert(path: Path, generator: random.Random) -> None:
    content = path.read_bytes()
    place = generator.randrange(len(content) + 1)
    path.write_bytes(content[:place] + generator.randbytes(generator.randint(1, 16)) + content[place:])


def empty(path: Path, generator: random.Random) -> None:
    path.write_bytes(b"")


def folder(path: Path, generator: random.Random) -> None:
    path.unlink()
    path.mkdir()


def nested(path: Path, generator: random.Random) -> None:
    path.write_text(generator.choice(("[", '{"a":')) * 50_000)


DAMAGES = [*[flip_bit] * 8, *[change_byte] * 6, cut, insert, empty, folder, nested]


def token_file(prefix: Path) -> Path:
    generator = np.random.RandomState(3)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(12):
            writer.add_document(generator.randint(0, 1000, generator.randint(5, 400)).astype("<u2"))
    return prefix


def sequences(prefix: Path) -> Any:
    """Read all tokens, as training does; document starts count in `megapipe merge` only."""
    file = IndexedFile(prefix)
    return [file.read(number).astype(np.int64).tolist() for number in range(len(file))]


def samples(prefix: Path) -> Any:
    file = IndexedFile(prefix)
    cache = IndexCache.at(None, str(prefix))
    settings: dict[str, Any] = {"num_samples": 40, "seq_length": 16, "seed": 5, "cache": cache}
    dataset = GPTDataset(file, (0, len(file)), **settings)
    return [dataset[number].tolist() for number in range(len(dataset))]


def checkpoint(path: Path) -> Any:
    found = read_checkpoint(path)
    return {name: tensor.read().numpy().tobytes() for name, tensor in found.tensors.items()}, found.state


def copied(path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "run", path, dirs_exist_ok=True)) / "step_00000003"


# what is read -> how it is made, how it is read, and the files to be damaged
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], str, int]] = {
    "token index": (token_file, sequences, "*.idx", 60),
    "index cache": (token_file, samples, "cache/samples-*/*", 60),
    "manifest": (copied, checkpoint, "step_*/manifest.json", 60),
    "shard": (copied, checkpoint, "step_*/*.safetensors", 20),
}


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_gives_the_same_or_is_refused(kind: str, batch: int, tmp_path: Path) -> None:
    make, read, pattern, count = KINDS[kind]
    generator = drawn(f"{kind} {batch}")
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = read(make(whole / "x"))
    for number in range(count // NUM_BATCHES):
        place = tmp_path / str(number)
        shutil.copytree(whole, place, copy_function=shutil.copy2)
        prefix = make_again(place / "x", read, expected)
        path = generator.choice(sorted(place.rglob(pattern)))
        damage = generator.choice(DAMAGES)
        damage(path, generator)
        found = read_or_refused(lambda prefix=prefix: read(prefix))
        assert found is None or found == expected, f"{damage.__name__} of {path.relative_to(place)}: another result"
        shutil.rmtree(place)


def make_again(prefix: Path, read: Callable[[Path], Any], expected: Any) -> Path:
    """Return what to read of a copy, whose index cache is that of another place."""
    if read is checkpoint:
        return prefix / "step_00000003"
    if read is samples:
        shutil.rmtree(prefix.parent / "cache")
        assert read(prefix) == expected
    return prefix


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_a_report_of_damaged_files_has_no_traceback(batch: int, tmp_path: Path) -> None:
    generator = drawn(f"report {batch}")
    faults = []
    for _ in range(10):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(GOLDEN / "run", run)
        path = run / generator.choice(REPORTED)
        damage = generator.choice(DAMAGES)
        damage(path, generator)
        for main in (report, status):
            if wrong := fault(said(main, [str(run)])):
                faults.append(
                    f"{main.name if hasattr(main, 'name') else main}: {damage.__name__} of {path.name}: {wrong}"
                )
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e400", "1e308", '"text"', "[]", "null", "true"])
def test_a_report_of_strange_losses_has_no_traceback(value: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "run", run)
    text = (run / "metrics.jsonl").read_text()
    for key in ("loss", "grad_norm", "step_seconds", "lr", "step", "tokens_per_second", "time", "memory_bytes"):
        lines = [
            line if number % 2 else change(line, key, value)
            for number, line in enumerate(text.splitlines(keepends=True))
        ]
        (run / "metrics.jsonl").write_text("".join(lines))
        assert not fault(said(report, [str(run)])), key


def change(line: str, key: str, value: str) -> str:
    """Replace a value in a line of JSON."""
    before, found, after = line.partition(f'"{key}": ')
    rest = after[min(after.find(end) for end in (",", "}") if end in after) :] if found else ""
    return f"{before}{found}{value}{rest}" if found else line

"""first_day.md, and an archive of logs and figures without names of the host, the user and paths."""

from __future__ import annotations

import functools
import getpass
import io
import platform
import re
import socket
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from bench_table import as_markdown

from gpu_day.parts import Part
from gpu_day.record import Record, Row, write_whole
from gpu_day.running import PASSED

REPOSITORY = Path(__file__).resolve().parents[3]
ARCHIVE, SUMMARY = "first_day.tar.gz", "first_day.md"
TEXTS = (".log", ".json", ".jsonl", ".yaml")
MOST_BYTES = 4 << 20  # of a file in the archive: the end of a longer log
IPV4 = r"\b\d{1,3}(?:\.\d{1,3}){3}\b"
IPV6 = r"(?<![\w:])(?=[0-9a-f:]*::|(?:[0-9a-f]+:){7})[0-9a-f:]+(?![\w:])"


def summary_text(
    record: Record, parts: Sequence[Part], device: str, torch: str, left_out: Mapping[str, str], said: Sequence[str]
) -> str:
    """Return first_day.md: the recorded parts of this device, what did not run and why, bars and remarks."""
    head = ("part", "decides", "result", "seconds", "figures")
    rows = [head, *(_cells(part, row) for part in parts if (row := record.find(part.name, device, torch)))]
    lines = ["# The first day on this machine", "", f"{device}, torch {torch}", "", as_markdown(rows), ""]
    lines += ["`planned` figures are the planner's: what a step should take, not what was measured.", ""]
    if said:
        lines += ["## Bars and remarks", "", *(f"- {sentence}" for sentence in said), ""]
    if left_out:
        lines += ["## Did not run in this call", "", *(f"- {name}: {reason}" for name, reason in left_out.items()), ""]
    for part in parts:
        row = record.find(part.name, device, torch)
        if row is not None and row.result != PASSED and row.log:
            lines += [f"## {part.name}: {row.result}", "", "```", row.log, "```", ""]
    return "\n".join(lines)


def _cells(part: Part, row: Row) -> tuple[str, ...]:
    figures = ", ".join(f"{name} {value:g}" for name, value in row.figures.items())
    return part.name, part.decides, row.result, f"{row.seconds:.0f}", figures.replace("|", "/")


def without_names(text: str, *paths: tuple[Path, str]) -> str:
    """Return a text without the names of the host and the user, their paths, addresses and serial numbers."""
    host = socket.gethostname()
    for path, name in (*paths, (REPOSITORY, "REPOSITORY"), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
        text = text.replace(str(path), f"<{name}>")
    for word, name in ((host, "HOST"), (host.split(".")[0], "HOST"), (_user(), "USER")):
        if word not in ("root", "localhost", ""):
            text = re.sub(rf"\b{re.escape(word)}\b", f"<{name}>", text)
    text = re.sub(r"\bGPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<GPU>", text)
    return re.sub(rf"{IPV4}|{IPV6}", "<ADDRESS>", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


@functools.cache
def versions() -> str:
    """Return the platform and the version of each installed package."""
    packages = sorted(f"{one.metadata['Name']}=={one.version}" for one in distributions())
    return "\n".join([platform.platform(), f"Python {platform.python_version()}", *packages])


def pack(folder: Path, work: Path, device: str) -> Path:
    """Write the archive: what earlier calls left in it, and the files of this call's work folder."""
    archive = folder / ARCHIVE
    members = _members(archive)
    members["first_day/versions.txt"] = f"{device}\n{versions()}\n".encode()
    for file in sorted(work.iterdir()):
        if file.suffix in TEXTS:
            text = file.read_bytes()[-MOST_BYTES:].decode(errors="replace")
            members[f"first_day/{file.name}"] = without_names(text, (work, "WORK"), (folder, "OUT")).encode()
    for name in (SUMMARY, "gpu_record.tsv"):
        if (folder / name).exists():
            members[f"first_day/{name}"] = (folder / name).read_bytes()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=3) as tar:
        for name, text_bytes in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text_bytes)
            tar.addfile(member, io.BytesIO(text_bytes))
    write_whole(archive, content.getvalue())
    return archive


def _members(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive that an earlier call wrote."""
    found: dict[str, bytes] = {}
    if archive.exists():
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    found[member.name] = file.read()
    return found

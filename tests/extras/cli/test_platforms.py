"""Native Windows is refused in one line, and colours appear only where they are wanted."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from megapipe.extras.cli.frame import painted
from tests.launch.scripts import REPOSITORY

# what Python on Windows lacks: modules, signals, functions of os
WINDOWS = """
import os, runpy, signal, sys
sys.platform = "win32"
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "grp", "pwd", "resource", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules.pop(name, None)
for name in ("SIGUSR1", "SIGPIPE", "SIGHUP", "SIGKILL", "SIGALRM"):
    delattr(signal, name)
for name in ("fork", "getuid", "kill", "sched_getaffinity"):
    delattr(os, name)
sys.argv = sys.argv[1:]
"""
COMMAND = "runpy.run_module('megapipe', run_name='__main__')"
SCRIPT = f"runpy.run_path({str(REPOSITORY / 'pretrain_gpt.py')!r}, run_name='__main__')"


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (COMMAND, []),
        (COMMAND, ["--help"]),
        (COMMAND, ["quickstart"]),
        (COMMAND, ["plan", "--help"]),
        (SCRIPT, ["--help"]),
    ],
    ids=["nothing", "help", "quickstart", "plan", "pretrain_gpt.py"],
)
def test_native_windows_is_told_to_use_wsl2(start: str, words: list[str]) -> None:
    command = [sys.executable, "-c", WINDOWS + start, "megapipe", *words]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    told = "error: megapipe does not run on native Windows; install it in WSL2 (wsl --install)\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", told)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_go_to_terminals_only_and_no_color_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert painted("error:", "red", Terminal()) == "\x1b[31merror:\x1b[0m"
    assert painted("error:", "red", io.StringIO()) == "error:"
    monkeypatch.setenv("TERM", "dumb")
    assert painted("error:", "red", Terminal()) == "error:"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("error:", "red", Terminal()) == "error:"

"""docs/data.md runs from top to bottom."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_the_page_on_data_runs_and_prints_what_it_shows(tmp_path):
    blocks = re.findall(r"```(bash|python)\n(.*?)```", PAGE, re.DOTALL)
    commands = [text if kind == "bash" else f"python - <<'END'\n{text}END\n" for kind, text in blocks]
    assert commands.pop(0).startswith("pip install")
    shell = f"set -e -o pipefail\nexport PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1\n"
    shell += f'megapipe() {{ "{sys.executable}" -m megapipe "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    bash = [shutil.which("bash") or "bash", "-c", shell + "\n".join(commands)]
    ended = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    for shown in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL):
        if not shown.startswith("python "):
            assert shown in ended.stdout, ended.stdout
    assert "step 3/3" in ended.stdout

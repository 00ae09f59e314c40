"""tools/bench/bench_delay.py trains each kind once, and does not repeat runs that have ended."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench" / "bench_delay.py"
TINY = "--mock-data --vocab-size 32 --tokenizer-type NullTokenizer --device cpu --hidden-size 16 --ffn-hidden-size 16 "
TINY += "--num-attention-heads 2 --num-layers 4 --seq-length 8 --eval-iters 1"


def test_two_kinds_end_with_a_row_each(tmp_path: Path) -> None:
    own = f"--output {tmp_path} --steps 2 --seeds 1 --optimizer muon --schedule synchronous --schedule PACI -- {TINY}"
    first, second = (
        subprocess.run([sys.executable, str(BENCH), *own.split()], capture_output=True, text=True, timeout=200)
        for _ in range(2)
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert [line.split(" | ")[0] for line in first.stdout.splitlines()[-2:]] == ["| synchronous", "| PACI"]
    assert first.stdout == second.stdout
    assert len(list(tmp_path.glob("*/metrics.jsonl"))) == 2

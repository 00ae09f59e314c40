#!/usr/bin/env python3
"""Write the table of docs/gpu.md, and what README.md and pages of docs say of GPUs, from docs/gpu_record.tsv.

python tools/write_gpu_tested.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from gpu_day.page import write

if __name__ == "__main__":
    for changed in write():
        print(changed)

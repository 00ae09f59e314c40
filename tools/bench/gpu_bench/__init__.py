"""Parts of tools/bench/bench_gpu.py and card.py: shapes, contenders, timing, figures and their bars."""

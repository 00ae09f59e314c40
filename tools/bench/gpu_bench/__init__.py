"""Parts of tools/bench/bench_gpu.py: shapes, contenders, timing, figures and their bars."""

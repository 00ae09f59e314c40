"""The parts of tools/bench/bench_gpu.py: shapes, the peers, how they are timed, what is said of them."""

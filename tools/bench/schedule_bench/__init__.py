"""Parts of tools/bench/bench_schedules.py: pipeline schedules on emulated and on real devices, compared with their
peers.

- `cases`:     `Case`, one row of a table, and the parts of the whole table
- `devices`:   `EmulatedStage`, a module whose F, I and W sleep for a set time, and the `Stopwatch` that records them
- `model`:     small transformer stages for the rows with real computation
- `megapipe_side`: the engine of megapipe on either kind of stage
- `peers`:     torch.distributed.pipelining and a bare gloo loop on the same stages. The only files outside
               megapipe/comm that use torch.distributed
- `rank`:      the process of a rank: contenders take turns, step by step
- `figures`:   loss, overhead, peaks and bars from the ranks' records; torch-free
- `page`:      tables, and their place between markers of a Markdown page
"""

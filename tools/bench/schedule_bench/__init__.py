"""What tools/bench/bench_schedules.py is made of: pipeline schedules on emulated devices and on real ones, beside their peers.

- `cases`:     what is measured: `Case`, and the parts of the whole table
- `devices`:   `EmulatedStage`, a module whose F, I and W sleep for a set time, and the `Stopwatch` that notes them
- `model`:     small transformer stages for the rows with real computation
- `megapipe_side`: the engine of megapipe on either kind of stage
- `peers`:     torch.distributed.pipelining and a bare gloo loop on the same stages. The only files outside megapipe/comm that use
               torch.distributed
- `rank`:      the life of a rank's process: contenders take turns, step by step
- `figures`:   from what the ranks noted to loss, overhead, peaks and bars; torch-free
- `page`:      tables, and their place between markers of a Markdown page
"""

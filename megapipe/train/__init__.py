"""The training loop and everything around a step.

- `run`:     from a plan to a finished run; `loop`: `Training`: data, step, settle, evaluate, save, leave
- `step`:    `TrainStep` and its two variants, without a barrier between steps and asynchronous
- `state`, `schedules`: the position of a run; its learning rates
- `loading`, `saving`: state and tensors from and to checkpoints; `evaluation`: the loss on held-out data
- `journal`, `metrics`: run.jsonl, console and writers; what a step reports
- `guard`:   judges every step and recovers from bad ones, with `agreement` (signals, limits, decisions of all ranks),
  `nonfinite` (NaN and infinity), `spikes`, `copies_check` (copies of parameters must be bit-identical)
- `profiling`: timers, rates and traces of the steps, with `timers`, `pipeline_profile`, `stragglers`
- `watch`:   heartbeats and the watchdog; `gpu_setup`: settings and checks for GPUs alone
"""

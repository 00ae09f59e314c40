"""The training loop and everything around a step.

- `run`:     from a plan to a finished run, with the `facts` that ranks compare before it
- `loop`:    `Training`: data, step, evaluate, save, leave
- `step`:    `TrainStep`, average of the loss, loads of experts; `stream`: steps whose pipeline does not drain
- `state`:   the position of a run, its learning rates and weight decay, its extensions
- `loading`, `saving`: state and tensors from and to checkpoints, and the way back to one after a loss spike
- `journal`, `metrics`: run.jsonl, console and writers; what a step reports; what the caller of `pretrain` can follow
- `guard`:   judges every step, agrees with all ranks on what follows and recovers from bad steps, with `nonfinite`
  (NaN and infinity) and `copies_check` (copies of parameters must be bit-identical, data unchanged)
- `profiling`: rates and traces of the steps, with `pipeline_profile` and `stragglers`
- `watch`:   heartbeats and the watchdog; `gpu_setup`: settings and checks of GPUs
"""

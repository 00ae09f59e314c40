"""The training loop and all that stands around a step.

- `step`:        `TrainStep`: one optimizer step through the engine
- `asynchronous_step`: the same for schedules that update weights while microbatches are under way
- `evaluation`:  the same stages, forwards only
- `loop`:        `Training`: steps, evaluation, saving, leaving
- `state`:       what a run is besides tensors: step, samples consumed, tokens, skipped steps
- `persistence`: state and tensors to checkpoints and back
- `saving`:      `Saves`: the checkpoints of a run, while the training waits or beside it
- `metrics`:     what a step reports; `writers`: where it goes
- `run_log`:     run.jsonl, what `megapipe report` knows of a run beside its metrics
- `profile`:     a trace by torch's profiler; `pipeline_profile`: every action of every rank beside the plan
- `signals`:     SIGTERM, SIGUSR1, SIGINT: all ranks leave after the same step
- `copies_check`: parameters that several ranks hold alike must be alike, to the bit
- `stragglers`: which rank, link or group keeps the others waiting; `device_waits`: how long, where a GPU's streams do
- `faults`:      NaN and infinity: which rank, stage and microbatch was first
"""

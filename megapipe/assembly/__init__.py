"""From a RunPlan to the live objects of one rank: the only package that knows all of them. Training, inference and verification use it.

- `precision`: the dtypes of a run
- `loss`:      what the last stage's output means, and the denominators of the average
- `inference_runtime`: `InferenceRuntime`: stages, their parameters, channels and forward engines of this rank
- `training_runtime`:  `TrainingRuntime`: the same for training: reducer, gather, optimizer, engines
- `graphs`:    what records a rank's stages as CUDA graphs, and when
- `offload`:   what moves a rank's activations to the host and back
- `saved_weights`: a checkpoint's weights into a rank's stages
- `updates`:   `RowUpdates`: weight versions and optimizer steps inside a row (asynchronous schedules)
- `microbatches`: a rank's share of a global batch, with the keys of its random streams
- `datasets`:  the data sets and tokenizer a configuration names
"""

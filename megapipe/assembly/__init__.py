"""From a RunPlan to the live objects of one rank. Used by training, inference and verification.

- `inference_runtime`: `InferenceRuntime`: stages, their parameters, channels and forward engines of this rank
- `training_runtime`:  the same with reducer, all-gather, optimizer, CUDA graphs, offload, training engines
- `row_updates`:  weight versions and optimizer steps inside a row (asynchronous schedules)
- `loss`:         the average of a step's loss, and the divisor of its gradients
- `microbatches`: this rank's share of a global batch, with the keys of its random streams
- `datasets`:     the data sets and the tokenizer that a configuration names
"""

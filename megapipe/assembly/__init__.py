"""From a RunPlan to the live objects of one rank. Used by training, inference and verification.

- `runtime`: `InferenceRuntime`: stages, parameters, channels and forward engines of this rank; `TrainingRuntime`: the
  same with reducer, all-gather, optimizer, CUDA graphs, offload, training engines, updates inside a row
- `microbatches`: this rank's share of a global batch, with the keys of its random streams
- `datasets`:     the data sets and the tokenizer that a configuration names
"""

"""From a RunPlan to the live objects of one rank. Used by training, inference and verification.

- `compose`:      what is done to a model, in order: one stage of this rank with its parameters
- `runtime`:      `InferenceRuntime`: stages, channels and forward engines of a rank; `TrainingRuntime`: the same with
  optimizer, CUDA graphs, offload, training engines
- `microbatches`: this rank's share of a global batch, with the keys of its random streams
- `datasets`:     the data sets and the tokenizer that a configuration names
"""

"""Data parallelism: what the replicas of a stage do together.

- `buffers`: `StageBuffers`: one flat parameter and one flat gradient tensor per buffer layout; parameters are views
- `reducer`: `GradientReducer`: sums gradients over replicas bucket by bucket, while the backward still runs
- `gather`:  `ParameterGather`: all-gathers parameters that the distributed optimizer updated, during the next forward
- `sharded`: `ShardedWeights`, `ShardedGradients`: weights and gradients of which each rank keeps a shard
- `copies`:  `Copies`: compares parameters that several ranks hold, bit by bit, through checksums

A step: `reducer.begin_step(m)`; forwards, whose submodules wait for their own parameters (`gather.wait_inside`);
backwards, with `reducer.reduce(stage)` after the last one of a stage; `reducer.finish()`; the optimizer's update, which
starts the gather. Main gradients are raw sums over microbatches and replicas; the optimizer scales them.
"""

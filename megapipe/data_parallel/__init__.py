"""Data parallelism: what the replicas of a stage do together.

- `buffers`:  `StageBuffers`: one flat parameter and one flat gradient tensor per buffer layout; the module's parameters are views of them
- `reducer`:  `GradientReducer`: sums gradients over replicas bucket by bucket, under the remaining backward
- `gather`:   `ParameterGather`: collects parameters that the distributed optimizer updated shard by shard, under the next forward
- `copies`:   `Copies`: what several ranks hold alike, compared bit by bit; `checksum`: a tensor's bits as one number

A step: `reducer.begin_step(m)`, forwards, whose parts wait for their own parameters (`gather.wait_inside`), backwards with
`reducer.reduce(stage)` after the last one of a stage, `reducer.finish()`, the optimizer's update, which starts the gather.
Main gradients are raw sums over microbatches and replicas; the optimizer applies the one factor.
"""

"""The optimizer: what happens between the last gradient and the next forward.

- `optimizer`:   `Optimizer`: unscale, norm, clip, update this rank's shards, write parameters; its saved state
- `shards`:      `Shard`: the part of a bucket that this rank updates, with master weights and moments
- `update_rule`: AdamW and SGD over flat tensors
- `gradients`:   norms and counts in which every element of the model counts once; the loss scale of fp16
- `schedule`:    learning rate and weight decay by consumed samples, the `Rates` of a step (imports no torch)
"""

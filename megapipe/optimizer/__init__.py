"""The optimizer: what happens between the last gradient and the next forward.

- `optimizer`:      `Optimizer`: unscale, norm, clip, update this rank's shards, write parameters, start the gather; its saved state
- `shards`:         `Shard`: the part of a bucket that this rank updates: master weights, moments, runs of equal treatment
- `update_rule`:    AdamW and SGD over flat runs
- `rollback`:       what takes an update back that was made before its verdict, and when to make none
- `gradient_norm`:  global norms and counts in which every element counts once
- `loss_scale`:     constant and dynamic loss scale of fp16
- `schedule`:       learning rate and weight decay as functions of the consumed samples (imports no torch)
"""

"""Which parameter lies where: the one list that model, init, planner, buffers, gradient norm, checkpoint and conversion read.

- `spec`:         `ParamSpec`: name, shape, tensor-parallel slice, initial values, decay, whose gradients are summed
- `slicing`:      the rules by which tp cuts a tensor: replicated, plain, fused (gate|up), query groups (q|k|v)
- `model_specs`:  the parameters of a GPT model and of one of its stages
- `boxes`:        a rank's slice, or a flat piece of it, as rectangles of the global tensor
- `buffers`:      flat buffers, buckets and their shards over the replica group
- `audit`:        the proof that every element is held exactly as often as declared
"""

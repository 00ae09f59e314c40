"""The location of each parameter: types shared by layers, model, plan, buffers, gradient norm, checkpoint, conversion.

- `spec`:         `ParamSpec`: name, shape, tensor-parallel slice, initial values, decay, whose gradients are summed;
                  the rules by which tp cuts a tensor: replicated, plain, fused (gate|up), query groups (q|k|v)
- `boxes`:        a rank's slice, or a flat piece of it, as rectangles of the global tensor
- `sequence`:     the positions of a sequence that each cp rank holds, and the blocks of attention between two ranks
- `buffers`:      flat buffers, buckets and their shards over the replica group
- `state_dtypes`: the dtypes of gradients, master weights and moments
- `audit`:        the proof that every element is held exactly as often as declared
"""

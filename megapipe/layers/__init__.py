"""The one description of each kind of layer: what it holds, computes, keeps and sends on one rank. Torch-free.

A new kind of layer is a module here with one table. Parameters, FLOPs, memory, times, traffic and the cut into stages
are sums over tables.

- `model`:     `ModelSpec`: the parts of a model, one `LayerSpec` a transformer layer; its parameters in model order;
               `rank_shape`: the shape on which tables depend, from a configuration
- `ends`, `attention`, `latent_attention`, `mlp`, `moe`: the parts; attention and MLP include their norms
- `norm`, `linear`: what parts are made of, and what linears that multiply in 8 bits add
- `table`:     the columns of a table: operations with their kept tensors, GEMMs, collectives and backward;
               `RankShape`: the microbatch and the options that a table depends on
"""

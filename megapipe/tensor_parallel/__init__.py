"""Tensor parallelism: the matrices of one layer are sharded over the tp group.

Tensors are [s, b, h]; with sequence parallelism the hidden states between layers are [s / tp, b, h].

    linear         ColumnParallelLinear and RowParallelLinear, with hand-written backwards that overlap communication
    gemms          the GEMMs of a linear, and the collectives along the sequence around them; fp8: GEMMs in 8 bits
    gradients      where the main gradient of a parameter accumulates, and where weight gradients wait between I and W
    parameter      a parameter and its declaration: shape, cut, initial values
    embedding      VocabParallelEmbedding
    cross_entropy  the loss on vocabulary-parallel logits, optionally fused with the output layer
    random         dropout masks and initial weights that depend on a key, not on the order of calls

Groups are arguments, and a group of one (`Group.alone`) runs the same code. Without slots, gradients go through
autograd.
"""

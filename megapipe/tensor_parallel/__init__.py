"""Tensor parallelism: the matrices of one layer are sharded over the tp group.

Tensors are [s, b, h]; with sequence parallelism the hidden states between layers are [s / tp, b, h].

    mappings         f and g of Megatron-LM, and their sequence-parallel pair
    linear           ColumnParallelLinear and RowParallelLinear, with hand-written backwards that overlap communication
    gemms            the GEMMs of a linear, whole or chunk by chunk under a collective; fp8: the same in 8 bits
    weight_gradient  weight gradients as objects that can wait, and the queue where they wait between I and W
    gradient_slot    where the main gradient of a parameter accumulates
    embedding        VocabParallelEmbedding
    cross_entropy    the loss on vocabulary-parallel logits, optionally fused with the output layer
    random           dropout masks that depend on a key, not on the order of calls

Groups are arguments, and a group of one (`Group.alone`) runs the same code. Without slots, gradients go through
autograd.
"""

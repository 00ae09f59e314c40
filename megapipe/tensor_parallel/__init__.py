"""The tp axis: one layer's matrices cut over a few neighbouring ranks. Layout [s, b, h]; under sequence parallelism [s / tp, b, h].

    mappings         f, g (Shoeybi et al. 2019, arXiv:1909.08053), their sequence-parallel pair (Korthikanti et al. 2022, arXiv:2205.05198)
    linear           ColumnParallelLinear, RowParallelLinear and the function form; hand-written backwards, communication under the GEMMs
    chunked_gemm     their collectives that have no other GEMM beside them, in chunks under their own
    weight_gradient  the weight's half of a linear's or embedding's backward, as an object that can wait
    weight_queue     where those objects wait when the backward is split (I now, W later)
    gradient_slot    where a parameter's main gradient accumulates in fp32 (or fp64)
    vocabulary       which rows of the vocabulary a rank holds
    embedding        VocabParallelEmbedding
    cross_entropy    the loss on logits that stay cut over the vocabulary
    random           dropout from keyed streams: a mask is a function of its key, never of the order of calls

One linear, followed by hand: forward gathers the sequence slices (if sequence parallel), multiplies, keeps its *scattered* input; backward
starts the gather of that input, multiplies for the input gradient meanwhile, starts its reduce-scatter, and multiplies for the weight
gradient under it, straight into the slot's main gradient. With a queue that defers, the last part waits there until W.

Without slots, gradients are handed to autograd, and every module here works under plain torch.optim. Groups come as arguments; a group of
one (`Group.alone`) is the same code without communication.
"""

"""The GPT, one pipeline stage at a time: GPT-2, Llama and shapes in between, all described by `ModelConfig`.

    stage           GPTStage: embedding (first stage), layers, final norm and head (last stage)
    microbatch      Microbatch: a stage's input besides the hidden states; StageLoss; KVCache
    embedding, head the first and the last part of the model
    block           one transformer layer, and a table of what it saves for the backward
    attention       projections, q|k|v by query group, qk-norm, rotation; fused and explicit attention
    context         attention masks and rotary tables, built once per microbatch and shared by the layers
    mlp, norm, rotary
    layer_factory   builds linears, norms and attention from the kernels that the configuration chose
    recompute       recomputing activations in the backward instead of saving them
    init            initial weights that do not depend on the grid

Activations are [s, b, h]: sequence, batch, hidden; with sequence parallelism [s / tp, b, h] between layers.
"""

"""The oracle: a GPT in one process, in plain PyTorch, and its training step. Imports torch and nothing of megapipe.

What it is for: every parallel test, and `--verify-grid`, compares the grid with this model. It is therefore written to be believed, not
to be fast: nn.Linear, ordinary autograd, a softmax spelled out, optimizers of torch.optim, no process groups, no fused kernels.

    config.py   ReferenceConfig: the shape of the model under Megatron's names, all sizes resolved
    rotary.py   rotary positions: inverse frequencies (linear, Llama-3, YaRN scaling), cos and sin, the half rotation
    gpt.py      ReferenceGPT: parameters under Megatron's names and layouts; forward -> (loss_sum, num_tokens)
    loss.py     cross entropy over the true vocabulary, label smoothing, z-loss
    train.py    parameter groups, optimizer, reference_step -> StepResult(loss, grad_norm, grads)
    asynchronous.py    PipeDream and PipeDream-2BW emulated: asynchronous_step -> StepResult

Use:
    model = ReferenceGPT(config).double()
    model.load_state_dict(weights)                              # full tensors; or model.draw_weights(seed)
    optimizer = build_optimizer(model, "adamw", weight_decay=0.1)
    result = reference_step(model, optimizer, microbatches, per_token_loss=False, clip_grad=1.0, lr=1e-3)

It is itself checked against transformers (logits of a dozen public architectures) and against loss curves of Megatron-Core.

Precision: what is computed in more than the parameters' dtype is computed in *at least* fp32 (softmax, norms, rotary tables, loss), so
an fp64 model stays fp64 throughout.
"""

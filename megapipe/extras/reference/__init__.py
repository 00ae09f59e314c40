"""The reference model: a GPT in one process in plain PyTorch, and its training step. Imports nothing of megapipe.

Every parallel test and `--verify-grid` compare a grid with it, so it is written to be trusted, not to be fast:
nn.Linear, ordinary autograd, an explicit softmax, torch.optim, no process groups, no fused kernels. It is itself
compared with transformers (logits of a dozen public architectures) and with loss curves of Megatron-Core.

    config        ReferenceConfig: the shape of the model under Megatron's names, all sizes resolved
    experts       the dense MLP and its activations; a mixture of experts in its place
    gpt           ReferenceGPT: parameters under Megatron's names and layouts; forward -> (loss_sum, num_tokens)
    train         build_optimizer, reference_step -> StepResult(loss, grad_norm, grads); Muon
    asynchronous  StreamTraining: PipeDream, PipeDream-2BW and PACI, whose pipelines drain only where told;
                  ErrorFeedback

What is not computed in the parameters' dtype is computed in *at least* fp32, so an fp64 model stays fp64 throughout.
"""

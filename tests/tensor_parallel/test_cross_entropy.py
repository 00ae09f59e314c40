"""Vocabulary-parallel cross entropy against torch's in one process: labels on any rank, padding, smoothing, z-loss,
precision, memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megapipe.tensor_parallel.cross_entropy as cross_entropy_module
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError, DataError
from megapipe.layers.ends import loss_block_bytes
from megapipe.model.embedding_and_head import capped_logits
from megapipe.tensor_parallel.cross_entropy import LossKernels, chunked_cross_entropy, vocab_parallel_cross_entropy
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.trace.meta import MetaMode
from tests.harness import RankPool
from tests.tensor_parallel.ranks import Storages, close, part, tp_group

S, B, PADDED = 8, 3, 32


def plain_loss(logits: Tensor, labels: Tensor, true_size: int, label_smoothing: float, z_loss: float) -> Tensor:
    """The same loss by torch's own cross entropy on whole logits, in fp64."""
    logits = logits[..., :true_size].double()
    smoothing = label_smoothing * true_size / (true_size - 1)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    )
    return losses.view(labels.shape) + z_loss * logits.logsumexp(-1).square()


def draw(true_size: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [S, B, PADDED], labels [S, B] (the first and last id occur) and loss gradients [S, B], alike on
    all ranks.
    """
    generator = torch.Generator().manual_seed(true_size)
    logits = scale * torch.randn(S, B, PADDED, generator=generator, dtype=torch.float64)
    labels = torch.randint(true_size, (S, B), generator=generator)
    labels[0, 0], labels[-1, -1] = 0, true_size - 1
    return logits, labels, torch.rand(S, B, generator=generator, dtype=torch.float64)


OPTIONS = [
    (0.0, 0.0, False),
    (0.1, 0.0, False),
    (0.0, 1e-2, False),
    (0.1, 1e-2, True),
]  # label smoothing, z-loss, soft-cap


def run_loss(rank: int, world_size: int, true_size: int) -> None:
    group = tp_group(rank, world_size)
    drawn, labels, weights = draw(true_size)
    for label_smoothing, z_loss, soft_cap in OPTIONS:

        def capped(logits: Tensor, soft_cap: bool = soft_cap) -> Tensor:
            return 5.0 * torch.tanh(logits / 5.0) if soft_cap else logits * 1.0

        whole = drawn.clone().requires_grad_()
        expected = plain_loss(capped(whole), labels, true_size, label_smoothing, z_loss)
        (expected * weights).sum().backward()
        ours = part(drawn, 2, group).requires_grad_()
        losses = vocab_parallel_cross_entropy(capped(ours), labels, group, true_size, label_smoothing, z_loss)
        (losses * weights).sum().backward()
        close(losses, expected.detach())
        close(ours.grad, part(whole.grad, 2, group))
        assert torch.equal(
            losses,
            vocab_parallel_cross_entropy(capped(ours.detach()), labels, group, true_size, label_smoothing, z_loss),
        )


# 20 of 32: with tp 4 the last rank holds padding only
@pytest.mark.parametrize("true_size", [32, 29, 20], ids=["no_padding", "padding", "a_rank_of_padding"])
def test_loss_and_gradient_equal_one_process(ranks: RankPool, true_size: int) -> None:
    ranks.run(run_loss, true_size)


def run_low_precision(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for block in (1, 64, 1 << 21):  # row by row, in blocks, whole
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy_module, "loss_block_bytes", lambda is_cuda, size=4 * block: size)
            compare_low_precision(tp_group(rank, world_size), dtype)


def compare_low_precision(group: Group, dtype: torch.dtype) -> None:
    drawn, labels, weights = draw(29)
    drawn = drawn.to(dtype)
    whole = drawn.double().requires_grad_()
    expected = plain_loss(whole, labels, 29, 0.1, 1e-2)
    (expected * weights).sum().backward()
    ours = part(drawn, 2, group).requires_grad_()
    losses = vocab_parallel_cross_entropy(ours * 1.0, labels, group, 29, 0.1, 1e-2)
    assert losses.dtype == torch.float32
    (losses * weights.float()).sum().backward()
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)  # statistics in fp32
    # a gradient is rounded once, by half a unit of its dtype; below normal numbers by half the least step
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(
        ours.grad.double(), part(whole.grad, 2, group), rtol=0.51 * torch.finfo(dtype).eps, atol=max(smallest, 2e-8)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_logits_lose_only_their_own_rounding(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(run_low_precision, dtype)


def run_extreme(rank: int, world_size: int) -> None:
    group = tp_group(rank, world_size)
    drawn, labels, _ = draw(29, scale=1e4)
    whole = drawn.clone().requires_grad_()
    plain_loss(whole, labels, 29, 0.0, 0.0).sum().backward()
    ours = part(drawn, 2, group).float().requires_grad_()
    losses = vocab_parallel_cross_entropy(ours * 1.0, labels, group, 29)
    losses.sum().backward()
    assert losses.isfinite().all()
    torch.testing.assert_close(ours.grad.double(), part(whole.grad, 2, group), rtol=1e-2, atol=1e-2)


def test_extreme_logits_stay_finite(ranks: RankPool) -> None:
    ranks.run(run_extreme)


def run_no_full_logits(rank: int, world_size: int) -> None:
    group = tp_group(rank, world_size)
    hidden, vocabulary, seq = 4, 512, 16
    embedding = VocabParallelEmbedding(vocabulary, hidden, group, True, true_vocab_size=500)
    embedding.weight = nn.Parameter(torch.randn(vocabulary // world_size, hidden))
    head = ColumnParallelLinear(hidden, vocabulary, bias=False, tp=group, sequence_parallel=True)
    head.weight = embedding.weight
    tokens = torch.arange(seq * B).view(B, seq) % 500
    full = seq * B * vocabulary
    with Storages() as storages:
        x = embedding(tokens)
        logits = head(x)
        vocab_parallel_cross_entropy(logits, tokens.t(), group, 500, 0.1, 1e-3).sum().backward()
    assert storages.largest == full // world_size, (storages.largest, full)


def test_no_rank_ever_holds_full_logits(ranks: RankPool) -> None:
    ranks.run(run_no_full_logits)


@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 1e-3)], ids=["plain", "smoothing+z"])
def test_no_tensor_of_the_logits_size_is_allocated(options: tuple[float, float]) -> None:
    logits = torch.randn(16, 2, 512, requires_grad=True) * 1.0
    storages = Storages()
    storages.known.add(logits.untyped_storage().data_ptr())
    labels = torch.zeros(16, 2, dtype=torch.int64)
    with storages:
        losses = vocab_parallel_cross_entropy(logits, labels, Group.alone("tp"), 500, *options)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert storages.largest < logits.numel() // 8


def test_a_second_backward_is_refused() -> None:
    logits = torch.randn(4, 1, 8, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(4, 1, dtype=torch.int64), Group.alone("tp"), 8).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()


def test_an_operation_that_keeps_the_logits_is_detected() -> None:
    logits = torch.tanh(torch.randn(4, 1, 8, requires_grad=True))  # tanh keeps its output
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(4, 1, dtype=torch.int64), Group.alone("tp"), 8).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaf_logits_survive() -> None:
    logits = torch.randn(4, 1, 8, requires_grad=True)
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, torch.zeros(4, 1, dtype=torch.int64), Group.alone("tp"), 8).sum().backward()
    assert torch.equal(logits, before)
    assert logits.grad is not None


@pytest.mark.parametrize("label", [-100, 7], ids=["negative", "padding_row"])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} is outside the vocabulary of 7"):
        vocab_parallel_cross_entropy(torch.randn(1, 1, 8), torch.tensor([[label]]), Group.alone("tp"), 7)


def test_a_true_vocabulary_larger_than_the_padded_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="true vocabulary size 9"):
        vocab_parallel_cross_entropy(torch.randn(1, 1, 8), torch.tensor([[0]]), Group.alone("tp"), 9)


def run_chunked(rank: int, world_size: int, sequence_parallel: bool, true_size: int) -> None:
    """Compare losses and both gradients of the chunked loss with those of the output layer followed by the loss."""
    group = tp_group(rank, world_size) if world_size > 1 else Group.alone("tp")
    generator = torch.Generator().manual_seed(3)
    whole_hidden, whole_weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((S, B, 6), (PADDED, 6))
    )
    _, labels, weights = draw(true_size)
    sliced = part(whole_hidden, 0, group) if sequence_parallel else whole_hidden

    def run(
        label_smoothing: float, z_loss: float, cap: float | None, size: int | None, defers: bool
    ) -> tuple[Tensor, ...]:
        queue = WeightQueue()
        linear = ColumnParallelLinear(6, PADDED, bias=False, tp=group, sequence_parallel=sequence_parallel, queue=queue)
        linear.weight = nn.Parameter(part(whole_weight, 0, group))
        slot = linear.slots["weight"] = GradientSlot(torch.ones_like(linear.weight))
        hidden = sliced.clone().requires_grad_()
        if size is None:
            logits = capped_logits(linear(hidden), cap)
            losses = vocab_parallel_cross_entropy(logits, labels, group, true_size, label_smoothing, z_loss)
        else:
            losses = chunked_cross_entropy(
                hidden, linear, labels, true_size, size, cap=cap, label_smoothing=label_smoothing, z_loss=z_loss
            )
        if defers:
            queue.defer(0)
        (losses * weights).sum().backward()
        if defers:
            queue.immediate()
            assert torch.equal(slot.main_grad, torch.ones_like(slot.main_grad))
            queue.run(0)
        return losses.detach(), hidden.grad, slot.main_grad

    for label_smoothing, z_loss, capped in OPTIONS:
        cap = 2.0 if capped else None
        expected = run(label_smoothing, z_loss, cap, None, False)
        for size, defers in ((1, False), (5, False), (5, True), (100, True)):
            for found, wanted in zip(run(label_smoothing, z_loss, cap, size, defers), expected, strict=True):
                close(found, wanted)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_a_loss_in_chunks_is_the_loss(ranks: RankPool, sequence_parallel: bool) -> None:
    ranks.run(run_chunked, sequence_parallel, 20)


def test_a_loss_in_chunks_on_one_rank_gives_a_gradient_without_a_slot() -> None:
    run_chunked(0, 1, False, 29)
    linear = ColumnParallelLinear(6, PADDED, bias=False, tp=Group.alone("tp"), sequence_parallel=False)
    linear.weight = nn.Parameter(torch.randn(PADDED, 6, dtype=torch.float64))
    hidden, (_, labels, weights) = torch.randn(S, B, 6, dtype=torch.float64), draw(29)
    (chunked_cross_entropy(hidden, linear, labels, 29, 5) * weights).sum().backward()
    found, linear.weight.grad = linear.weight.grad, None
    (vocab_parallel_cross_entropy(linear(hidden), labels, linear.tp, 29) * weights).sum().backward()
    close(found, linear.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_logits_in_chunks_are_never_whole(dtype: torch.dtype) -> None:
    tokens, vocab, size = 64, 512, 8
    linear = ColumnParallelLinear(16, vocab, bias=False, tp=Group.alone("tp"), sequence_parallel=False)
    linear.weight = nn.Parameter(torch.randn(vocab, 16, dtype=dtype))
    linear.slots["weight"] = GradientSlot(torch.zeros(vocab, 16))
    hidden = torch.randn(tokens, 1, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (tokens, 1))
    with Storages() as storages:
        chunked_cross_entropy(hidden, linear, labels, vocab, size).sum().backward()
    assert storages.largest <= max(size * vocab, vocab * 16)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_formulas_for_compilation_give_the_loss_and_gradient_of_the_blocks(smoothing: float) -> None:
    """The functions that would be compiled, as they are written; padding of two words, both kinds of half precision."""
    for dtype in (torch.bfloat16, torch.float16):
        logits = (4 * torch.randn(6, 2, 18)).to(dtype)
        labels = torch.randint(0, 16, (6, 2))
        found = []
        for kernels in (None, LossKernels(lambda function: function)):
            leaf = logits.clone().requires_grad_()
            options = {"label_smoothing": smoothing, "z_loss": 1e-3, "kernels": kernels}
            loss = vocab_parallel_cross_entropy(leaf, labels, Group.alone("tp"), 16, **options)
            loss.sum().backward()
            found.append((loss.detach(), leaf.grad))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_blocks_keep_to_their_bytes_with_few_launches_on_gpus() -> None:
    """Llama 3's vocabulary and 8,192 tokens: 32 blocks on a GPU, 512 on a CPU, whose caches are small."""
    for device, count in (("cpu", 512), ("cuda", 32)):
        rows = torch.empty(8192, 128_256, dtype=torch.bfloat16, device="meta")
        with MetaMode(device):
            blocks = list(cross_entropy_module._blocks(rows))
        assert len(blocks) == count
        assert all((block.stop - block.start) * 4 * 128_256 <= loss_block_bytes(device == "cuda") for block in blocks)

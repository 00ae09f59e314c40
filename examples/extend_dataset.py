"""A data set of your own: sums such as 27+15=42 as bytes, with a loss on the answers alone.

megapipe pretrain --extension examples/extend_dataset.py --dataset sums --dataset-options digits=2 \
    --tokenizer-type ByteTokenizer --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 63 \
    --micro-batch-size 8 --train-iters 50 --lr 1e-3 --eval-iters 1

A sample depends on its index alone, so that every rank and every resumed run sees the same data.
"""

import numpy as np

from megapipe.extend import DatasetPart, register_dataset

EOD = 256  # of the ByteTokenizer


@register_dataset("sums", has_loss_mask=True)
class Sums:
    """Random sums, one after the other, each with the end-of-document token behind it."""

    def __init__(self, part: DatasetPart) -> None:
        self.part, self.digits = part, int(part.options.get("digits", "2"))
        self.fingerprint = f"{self.digits} digits"  # a run resumes only with the same

    def __len__(self) -> int:
        return 100_000 if self.part.name == "train" else 1_000

    def sample(self, index: int) -> tuple[list[int], list[int]]:
        """Return seq_length + 1 tokens, and 1 for each that belongs to an answer."""
        random = np.random.default_rng([self.part.seed, self.part.name != "train", index])
        length = self.part.seq_length + 1
        tokens: list[int] = []
        trained: list[int] = []
        while len(tokens) < length:
            a, b = random.integers(0, 10**self.digits, 2)
            question, answer = f"{a}+{b}=".encode(), f"{a + b}".encode()
            tokens += [*question, *answer, EOD]
            trained += [0] * len(question) + [1] * (len(answer) + 1)
        return tokens[:length], trained[:length]

"""The name of the embedding, and the size of the blocks in which the loss raises logits."""

WORD_EMBEDDING = "embedding.word_embeddings.weight"


def loss_block_bytes(is_cuda: bool) -> int:
    """Return the bytes of fp32 to which the loss raises logits of half types at a time.

    CPUs: what their caches hold. CUDA: a block costs ten kernel launches, so few blocks.
    """
    return 1 << 27 if is_cuda else 1 << 23

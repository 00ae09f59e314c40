"""Llama-shaped models at the sizes people train, with as many layers as fit one card."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig

LR, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of a step: `microbatches` of `micro_batch` sequences."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    seq: int
    vocab: int
    micro_batch: int
    microbatches: int

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.micro_batch * self.seq

    @property
    def step_sequences(self) -> int:
        return self.microbatches * self.micro_batch


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, seq=32, vocab=128, micro_batch=2, microbatches=2),
    "125m": Shape(
        layers=12, hidden=768, ffn=2048, heads=12, kv_heads=12, seq=2048, vocab=32768, micro_batch=16, microbatches=2
    ),
    "350m": Shape(
        layers=24, hidden=1024, ffn=2816, heads=16, kv_heads=16, seq=2048, vocab=32768, micro_batch=8, microbatches=2
    ),
    "1.3b": Shape(
        layers=24, hidden=2048, ffn=5632, heads=16, kv_heads=16, seq=2048, vocab=32768, micro_batch=4, microbatches=2
    ),
    "8b-4k": Shape(
        layers=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, seq=4096, vocab=32768, micro_batch=2, microbatches=4
    ),
    "8b-8k": Shape(
        layers=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, seq=8192, vocab=32768, micro_batch=1, microbatches=4
    ),
}


def configuration(shape: Shape, dtype: str, device: str) -> Config:
    """Return the configuration of pretrain_gpt.py: one rank, no recompute."""
    return Config(
        model=ModelConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.ffn,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            seq_length=shape.seq,
            vocab_size=shape.vocab,
            make_vocab_size_divisible_by=1,
            position_embedding_type="rope",
            normalization="RMSNorm",
            activation="swiglu",
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        training=TrainingConfig(
            micro_batch_size=shape.micro_batch, global_batch_size=shape.step_sequences, train_iters=1000, device=device
        ),
        optimizer=OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP),
        precision=PrecisionConfig(dtype=dtype),
    )

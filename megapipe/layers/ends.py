"""The ends of a model: the embedding, which is word and learned position tables and dropout; the head, which is final
norm, output layer over the padded vocabulary and cross entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.linear import collectives, column_gradient_bytes, weight_gradient_bytes
from megapipe.layers.norm import NormTable
from megapipe.layers.table import (
    ALL_REDUCE,
    MASK_BYTES,
    Backward,
    Collectives,
    Gemm,
    Kept,
    Operation,
    RankShape,
    Table,
    total_bytes,
)
from megapipe.sharding.spec import Fused, Init, ParamSpec

WORD_EMBEDDING = "embedding.word_embeddings.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"


def loss_block_bytes(is_cuda: bool) -> int:
    """Return the bytes of fp32 to which the loss raises logits of half types at a time.

    CPUs: what their caches hold. CUDA: a block costs ten kernel launches, so few blocks.
    """
    return 1 << 27 if is_cuda else 1 << 23


@dataclass(frozen=True)
class EmbeddingTable:
    """The first part of a model. frozen: names of parameters of the model that are not trained."""

    model: ResolvedModelConfig
    frozen: frozenset[str] = frozenset()

    def parameters(self, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the tables. Under sequence parallelism each tp rank sees only the positions of its tokens."""
        model, normal = self.model, Init("normal", self.model.init_method_std)
        yield ParamSpec(
            WORD_EMBEDDING,
            (model.padded_vocab_size, model.hidden_size),
            owner="embedding",
            slicing=Fused(0),
            init=normal,
            tied=model.has_embedding_at_both_ends,
            decoupled_lr=True,
            true_rows=model.vocab_size,
        )
        if model.position_embedding_type == "learned_absolute":
            shape, is_partial = (model.max_position_embeddings, model.hidden_size), sequence_parallel
            yield ParamSpec(POSITION_EMBEDDING, shape, owner="embedding", init=normal, partial_gradient=is_partial)

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank.

        The rows of the vocabulary are split over the tp ranks, so the output is a sum over tp; under sequence
        parallelism W gathers its gradient.
        """
        hidden = self.model.hidden_size
        dropout = Kept("dropout masks", shape.own_tokens * hidden, MASK_BYTES)
        lookup = Operation(
            "word_embeddings",
            (dropout,) if self.model.hidden_dropout > 0 else (),
            collectives=Collectives(1, 0, 1) if shape.sequence_parallel else Collectives(ALL_REDUCE),
            deferred_bytes=shape.hidden_bytes(hidden),
            backward=Backward(shape.gathered_bytes(hidden) + shape.tokens * hidden * shape.gradient),
        )
        if WORD_EMBEDDING in self.frozen:
            sent = replace(lookup.collectives, weights=0)
            lookup = replace(lookup, collectives=sent, deferred_bytes=0, backward=Backward(0))
        return Table((lookup,))


@dataclass(frozen=True)
class HeadTable:
    """The final norm, the output layer and the loss. Tied, the output layer uses the word embedding's table.

    frozen: names of parameters of the model that are not trained.
    """

    model: ResolvedModelConfig
    frozen: frozenset[str] = frozenset()

    @property
    def is_frozen(self) -> bool:
        """True if the output layer has no weight gradient."""
        is_untied = self.model.untie_embeddings_and_output_weights
        return ("output_layer.weight" if is_untied else WORD_EMBEDDING) in self.frozen

    @cached_property
    def norm(self) -> NormTable:
        return NormTable.of(self.model, "decoder.final_layernorm")

    def parameters(self, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the final norm and, untied, the output layer's weight."""
        model = self.model
        yield from self.norm.parameters("", "head", sequence_parallel)
        if model.untie_embeddings_and_output_weights:
            yield ParamSpec(
                "output_layer.weight",
                (model.padded_vocab_size, model.hidden_size),
                owner="head",
                slicing=Fused(0),
                init=Init("normal", model.init_method_std),
                decoupled_lr=True,
                true_rows=model.vocab_size,
            )

    def gemm(self, tp: int) -> Gemm:
        """Return the output layer on one of tp ranks; never in 8 bits."""
        rows = self.model.padded_vocab_size // tp
        return Gemm(self.model.hidden_size, rows, is_column=True, is_trained=not self.is_frozen)

    def logits(self, shape: RankShape) -> int:
        """Return the elements of the logits on one rank."""
        return shape.tokens * (self.model.padded_vocab_size // shape.tp)

    def loss_block_bytes(self, shape: RankShape) -> int:
        """Return what the loss makes and frees again in a forward, and without chunks in a backward, too: logits of
        half types raised to fp32, two blocks at a time; compiled, none.

        In chunks it makes their logits, too, while those of the chunk before exist.
        """
        if shape.loss_chunk is not None:
            size, before = self._chunk(shape)
            logits = size * (shape.element if self.model.final_logit_softcapping is None else shape.wide)
            return logits + max(before * logits, size * shape.wide if shape.element < shape.wide else 0)
        if shape.element == shape.wide or shape.compile_loss:
            return 0
        return min(2 * loss_block_bytes(shape.is_cuda), self.logits(shape) * shape.wide)

    def _chunk(self, shape: RankShape) -> tuple[int, int]:
        """Return the elements of the logits of a chunk of the loss, and 1 if there are several chunks, else 0."""
        assert shape.loss_chunk is not None
        tokens = min(shape.loss_chunk, shape.tokens)
        return tokens * (self.model.padded_vocab_size // shape.tp), int(tokens < shape.tokens)

    def _weight_gradient_bytes(self, shape: RankShape) -> int:
        """Return what the weight gradient of the output layer takes until it is added; in chunks with their logits and
        the gradients of these, made in fp32 while those of the chunk before exist.
        """
        weight = weight_gradient_bytes(self.gemm(shape.tp), shape)
        if shape.loss_chunk is None:
            return weight
        (size, before), element = self._chunk(shape), shape.element
        if self.model.final_logit_softcapping is not None:  # and two tensors for the slope of the cap
            made = 3 * shape.wide
        else:
            made = element if element == shape.wide else 2 * element + shape.wide
        return size * element + max(weight, size * (made + (before - 1) * element))

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank. With chunks of the loss I and W recompute the logits."""
        gemm, element, wide, logits = self.gemm(shape.tp), shape.element, shape.wide, self.logits(shape)
        hidden, soft_cap = shape.hidden_bytes(gemm.inputs), self.model.final_logit_softcapping
        in_chunks, weight = shape.loss_chunk is not None, self._weight_gradient_bytes(shape)
        made = column_gradient_bytes(gemm, shape) - weight_gradient_bytes(gemm, shape) + weight
        final_norm = (
            # its input and, for the weight gradient, its output
            *(Kept("final norm", shape.own_tokens * gemm.inputs, element),) * (1 if self.is_frozen else 2),
            *self.norm.statistics(shape.own_tokens, shape, "final norm"),
        )
        loss = [Kept("loss", shape.tokens, wide)] * (1 if in_chunks else 2)
        if shape.documents.loss_mask and wide > 4:  # in fp32 as it comes, else a copy
            loss.append(Kept("loss", shape.tokens, wide))
        kept_logits = Kept("logits", logits, element if soft_cap is None else 2 * wide)
        keeps_logits = () if in_chunks else (kept_logits,)
        frees = total_bytes((*final_norm, *keeps_logits, *loss))
        logits_gradient = 2 * shape.tokens * wide if in_chunks else logits * element
        waits = 0 if self.is_frozen else hidden + logits_gradient
        if shape.splits_backward:  # the gradient of the logits waits, in their place, and the input of the output layer
            frees -= waits
        operations = (
            Operation("final_layernorm", final_norm),
            Operation(
                "output_layer",
                keeps_logits,
                gemm=gemm,
                collectives=collectives(gemm, shape),
                deferred_bytes=waits,
                reads_weights_in_w=in_chunks,
                backward=Backward(made, frees),
            ),
            Operation("soft_cap", backward=None if soft_cap is None or in_chunks else Backward(2 * logits * wide)),
            Operation(
                "cross_entropy", tuple(loss), backward=None if in_chunks else Backward(self.loss_block_bytes(shape))
            ),
        )
        return Table(operations, left_bytes=hidden, weight_gradient_bytes=weight)

"""What a forward keeps for its backward, in bytes: one layer, one stage, for every recompute option. Equal to what autograd saves.

The terms are those of the table in `megapipe/model/__init__.py`; `tests/model/test_planned_bytes.py` compares them with the storages that
saved-tensor hooks see. Counted on one rank, for one microbatch. The formula of Korthikanti et al. 2022 (arXiv:2205.05198) for the GPT
block with dropout, s b h (10 + 24 / t) bytes without core attention, is a special case and a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.schedule.partition import StageLayers

MASK_BYTES = 1  # dropout masks are bool


@dataclass(frozen=True)
class LocalSizes:
    """Sizes on one rank, for one microbatch. Token counts are b s; under sequence parallelism a rank's own tokens are b s / tp."""

    tokens: int
    own_tokens: int  # between the tensor-parallel regions
    batch: int
    seq: int
    hidden: int
    ffn: int  # ffn / tp
    heads: int  # query heads / tp
    groups: int  # key/value heads / tp, at least 1
    channels: int  # of a head
    vocab: int  # padded vocabulary / tp
    element: int  # bytes of the dtype
    wide: int  # bytes of at least fp32
    attention: str = "sdpa"  # --attention-impl
    chunks_loss: bool = False  # --cross-entropy-chunk-size

    @classmethod
    def of(cls, model: ModelConfig, tp: int, sequence_parallel: bool, micro_batch_size: int, dtype: str) -> LocalSizes:
        """model: resolved. dtype: the configuration's name for it."""
        assert model.ffn_hidden_size and model.num_query_groups and model.kv_channels and model.padded_vocab_size
        tokens = micro_batch_size * model.seq_length
        return cls(
            tokens=tokens,
            own_tokens=tokens // tp if sequence_parallel else tokens,
            batch=micro_batch_size,
            seq=model.seq_length,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size // tp,
            heads=model.num_attention_heads // tp,
            groups=max(1, model.num_query_groups // tp),
            channels=model.kv_channels,
            vocab=model.padded_vocab_size // tp,
            element=ELEMENT_BYTES[dtype],
            wide=max(ELEMENT_BYTES[dtype], 4),
        )

    @classmethod
    def asked(
        cls, config: Config, model: ModelConfig, tp: int, sequence_parallel: bool, micro_batch_size: int
    ) -> LocalSizes:
        """With the kernels and the loss that a configuration asks for. model: resolved; its vocabulary is padded for this tp."""
        sizes = cls.of(model, tp, sequence_parallel, micro_batch_size, config.precision.dtype)
        chunks_loss = config.training.cross_entropy_chunk_size is not None
        return replace(sizes, attention=config.kernels.attention_impl, chunks_loss=chunks_loss)

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states between layers and stages: [s, b, h], [s / tp, b, h] under sequence parallelism."""
        return self.own_tokens * self.hidden * self.element

    @property
    def query(self) -> int:
        """Bytes of q, and of attention's output."""
        return self.tokens * self.heads * self.channels * self.element

    @property
    def key(self) -> int:
        """Bytes of k, and of v."""
        return self.tokens * self.groups * self.channels * self.element


@dataclass(frozen=True)
class Documents:
    """What a microbatch brings besides tokens and labels; each of it costs memory."""

    position_ids: bool = False
    attention_mask: bool = False
    loss_mask: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> Documents:
        return cls(data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


NO_DOCUMENTS = Documents()


def layer_activation_bytes(
    model: ModelConfig, sizes: LocalSizes, modules: Iterable[str] = (), documents: Documents = NO_DOCUMENTS
) -> dict[str, int]:
    """Bytes that one layer keeps, by what is kept. modules: what selective recompute leaves out."""
    modules = frozenset(modules)
    statistics = sizes.wide * (2 if model.normalization == "LayerNorm" else 1)
    kept_norms = 1 if {"mlp", "layernorm"} <= modules else 2  # the replay of the MLP starts at its norm's input
    kept = {
        "residual stream": 2 * sizes.hidden_states,
        "norm statistics": kept_norms * sizes.own_tokens * statistics,
        "norm outputs": 0 if "layernorm" in modules else 2 * sizes.hidden_states,
        "dropout masks": 2 * sizes.own_tokens * sizes.hidden * MASK_BYTES if model.hidden_dropout > 0 else 0,
        "q, k, v": sizes.query + 2 * sizes.key,
    }
    if model.qk_layernorm:
        kept["q, k, v"] += sizes.query + sizes.key
        kept["norm statistics"] += sizes.tokens * (sizes.heads + sizes.groups) * statistics
    if "core_attn" not in modules:
        kept |= _core_attention(model, sizes, documents)
    if "mlp" not in modules:
        kept |= _mlp(model, sizes, "activation" in modules)
    return {what: size for what, size in kept.items() if size}


def stage_bytes(
    model: ModelConfig,
    sizes: LocalSizes,
    layers: StageLayers,
    recompute: RecomputeConfig,
    documents: Documents = NO_DOCUMENTS,
) -> dict[str, int]:
    """Bytes that a stage keeps from the forward to the backward of one microbatch, its input included, by what is kept."""
    total: Counter[str] = Counter()
    modules = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    checkpoints, whole_layers = _checkpoints(recompute, layers.num_layers)
    if checkpoints:
        total["checkpoints"] = checkpoints * sizes.hidden_states
        total.update(kept_through_replays(sizes, recompute, layers.num_layers - whole_layers))
    for what, size in layer_activation_bytes(model, sizes, modules, documents).items():
        total[what] += whole_layers * size
    if layers.num_layers:
        total["document masks"] = _document_masks(
            model, sizes, documents, replays=bool(checkpoints) or "core_attn" in modules
        )
        if documents.position_ids and model.position_embedding_type == "rope":
            total["rotary tables"] = rotary_table_bytes(model, sizes) * sizes.batch
    if layers.has_embedding and model.hidden_dropout > 0:
        total["dropout masks"] += sizes.own_tokens * sizes.hidden * MASK_BYTES
    if layers.has_head:
        total.update(_head(model, sizes, documents))
    return {what: size for what, size in total.items() if size}


def kept_through_replays(sizes: LocalSizes, recompute: RecomputeConfig, num_layers: int) -> dict[str, int]:
    """What full recompute keeps of `num_layers` layers besides the inputs of its checkpoints."""
    if recompute.recompute_granularity != "full" or not recompute.recompute_keep_attention:
        return {}
    return {what: num_layers * size for what, size in _fused_attention(sizes).items()}


def replay_bytes(
    model: ModelConfig,
    sizes: LocalSizes,
    num_layers: int,
    recompute: RecomputeConfig,
    documents: Documents = NO_DOCUMENTS,
) -> int:
    """The most that one replay in the backward makes again and holds until its own backward is done."""
    if not num_layers or recompute.recompute_granularity is None:
        return 0
    whole = sum(layer_activation_bytes(model, sizes, (), documents).values())
    if recompute.recompute_granularity == "full":
        size = recompute.recompute_num_layers or 1
        in_one_replay = min(size, num_layers) if recompute.recompute_method == "uniform" else 1
        kept = sum(kept_through_replays(sizes, recompute, in_one_replay).values())
        return in_one_replay * whole - kept - sizes.hidden_states  # the input is the checkpoint, which is counted there
    modules = frozenset(recompute.recompute_modules)
    saved = {
        module: whole - sum(layer_activation_bytes(model, sizes, {module}, documents).values()) for module in modules
    }
    if "layernorm" in modules:
        saved["layernorm"] //= 2  # the two norms of a layer are made again one after the other
        if "mlp" in modules:
            saved["mlp"] += saved["layernorm"] + sizes.own_tokens * sizes.wide * (
                2 if model.normalization == "LayerNorm" else 1
            )
    return max(saved.values(), default=0)


def deferred_bytes(model: ModelConfig, sizes: LocalSizes, layers: StageLayers, recompute: RecomputeConfig) -> int:
    """What a stage holds for one microbatch between I and W of a split backward: input and output gradient of each linear.

    Inputs that selective recompute makes again are held as what they are made from; those that a replay makes, which happens in I, as they
    are. Full recompute is over by then.
    """
    modules = frozenset(recompute.recompute_modules if recompute.recompute_granularity == "selective" else ())
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    width = sizes.tokens * sizes.ffn * sizes.element
    qkv = sizes.query + 2 * sizes.key
    inputs = 2 * sizes.hidden_states + sizes.query + width  # of linear_qkv and linear_fc1, linear_proj, linear_fc2
    if "activation" in modules and "mlp" not in modules and model.activation != "relu":
        inputs += gates * width - width
    gradients = (
        2 * sizes.hidden_states + qkv + gates * width
    )  # of the outputs of linear_proj and linear_fc2, linear_qkv, linear_fc1
    total = layers.num_layers * (inputs + gradients)
    if layers.has_embedding:
        total += sizes.hidden_states
    if layers.has_head:
        total += sizes.hidden_states
        total += 2 * sizes.tokens * sizes.wide if sizes.chunks_loss else sizes.tokens * sizes.vocab * sizes.element
    return total


def rotary_table_bytes(model: ModelConfig, sizes: LocalSizes) -> int:
    """cos and sin of one sequence, [s, r / 2] each, r the rotated channels; 0 without rotary positions."""
    if model.position_embedding_type != "rope":
        return 0
    return 2 * sizes.seq * (int(sizes.channels * model.rotary_percent) // 2) * sizes.wide


def shared_mask_bytes(model: ModelConfig, sizes: LocalSizes, documents: Documents = NO_DOCUMENTS) -> int:
    """The additive mask [s, s] of a stage, made once: with a sliding window, and where attention is written out. None with documents."""
    windowed = model.window_size is not None and model.window_size < sizes.seq
    if documents.attention_mask or not (windowed or is_explicit(model)) or sizes.attention != "sdpa":
        return 0
    return sizes.seq * sizes.seq * sizes.element


def is_explicit(model: ModelConfig) -> bool:
    """Attention is written out in training: torch's fused kernels have no soft-cap, no keyed dropout, no softmax in a chosen dtype."""
    return model.attn_logit_softcapping is not None or model.attention_softmax_in_fp32 or model.attention_dropout > 0


def _fused_attention(sizes: LocalSizes) -> dict[str, int]:
    return {"attention output": sizes.query, "attention statistics": sizes.tokens * sizes.heads * sizes.wide}


def _core_attention(model: ModelConfig, sizes: LocalSizes, documents: Documents) -> dict[str, int]:
    grouped = sizes.heads > sizes.groups
    if sizes.attention != "sdpa" or not is_explicit(model):
        kept = _fused_attention(sizes)
        if documents.attention_mask and sizes.batch > 1 and grouped and sizes.groups > 1:
            # one mask a sequence: query groups cannot join the batch, so k and v are repeated; with qk-norm q lies as it is needed
            replaced = sizes.key if model.qk_layernorm else 2 * sizes.key
            kept["q, k, v repeated"] = 2 * sizes.query - replaced
        return kept
    squares = sizes.batch * sizes.heads * sizes.seq * sizes.seq
    probabilities = squares * sizes.wide
    if model.attn_logit_softcapping is not None:
        probabilities += squares * sizes.wide  # tanh
    if model.attention_dropout > 0:
        probabilities += squares * (MASK_BYTES + sizes.element)
    elif sizes.element != sizes.wide:
        probabilities += squares * sizes.element
    return {"attention output": sizes.query * (2 if grouped else 1), "attention probabilities": probabilities}


def _mlp(model: ModelConfig, sizes: LocalSizes, recompute_activation: bool) -> dict[str, int]:
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    width = sizes.tokens * sizes.ffn * sizes.element
    if model.activation == "relu":  # its backward needs its output alone
        return {"mlp activation": width}
    return {"mlp hidden": gates * width, "mlp activation": 0 if recompute_activation else width}


def _checkpoints(recompute: RecomputeConfig, num_layers: int) -> tuple[int, int]:
    """(checkpoints of a stage, layers that keep everything)."""
    if recompute.recompute_granularity != "full":
        return 0, num_layers
    size = recompute.recompute_num_layers or 1
    if recompute.recompute_method == "block":
        return min(size, num_layers), max(num_layers - size, 0)
    return -(-num_layers // size), 0


def _document_masks(model: ModelConfig, sizes: LocalSizes, documents: Documents, replays: bool) -> int:
    """[b, 1, s, s] of each microbatch; written-out attention needs it only in a forward, so only a replay keeps it."""
    if not documents.attention_mask or (is_explicit(model) and not replays):
        return 0
    return sizes.batch * sizes.seq * sizes.seq * sizes.element


def _head(model: ModelConfig, sizes: LocalSizes, documents: Documents) -> Mapping[str, int]:
    statistics = sizes.wide * (2 if model.normalization == "LayerNorm" else 1)
    capped = model.final_logit_softcapping is not None
    loss_mask = (
        sizes.tokens * sizes.wide if documents.loss_mask and sizes.wide > 4 else 0
    )  # fp32 as it comes, else a copy
    final_norm = 2 * sizes.hidden_states + sizes.own_tokens * statistics
    if sizes.chunks_loss:
        return {"final norm": final_norm, "loss": sizes.tokens * sizes.wide + loss_mask}
    return {
        "final norm": final_norm,
        "logits": sizes.tokens * sizes.vocab * (2 * sizes.wide if capped else sizes.element),
        "loss": 2 * sizes.tokens * sizes.wide + loss_mask,
    }

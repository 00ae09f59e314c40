"""Conversion of checkpoints written by Megatron-Core 0.16.1 into resumable runs.

Every tensor equals the one that Megatron itself loads on one rank.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megapipe.config.config import Config
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.errors import CheckpointError, ConfigError, MegapipeError
from megapipe.extras.cli.convert import guess, main
from megapipe.extras.cli.convert import read as read_source
from megapipe.extras.convert import megatron_dist, megatron_legacy
from megapipe.extras.convert.megatron_args import MegatronGrid, read_config
from megapipe.extras.convert.pickled import StandIn, load_pickled, read_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, fresh_state
from megapipe.extras.convert.tables import meaning, unpadded
from megapipe.trace.parameters import model_parameters
from megapipe.train.state import Schedules, TrainingState
from tests.extras.convert.test_refusals import folder as hugging_face_folder
from tests.tables import rows, value

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "megatron_checkpoints" / "checkpoints.tar.xz"
VOCAB = 60  # padded to 64 rows
GPT2, LLAMA = "gpt2_pp2_vpp2", "llama_tp2_dp2_distributed_optimizer"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the checkpoints written by Megatron; the README next to the archive describes them."""
    root = tmp_path_factory.mktemp("megatron")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


def differing(snapshot: Snapshot, truth: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ from `truth`, ignoring vocabulary padding, or that only one side has."""
    found = {name: tensor.detach() for name, tensor in snapshot.tensors.items()}
    odd = sorted(found.keys() ^ truth.keys())
    return odd + [
        name for name in found if name in truth and not torch.equal(found[name], truth[name][: found[name].shape[0]])
    ]


# ---------------------------------------------------------------------------------------------- reading a run


@pytest.mark.parametrize("kind", ["legacy", "dist"])
@pytest.mark.parametrize("case", [GPT2, "llama_tp2_pp2"])
def test_a_run_is_what_megatron_itself_loads_on_one_rank(real: Path, case: str, kind: str) -> None:
    """The cases are pp 2 x 2 chunks in fp32, and tp 2 x pp 2 with fp32 masters of bf16 weights.

    Megatron resharded the same state to one rank through its torch_dist format.
    """
    is_legacy = kind == "legacy"  # whose weights alone are read
    stored = load_file(real / case / "truth.safetensors")
    weights = {name.replace("weights", "master"): stored.pop(name) for name in list(stored) if "weights/" in name}
    truth = {name: weights.get(name, t) for name, t in stored.items() if "master/" in name} if is_legacy else stored
    words = [str(real / case / kind), "--vocab-size", str(VOCAB), *(["--weights-only"] if is_legacy else [])]
    snapshot = read_source("megatron", main.parse(words))
    assert differing(snapshot, truth) == []
    parameters = model_parameters(unpadded(snapshot.config.model), sequence_parallel=False)
    assert len(snapshot.tensors) == len(parameters) * (1 if is_legacy else 3)


@pytest.mark.parametrize("case", [GPT2, LLAMA])
def test_optimizer_state_of_the_legacy_format_is_refused_with_megatrons_own_conversion(real: Path, case: str) -> None:
    with pytest.raises(CheckpointError, match=r"--ckpt-convert-format torch_dist --ckpt-convert-save.*--weights-only"):
        megatron_legacy.read(real / case / "legacy", None, VOCAB)


def test_position_schedules_and_configuration_come_along(real: Path) -> None:
    snapshot = megatron_dist.read(real / LLAMA / "dist_fully_reshardable", None, VOCAB)
    assert TrainingState.from_dict(snapshot.state["training"]) == TrainingState(3, 24, 24 * 16, 0)
    assert snapshot.state["optimizer"] == {
        "num_steps": 3, "loss_scaler": {"scale": 1.0, "good_steps": 0, "overflows_left": 1}, "rule": "adam"
    }  # fmt: skip
    lr = Schedules.from_dict(snapshot.state["schedules"]).lr
    assert (lr.max_lr, lr.min_lr, lr.style, lr.warmup_samples, lr.decay_samples) == (1e-3, 1e-4, "cosine", 16, 800)
    model = snapshot.config.model
    assert (model.num_query_groups, model.normalization, model.activation, model.vocab_size) == (
        2,
        "RMSNorm",
        "swiglu",
        64,  # with the padding
    )
    assert (snapshot.config.precision.dtype, snapshot.config.optimizer.adam_beta2, snapshot.config.training.seed) == (
        "bf16",
        0.95,
        1234,
    )


def test_a_folder_of_one_iteration_is_read_too_and_a_step_can_be_asked_for(real: Path) -> None:
    whole = megatron_legacy.read(real / GPT2 / "legacy", 3, VOCAB, weights_only=True)
    one = megatron_legacy.read(real / GPT2 / "legacy" / "iter_0000003", None, VOCAB, weights_only=True)
    assert whole.state == one.state and guess(real / GPT2 / "legacy" / "iter_0000003") == "megatron"
    assert {guess(real / GPT2 / kind) for kind in ("legacy", "dist")} == {"megatron"}
    with pytest.raises(CheckpointError, match="has no iter_0000007"):
        megatron_legacy.read(real / GPT2 / "legacy", 7, VOCAB)


# ---------------------------------------------------------------------------------------------------- writing

LLAMA_MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=61,
    seq_length=16, position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
    add_bias_linear=False, make_vocab_size_divisible_by=8, untie_embeddings_and_output_weights=True, window_size=5,
)  # fmt: skip
MODELS = {
    "llama_untied": LLAMA_MODEL,
    "llama_tied_qk_norm_scaled": dataclasses.replace(
        LLAMA_MODEL,
        untie_embeddings_and_output_weights=False,
        qk_layernorm=True,
        rope_scaling_type="llama3",
        window_size=None,
    ),
    "llama_window_and_rope_in_some_layers": dataclasses.replace(
        LLAMA_MODEL, window_attn_skip_freq="2", no_rope_freq="[1]+[0]*3"
    ),
    "norms_without_weights": dataclasses.replace(LLAMA_MODEL, qk_l2_norm=True),
    "gated": dataclasses.replace(LLAMA_MODEL, attention_output_gate=True, qk_layernorm=True),
    "gpt2": ModelConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        vocab_size=61,
        seq_length=16,
        make_vocab_size_divisible_by=8,
    ),
}


def in_memory(tensor: torch.Tensor) -> LazyTensor:
    """Return a tensor of a snapshot that is already read."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def drawn(model: ModelConfig) -> Snapshot:
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for spec in model_parameters(unpadded(model), sequence_parallel=False):
        tensors[f"master/{spec.name}"] = in_memory(torch.randn(spec.shape, generator=generator).bfloat16())
    return Snapshot(Config(model, precision=PrecisionConfig("bf16")), tensors, fresh_state("bf16"))


@pytest.mark.parametrize("transformer_engine", [True, False], ids=["te", "local"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_for_megatron_reads_back_exactly(
    tmp_path: Path, name: str, tp: int, transformer_engine: bool
) -> None:
    snapshot = drawn(MODELS[name])
    folder = megatron_dist.write(snapshot, tmp_path / "megatron", MegatronGrid(tp, 2), transformer_engine)
    again = megatron_dist.read(tmp_path / "megatron")
    assert differing(again, {name: tensor.detach() for name, tensor in snapshot.tensors.items()}) == []
    assert meaning(again.config.model) == meaning(snapshot.config.model)
    rows_of_vocabulary = read_folder(folder)[0]["embedding.word_embeddings.weight"].shape[0]
    assert rows_of_vocabulary == 64, "61 tokens padded to a multiple of 8 x tp"


def test_hugging_face_to_megatron_and_back_by_command(tmp_path: Path) -> None:
    source = hugging_face_folder(tmp_path / "source")
    line = f"{source} {tmp_path / 'megatron'} --to megatron --tensor-model-parallel-size 2 --no-check"
    assert main(line.split()) == 0
    assert main(f"{tmp_path / 'megatron'} {tmp_path / 'back'} --to hugging-face --no-check".split()) == 0
    here, there = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


# --------------------------------------------------------------------------------------------------- refusals


def test_a_format_that_is_tied_to_its_grid_is_refused_with_the_reason(real: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"stored as separate objects, which cannot be read.*fully-reshardable.*--weights-only"
    ):
        megatron_dist._optimizer(Path("folder"), {}, ["optimizer.distributed.dp_group_idx_0.param_state"], {}, False)


def args_of(real: Path, **changes: Any) -> dict[str, Any]:
    if "block_configs" in changes:
        blocks = json.dumps({"block_configs": changes.pop("block_configs")})
        changes["heterogeneous_layers_config_encoded_json"] = blocks
    return vars(load_pickled(real / GPT2 / "dist" / "iter_0000003" / "common.pt")["args"]) | changes


ROWS: dict[str, list[Any]] = {"refused": [], "layers": [], "written": []}
for kind, name, changes, expected in rows(Path(__file__).with_name("megatron_args.tsv")):
    ROWS[kind].append(pytest.param(value(changes), value(expected), id=name))


@pytest.mark.parametrize(("changes", "message"), ROWS["refused"])
def test_arguments_that_cannot_be_expressed_are_named(real: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(args_of(real, **{"vocab_size": 60} | changes), None)


@pytest.mark.parametrize(("changes", "expected"), ROWS["layers"])
def test_arguments_of_layers_that_differ_are_read(
    real: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = read_config(args_of(real, vocab_size=60, position_embedding_type="rope", **changes), None).model
    layers = layer_configs(unpadded(model))
    assert {name: [getattr(layer, name) for layer in layers] for name in expected} == expected


@pytest.fixture
def legacy(real: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint over tp 2 x pp 2, to be changed."""
    shutil.copytree(real / "llama_tp2_pp2" / "legacy", tmp_path / "megatron")
    return tmp_path / "megatron" / "iter_0000003"


def rewrite(path: Path, change: Any) -> None:
    content = load_pickled(path)
    for name, found in [*vars(content["args"]).items()]:
        if isinstance(found, StandIn):  # a class of Megatron's, which only Megatron can write
            delattr(content["args"], name)
    change(content)
    torch.save(content, path.with_name("changed.pt"))  # the tensors are mapped from the other file
    path.with_name("changed.pt").replace(path)


def test_layers_without_attention_or_mlp_are_read_from_a_grid(legacy: Path) -> None:
    whole = megatron_legacy.read(legacy, None, VOCAB, weights_only=True)
    width = whole.config.model.ffn_hidden_size
    attention, mlp = {"n_heads_in_group": 2}, {"ffn_hidden_size": width}
    blocks = [
        {"attention": attention, "ffn": mlp},
        {"attention": attention, "mlp": {"no_op": True}},
        {"attention": attention, "ffn": mlp},
        {"attention": {"no_op": True}, "mlp": mlp},
    ]
    lost = {1: (".mlp.", ".pre_mlp_layernorm."), 3: (".self_attention.", ".input_layernorm.")}

    def remove(content: dict[str, Any], first: int) -> None:
        content["args"].heterogeneous_layers_config_encoded_json = json.dumps({"block_configs": blocks})
        for name in list(content["model"]):
            if any(f"layers.{n - first}{part}" in name for n, parts in lost.items() for part in parts):
                del content["model"][name]

    expected = {
        name: tensor.detach()
        for name, tensor in whole.tensors.items()
        if not any(f"layers.{n}{part}" in name for n, parts in lost.items() for part in parts)
    }
    assert len(expected) < len(whole.tensors)
    for path in legacy.glob("mp_rank_*"):
        first = 2 * int(path.name[-3:])
        rewrite(path / "model_optim_rng.pt", partial(remove, first=first))
    assert differing(megatron_legacy.read(legacy, None, VOCAB, weights_only=True), expected) == []


Q = "decoder.layers.0.self_attention.linear_qkv.weight"
HARM: dict[str, tuple[Any, str]] = {
    "missing": (lambda c: c["model"].pop(Q), r"lacks the tensor decoder.layers.0.self_attention.linear_qkv.weight"),
    "unknown": (
        lambda c: c["model"].update({"decoder.extra": torch.zeros(2)}),
        r"the tensor decoder.extra has no place in the model",
    ),
    "shape": (
        lambda c: c["model"].update({Q: torch.zeros(3, 3)}),
        r"linear_qkv.weight has shape \[3, 3\], its args require \[16, 16\]",
    ),
    "layers": (lambda c: setattr(c["args"], "num_layers", 5), "holds 4 layers, its args say num_layers 5"),
    "no_args": (lambda c: c.pop("args"), "holds no args, so the model is unknown"),
    "no_model": (lambda c: c.pop("model"), "holds no model"),
}


@pytest.mark.parametrize(("change", "message"), HARM.values(), ids=HARM.keys())
def test_tensors_without_a_place_are_named(legacy: Path, change: Any, message: str) -> None:
    rewrite(legacy / "mp_rank_00_000" / "model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=message):
        megatron_legacy.read(legacy, None, VOCAB, weights_only=True)


def test_a_missing_rank_and_a_damaged_file_are_named(legacy: Path) -> None:
    path = legacy / "mp_rank_01_001" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng.pt cannot be read"):
        megatron_legacy.read(legacy, None, VOCAB)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"holds \[2, 1\] tensor-parallel ranks of its stages, expected 2 of each"
    ):
        megatron_legacy.read(legacy, None, VOCAB)


@pytest.mark.parametrize(("changes", "message"), ROWS["written"])
def test_what_megatron_cannot_express_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    grid = MegatronGrid(*changes.pop("grid", (1, 1)))
    with pytest.raises(MegapipeError, match=message):
        megatron_dist.write(drawn(dataclasses.replace(LLAMA_MODEL, **changes)), tmp_path / "megatron", grid)
    assert not any(tmp_path.iterdir())


def test_a_hole_in_a_distributed_checkpoint_is_named(real: Path, tmp_path: Path) -> None:
    source = real / GPT2 / "dist" / "iter_0000003"
    copy = tmp_path / "iter_0000003"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes()[:3000] if path.name == "__1_0.distcp" else path.read_bytes())
    snapshot = megatron_dist.read(copy, None, VOCAB)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: .* cannot be read"):
        [tensor.detach() for tensor in snapshot.tensors.values()]
    (copy / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match=r".metadata cannot be read"):
        megatron_dist.read(copy, None, VOCAB)
    assert json.loads((copy / "metadata.json").read_text())["sharded_backend"] == "torch_dist"

"""Runs that Megatron-Core 0.19.2 trained and saved on CPU, in each of its formats, read and continued here.

The fixtures' README says what they are. Their vocabulary has 101 tokens in 128 rows, all of them in Megatron's softmax.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.convert import main
from megapipe.extras.cli.convert import read as read_source
from megapipe.extras.convert import megatron, megatron_dist
from megapipe.extras.convert.megatron import in_halves, layer_order
from megapipe.extras.convert.megatron_args import MegatronGrid
from megapipe.extras.convert.megatron_dist import Place, lay_out
from megapipe.extras.convert.pickled import read_folder
from megapipe.extras.convert.snapshot import EXPERT_BIAS, Snapshot, read_checkpoint, write_checkpoint
from megapipe.extras.convert.tables import unpadded
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.sharding.boxes import Box
from megapipe.trace.parameters import model_parameters
from tests.extras.convert.test_megatron import in_memory
from tests.train import jobs
from tests.train.jobs import job

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron_runs"
LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def read(folder: Path, *flags: str) -> Snapshot:
    return read_source("megatron", main.parse([str(folder), *flags]))


def values(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in snapshot.tensors.items()}


def test_buckets_hold_the_state_that_megatron_stores_by_name(runs: Path) -> None:
    buckets, named = (read(runs / kind) for kind in ("dp_reshardable", "fully_reshardable"))
    assert not (runs / "dp_reshardable" / "iter_0000003" / "common.pt").exists()
    expected = values(named)
    assert expected.keys() == buckets.tensors.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in values(buckets).items())
    assert (buckets.state, buckets.config) == (named.state, named.config)
    assert buckets.state["training"]["step"] == buckets.state["optimizer"]["num_steps"] == 3


FORMS_BACK = {"plain": False, "fully_reshardable": True}  # of Megatron's runs -> if their optimizer is distributed
# a run that is converted and trained here to step 13 -> the forms in which Megatron then continued it
CONTINUED = {
    "plain": list(FORMS_BACK),
    "sinks_plain": [f"sinks_{form}" for form in FORMS_BACK],
    "stages_plain": ["stages_plain"],
    "groups_plain": ["groups_plain"],
}
TRAINED = (
    *("plain", "dp_reshardable", "fully_reshardable"),
    *("sinks_plain", "interleaved", "stages_plain", "groups_plain", "fsdp_experts", "fsdp"),
)


@pytest.mark.parametrize("kind", TRAINED)
def test_the_next_ten_losses_are_megatrons(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the ten after them are those of Megatron where it continued what was written here at step 13."""
    assert main([str(runs / kind), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "kept all 128 rows of the vocabulary, of which 101 are tokens" in said
    assert ("reordered the channels of queries and keys" in said) == (kind == "interleaved")
    monkeypatch.setattr(jobs, "TINY", "--num-workers 0 --eval-iters 0 --log-interval 1 --device cpu")
    later = [f"{form}_from_megapipe_step_13" for form in CONTINUED.get(kind, ())]
    steps = continued(tmp_path / "ours", tmp_path, 23 if later else 13)
    assert [line["step"] for line in steps] == list(range(4, 24 if later else 14))
    curves = json.loads((FIXTURES / "curves.json").read_text())
    for name, own in ((kind, steps[:10]), *((name, steps[10:]) for name in later)):
        curve = {key: numbers[-10:] for key, numbers in curves[name].items() if key != "first_step"}
        assert [line["loss"] for line in own] == pytest.approx(curve["losses"], abs=1e-6), name
        assert [line["grad_norm"] for line in own] == pytest.approx(curve["grad_norms"], rel=1e-5), name
        assert [line["lr"] for line in own] == pytest.approx(curve["lrs"], rel=1e-6), name


def continued(source: Path, folder: Path, last: int) -> list[dict[str, Any]]:
    """Train a converted run up to a step, as Megatron did, and return the metrics of its steps."""
    code, said = job(
        f"--load {source} --use-checkpoint-args --use-checkpoint-opt-param-scheduler --lr 1e-2 --min-lr 1e-3 "
        "--adam-beta2 0.95 --weight-decay 0.1 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 "
        f"--exit-interval {last} --seed 1234 --data-path {FIXTURES / 'corpus'} --split 100,0,0 "
        f"--data-cache-path {folder / 'cache'} --save {folder / 'run'}"
    )
    assert code == 0, said
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


GRIDS = {
    "one": MegatronGrid(),
    "tp2_etp1_ep2": MegatronGrid(2, 1, 2, 1),
    "tp2_etp2_ep4": MegatronGrid(2, 1, 4),
    "pp2_ep2": MegatronGrid(1, 2, 2),
}
BACK = [
    ("plain", MegatronGrid(2, 2)),
    *((name, grid) for name in ("latent_plain", "sinks_plain") for grid in GRIDS.values()),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "grid"), BACK, ids=lambda value: str(value))
@pytest.mark.parametrize("form", FORMS_BACK)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_a_run_goes_to_megatron_and_back_with_its_optimizer(
    runs: Path, tmp_path: Path, implementation: str, form: str, name: str, grid: MegatronGrid, dtype: str
) -> None:
    run = read(runs / name)
    config = dataclasses.replace(run.config, precision=PrecisionConfig(dtype))
    scaler = {"scale": 1024.0, "good_steps": 7, "overflows_left": 2} if dtype == "fp16" else None
    optimizer = run.state["optimizer"] | ({"loss_scaler": scaler} if scaler else {})
    run = dataclasses.replace(run, config=config, state=run.state | {"optimizer": optimizer, "precision": dtype})
    is_fused, is_distributed = implementation == "transformer_engine", FORMS_BACK[form]
    folder = megatron_dist.write(run, tmp_path / "theirs", grid, is_fused, is_distributed)
    again, expected = read(tmp_path / "theirs"), values(run)
    found = values(again)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    for part in ("training", "optimizer", "schedules"):
        assert again.state[part] == run.state[part]
    stored, others = read_folder(folder)
    weights = {name: tensor.dtype for name, tensor in stored.items() if not name.startswith("optimizer.")}
    args = others["common_state/shard_0_1"].read(with_stand_ins=True)[0]["args"]
    biases = {kind for name, kind in weights.items() if name.endswith(EXPERT_BIAS)}
    assert biases == ({torch.float32} if name == "latent_plain" else set())
    assert {str(kind) for name, kind in weights.items() if not name.endswith(EXPERT_BIAS)} == {f"torch.{LONG[dtype]}"}
    assert args.vocab_size == args.padded_vocab_size == 128
    assert args.use_distributed_optimizer == is_distributed


WRITTEN = {
    "plain": MegatronGrid(2, 2),
    "fully_reshardable": MegatronGrid(2, 2),
    "latent_plain": GRIDS["tp2_etp1_ep2"],
    "latent_fully_reshardable": GRIDS["tp2_etp1_ep2"],
    "sinks_plain": GRIDS["pp2_ep2"],
    "stages_plain": GRIDS["pp2_ep2"],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_torch_dist_folder_holds_what_megatrons_own_holds(runs: Path, tmp_path: Path, name: str) -> None:
    """Names, shapes, dtypes and the rest but for args, of the same run as Megatron-Core 0.19.2 wrote it."""
    theirs, is_sharded = runs / name / "iter_0000003", name.endswith("fully_reshardable")
    ours = megatron_dist.write(read(runs / name), tmp_path / "ours", WRITTEN[name], False, is_sharded)
    (expected, expected_others), (found, found_others) = read_folder(theirs), read_folder(ours)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert all(torch.equal(tensor.read(), expected[name].read()) for name, tensor in found.items())
    assert found_others.keys() == expected_others.keys(), "the args and extra states of all layers"
    assert (ours / "metadata.json").read_text() == (theirs / "metadata.json").read_text()
    rest, theirs_rest = (
        others["common_state/shard_0_1"].read(with_stand_ins=True)[0] for others in (found_others, expected_others)
    )
    assert rest.keys() == theirs_rest.keys() and rest["opt_param_scheduler"] == theirs_rest["opt_param_scheduler"]
    content, theirs_content = rest["content_metadata"], theirs_rest["content_metadata"]
    key = "distrib_optim_fully_reshardable_mem_efficient"  # a way of gathering, which Megatron lets differ
    assert content | {key: None} == theirs_content | {key: None}
    # experts have an optimizer of their own, the second of a chain
    chains = [found if 0 in found else {0: found} for found in (rest["optimizer"], theirs_rest["optimizer"])]
    assert chains[0].keys() == chains[1].keys() and len(chains[0]) == (1 if name in FORMS_BACK else 2)
    for optimizer, theirs_optimizer in zip(*(chain.values() for chain in chains), strict=True):
        assert optimizer.keys() == theirs_optimizer.keys()
        states = (state.get("optimizer", state) for state in (optimizer, theirs_optimizer))
        groups, theirs_groups = (state["param_groups"] for state in states)
        by_schedule = {"lr", "step"}  # set in every step; counted in `common_step` by a plain optimizer
        for group, theirs_group in zip(groups, theirs_groups, strict=True):
            shared = (group.keys() & theirs_group.keys()) - by_schedule
            assert {name: group[name] for name in shared} == {name: theirs_group[name] for name in shared}
            assert group.keys() - theirs_group.keys() <= {"step"}, "keys that Megatron matches its groups by"


def test_torch_loads_a_written_torch_dist_folder_in_slices(runs: Path, tmp_path: Path) -> None:
    folder = megatron_dist.write(read(runs / "plain"), tmp_path / "ours", MegatronGrid(), False, True)
    name = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"
    state = {name: torch.zeros(2, 24, 8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state[name], read_folder(runs / "plain" / "iter_0000003")[0][name].read())
    boxes = [box for box, _ in read_folder(folder)[0][name].boxes]
    assert boxes == [Box((layer, 0, 0), (1, 24, 8)) for layer in range(2)], "one layer at a time"


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("form", FORMS_BACK)
def test_a_tied_model_whose_sizes_are_not_multiples_of_64_goes_to_megatron_and_back(
    runs: Path, tmp_path: Path, form: str, tp: int, pp: int
) -> None:
    model = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=2, vocab_size=31, seq_length=16)
    source = read(runs / "plain")
    generator = torch.Generator().manual_seed(7)
    drawn = {
        f"{key}/{spec.name}": torch.randn(spec.shape, generator=generator)
        for spec in model_parameters(unpadded(model), sequence_parallel=False)
        for key in ("master", "exp_avg", "exp_avg_sq")
    }
    tensors = {name: in_memory(tensor) for name, tensor in drawn.items()}
    config = dataclasses.replace(source.config, model=dataclasses.replace(model, make_vocab_size_divisible_by=16))
    run = dataclasses.replace(source, config=config, tensors=tensors)
    megatron_dist.write(run, tmp_path / "theirs", MegatronGrid(tp, pp), True, FORMS_BACK[form])
    found = values(read(tmp_path / "theirs", "--drop-vocab-padding"))
    assert found.keys() == drawn.keys() and all(torch.equal(found[name], drawn[name]) for name in found)


def test_optimizer_state_is_asked_for_only_where_there_is_any(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(runs / "plain"), str(tmp_path / "ours"), "--weights-only"]) == 0
    line = f"{tmp_path / 'ours'} {tmp_path / 'theirs'} --to megatron"
    assert main([*line.split(), "--use-distributed-optimizer"]) == 2
    assert "has no optimizer state that Megatron could continue" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()
    assert main(line.split()) == 0
    assert "--ckpt-format torch_dist --finetune" in capsys.readouterr().out
    again, expected = read(tmp_path / "theirs").weights, read_checkpoint(tmp_path / "ours").weights
    assert all(torch.equal(again[name].detach(), tensor.detach()) for name, tensor in expected.items())


def test_what_megatron_cannot_continue_is_said(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = read(runs / "plain")
    parallel = dataclasses.replace(plain.config.parallel, pipeline_schedule="pipedream-2bw")
    changes = {name.replace("master/", "last_change/"): t for name, t in plain.tensors.items() if "master/" in name}
    sources = {
        "plain": plain,
        "late": dataclasses.replace(plain, config=dataclasses.replace(plain.config, parallel=parallel)),
        "feedback": dataclasses.replace(plain, tensors={**plain.tensors, **changes}),
        "muon": dataclasses.replace(plain, state=plain.state | {"optimizer": {"rule": "muon"}}),
        "weights": read(runs / "plain", "--weights-only"),
    }
    said = {}
    for name, source in sources.items():
        write_checkpoint(source, tmp_path / name)
        assert main([*f"{tmp_path / name} {tmp_path / name}_theirs --to megatron".split()]) == 0
        said[name] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert not said["plain"] and not said["weights"]
    words = {"late": "pipedream-2bw", "feedback": "--delay-error-feedback", "muon": "optimizer's state"}
    for name, word in words.items():
        (line,) = said[name]
        assert word in line


@pytest.mark.parametrize("kinds", ["qqkv", "qqggkv"])
def test_interleaved_channels_of_heads_become_two_halves(kinds: str) -> None:
    """The first 6 of 8 channels are rotated; biases and the norms of heads move too, everything else stays."""
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 32}
    model = ModelConfig(**sizes, qk_layernorm=True, position_embedding_type="rope", rotary_percent=0.75, seq_length=8)
    model = dataclasses.replace(model, attention_output_gate="g" in kinds)
    specs = model_parameters(unpadded(model), sequence_parallel=False)
    tensors = {f"master/{spec.name}": torch.randn(spec.shape) for spec in specs}
    lazy = {name: in_memory(tensor) for name, tensor in tensors.items()}
    found = {name: tensor.detach() for name, tensor in in_halves(Config(model=model), lazy).items()}
    moved = [0, 2, 4, 1, 3, 5, 6, 7]
    for kind in ("weight", "bias"):
        name = f"master/decoder.layers.0.self_attention.linear_qkv.{kind}"
        before, after = tensors.pop(name), found.pop(name)
        for head, its_kind in enumerate(2 * kinds):  # two groups
            rows = torch.arange(8 * head, 8 * head + 8)
            assert torch.equal(after[rows], before[rows[moved] if its_kind in "qk" else rows]), (kind, head)
        for part in ("q", "k"):
            name = f"master/decoder.layers.0.self_attention.{part}_layernorm.{kind}"
            assert torch.equal(found.pop(name), tensors.pop(name)[moved])
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


# ------------------------------------------------------------------------------------------------ the vocabulary


def test_padding_rows_are_dropped_only_on_demand(runs: Path) -> None:
    kept = read(runs / "plain")
    dropped = read(runs / "plain", "--drop-vocab-padding")
    weights = read(runs / "plain", "--weights-only")
    sizes = [snapshot.config.model.vocab_size for snapshot in (kept, dropped, weights)]
    assert sizes == [128, 101, 101] and not dropped.remarks and not weights.remarks
    whole, cut = values(kept), values(dropped)
    assert all(torch.equal(tensor, whole[name][: tensor.shape[0]]) for name, tensor in cut.items())
    assert whole["exp_avg_sq/output_layer.weight"][101:].abs().min() > 0, "Megatron trains the padding"


def test_padding_rows_go_to_megatron_and_back(runs: Path, tmp_path: Path) -> None:
    first = read(runs / "plain")
    assert main([str(runs / "plain"), str(tmp_path / "ours")]) == 0
    line = f"{tmp_path / 'ours'} {tmp_path / 'theirs'} --to megatron --tensor-model-parallel-size 2"
    assert main(line.split()) == 0
    weights = read(tmp_path / "theirs").weights
    assert all(torch.equal(tensor.detach(), weights[name].detach()) for name, tensor in first.weights.items())


def test_the_true_size_is_needed_only_to_drop_rows(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = megatron_dist._common

    def without_size(*arguments: Any) -> Any:
        content = common(*arguments)
        content["args"].vocab_size = None
        return content

    monkeypatch.setattr(megatron_dist, "_common", without_size)
    (remark,) = read(runs / "plain").remarks
    assert "of which an unknown number are tokens" in remark
    with pytest.raises(ConfigError, match="only has padded_vocab_size 128: give the true size"):
        read(runs / "plain", "--drop-vocab-padding")
    assert read(runs / "plain", "--drop-vocab-padding", "--vocab-size", "90").config.model.vocab_size == 90


# ---------------------------------------------------------------------------------------------------- the layout


LAYOUTS: dict[str, tuple[list[int], dict[str, Place] | None]] = {
    "one_bucket": ([64 * 2 + 20], {"a": Place(0, 0, 40), "b": Place(0, 64, 64), "c": Place(0, 128, 20)}),
    "a_bucket_each": ([40, 64, 20], {"a": Place(0, 0, 40), "b": Place(1, 0, 64), "c": Place(2, 0, 20)}),
    "before_a_shared_embedding": ([64, 64, 20], {"a": Place(0, 0, 40), "b": Place(1, 0, 64), "c": Place(2, 0, 20)}),
    "too_large": ([64 * 3 + 20], None),
    "one_parameter_less": ([64 + 64], None),
}


@pytest.mark.parametrize(("sizes", "expected"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_parameters_fill_buckets_from_multiples_of_64(sizes: list[int], expected: dict[str, Place] | None) -> None:
    assert lay_out([("a", 40), ("b", 64), ("c", 20)], sizes) == expected


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flat tensor of a bucket, in memory."""

    values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def read(self, box: Box) -> torch.Tensor:
        return self.values[box.slices]


def test_a_tied_embedding_has_a_bucket_on_the_first_and_on_the_last_stage() -> None:
    """The case is a GPT-2 in bf16 over pp 2, with Transformer Engine's order of the parameters."""
    model = unpadded(ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=32, seq_length=16))
    generator = torch.Generator().manual_seed(5)
    masters = {
        spec.name: torch.randn(spec.shape, generator=generator)
        for spec in model_parameters(model, sequence_parallel=False)
    }
    layer = "self_attention.linear_proj input_layernorm self_attention.linear_qkv pre_mlp_layernorm mlp.linear_fc1 "
    modules = [
        ["embedding.word_embeddings", "embedding.position_embeddings"]
        + [f"decoder.layers.0.{name}" for name in f"{layer}mlp.linear_fc2".split()],
        [f"decoder.layers.1.{name}" for name in f"{layer}mlp.linear_fc2".split()] + ["decoder.final_layernorm"],
    ]
    stored: dict[str, Any] = {}
    for pp_rank, names in enumerate(modules):
        order = [f"{name}.{kind}" for name in names for kind in ("weight", "bias") if f"{name}.{kind}" in masters]
        order += [WORD_EMBEDDING] if pp_rank else []
        buckets: list[list[torch.Tensor]] = [[]]
        for name in reversed(order):
            flat = masters[name].flatten()
            if name == WORD_EMBEDDING:
                buckets += [[flat], []]
            else:
                buckets[-1].append(torch.cat([flat, flat.new_zeros(-len(flat) % 64)]))
        for number, parts in enumerate(parts for parts in buckets if parts):
            for kind, factor in (("param", 1.0), ("exp_avg", 2.0), ("exp_avg_sq", 3.0)):
                key = f"optimizer.distributed.dp_group_idx_{pp_rank}.gbuf_idx_0.dtype_x.bucket_idx_{number}.{kind}"
                stored[key] = Flat(torch.cat(parts) * factor)
    weights = {name: in_memory(master.bfloat16()) for name, master in masters.items()}
    args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    state = megatron_dist.state_by_parameter(Path("f"), model, args, stored, weights)
    for name, master in masters.items():
        for key, factor in (("master", 1.0), ("exp_avg", 2.0), ("exp_avg_sq", 3.0)):
            assert torch.equal(state[f"{key}/{name}"].detach(), master * factor), name


def test_parameters_in_an_unknown_order_are_found_out(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = layer_order(is_latent=False, transformer_engine=False)
    swapped = [name for name in order if not name.endswith("layernorm")] + [
        name for name in order if "layernorm" in name
    ]
    monkeypatch.setattr(megatron, "layer_order", lambda is_latent, is_fused: swapped)
    with pytest.raises(CheckpointError, match=r"not the concatenation.*--dist-ckpt-optim-fully-reshardable"):
        read(runs / "dp_reshardable")


def test_a_master_that_differs_from_its_weight_is_found_out(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: dict[str, Any] = {}
    tensors = megatron_dist._tensors

    def shifted(folder: Path, stage: Any, given: dict[str, Any], cut: Any) -> Any:
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        weights.update(given, **{name: dataclasses.replace(given[name], read=lambda: given[name].read() + 1)})
        return tensors(folder, stage, weights, cut)

    monkeypatch.setattr(megatron_dist, "_tensors", shifted)
    with pytest.raises(
        CheckpointError, match=r"master of decoder.layers.1.mlp.linear_fc1.weight differs from the weight"
    ):
        values(read(runs / "dp_reshardable"))


def test_missing_groups_are_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = megatron_dist._common

    def of_another_grid(*arguments: Any) -> Any:
        content = common(*arguments)
        content["args"].tensor_model_parallel_size = 4
        return content

    monkeypatch.setattr(megatron_dist, "_common", of_another_grid)
    with pytest.raises(CheckpointError, match="has 4 groups of gradient buffers, its args say tp 4 and pp 2"):
        read(runs / "dp_reshardable")


def test_a_converted_run_is_what_was_read(runs: Path, tmp_path: Path) -> None:
    assert main([str(runs / "dp_reshardable"), str(tmp_path / "ours")]) == 0
    expected = values(read(runs / "dp_reshardable"))
    found = values(read_checkpoint(tmp_path / "ours"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

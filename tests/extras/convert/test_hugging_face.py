"""Conversion of transformers models with random weights.

The converted models compute the same logits, and exporting them restores the tensors bit-exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.snapshot import Snapshot, read_checkpoint, write_checkpoint
from megapipe.extras.verify.conversion import stage_logits
from tests.extras.convert.models import CASES, EAGER, LENGTH, SIZES, draw_tokens, logits, make, save
from tests.harness import RankPool
from tests.train.jobs import job

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)
Pools = Callable[[int], RankPool]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_tensors(folder: Path, other: Path) -> None:
    here, there = tensors_of(folder), tensors_of(other)
    assert here.keys() == there.keys()
    assert [
        name for name in here if here[name].dtype != there[name].dtype or not torch.equal(here[name], there[name])
    ] == []


def load_again(folder: Path) -> Any:
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind: Any = getattr(transformers, architecture)
    return kind.from_pretrained(folder, dtype=torch.float32, **EAGER).eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs_and_the_way_back_is_exact(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = make(case)
    theirs = save(model, tmp_path / "theirs", case.shard)
    assert (theirs / "model.safetensors.index.json").exists() == (case.shard != "1GB")
    write_checkpoint(hugging_face.read(theirs), tmp_path / "ours")
    snapshot = read_checkpoint(tmp_path / "ours")
    tokens = draw_tokens(model.config.vocab_size)
    expected = logits(model, tokens)
    torch.testing.assert_close(stage_logits(snapshot, tokens), expected, rtol=0.0, atol=1e-5)
    assert hugging_face.write(snapshot, tmp_path / "back", max_bytes=30_000) == type(model).__name__
    assert_same_tensors(theirs, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    again = load_again(tmp_path / "back")
    assert torch.equal(logits(again, tokens), expected)
    assert said_by(again.config) == said_by(model.config)


def said_by(config: Any) -> dict[str, Any]:
    ignored = ["_name_or_path", "architectures", "dtype"]
    ignored += ["partial_rotary_factor"]  # which rope_parameters has too; Phi-3 keeps both
    return {key: value for key, value in config.to_dict().items() if key not in ignored}


@pytest.mark.filterwarnings("ignore")
def test_the_text_model_of_a_gemma_3_with_images_has_its_logits(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    images = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    images |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=SIZES | CASES["gemma3"].settings,
        vision_config=images | {"model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=0,
    )
    whole = Gemma3ForConditionalGeneration(config).eval()
    save(whole, tmp_path / "gemma-3-27b-pt")
    with pytest.raises(ConfigError, match=r"it has a vision tower.*--text-only converts its text model"):
        hugging_face.read(tmp_path / "gemma-3-27b-pt")
    read = hugging_face.read(tmp_path / "gemma-3-27b-pt", text_only=True)
    tokens = draw_tokens(61).clamp(min=1)
    torch.testing.assert_close(stage_logits(read, tokens), logits(whole, tokens), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_dtype_is_kept_unless_another_is_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = save(make(CASES["qwen3"]).to(dtype), tmp_path / "theirs")
    assert main([str(theirs), str(tmp_path / "ours"), "--no-check"]) == 0
    assert {tensor.dtype for tensor in read_checkpoint(tmp_path / "ours").tensors.values()} == {dtype}
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--no-check"]) == 0
    assert_same_tensors(theirs, tmp_path / "back")
    assert main([str(tmp_path / "ours"), str(tmp_path / "wide"), "--no-check", "--dtype", "fp32"]) == 0
    wide, narrow = tensors_of(tmp_path / "wide"), tensors_of(theirs)
    assert all(torch.equal(wide[name], narrow[name].float()) for name in narrow)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_a_base_model_saved_without_its_head_is_read(tmp_path: Path) -> None:
    """GPT-2 on the hub has names without `transformer.` and attention masks among its tensors."""
    model = make(CASES["gpt2"])
    theirs = save(model, tmp_path / "theirs")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(theirs).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH)
    save_file(bare, theirs / "model.safetensors", {"format": "pt"})
    tokens = draw_tokens(61)
    torch.testing.assert_close(
        stage_logits(hugging_face.read(theirs), tokens), logits(model, tokens), rtol=0.0, atol=1e-5
    )


def test_the_check_compares_both_models_and_sees_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(make(CASES["mistral_window"]), tmp_path / "theirs")
    assert main([str(theirs), str(tmp_path / "ours")]) == 0
    assert "the models agree: largest logit difference" in capsys.readouterr().out
    config = json.loads((theirs / "config.json").read_text())
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--no-check"]) == 0
    (tmp_path / "back" / "config.json").write_text(json.dumps(config | {"sliding_window": 6}))
    from megapipe.extras.verify.conversion import compare

    comparison = compare(read_checkpoint(tmp_path / "ours"), tmp_path / "back")
    assert not comparison.agree
    assert str(comparison).startswith("THE MODELS DIFFER")


def test_tokenizer_and_ids_of_special_tokens_travel_along(tmp_path: Path) -> None:
    theirs = save(make(CASES["llama"]), tmp_path / "theirs")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(theirs / "tokenizer.json"))
    (theirs / "special_tokens_map.json").write_text("{}")
    (theirs / "README.md").write_text("not a tokenizer's")
    config = json.loads((theirs / "config.json").read_text()) | {"eos_token_id": [7, 9]}
    (theirs / "config.json").write_text(json.dumps(config))
    assert main([str(theirs), str(tmp_path / "ours"), "--no-check"]) == 0
    saved = read_checkpoint(tmp_path / "ours")
    folder = tmp_path / "ours" / "step_00000000" / "tokenizer"
    assert (saved.config.data.tokenizer_type, saved.config.data.tokenizer_model) == (
        "HuggingFaceTokenizer",
        str(folder),
    )
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--no-check"]) == 0
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
    }
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [7, 9]
    write_checkpoint(Snapshot(saved.config, saved.tensors, saved.state), tmp_path / "bare")
    assert main([str(tmp_path / "bare"), str(tmp_path / "like"), "--like", str(theirs), "--no-check"]) == 0
    assert (tmp_path / "like" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "like" / "config.json").read_text())["eos_token_id"] == [7, 9]


@pytest.mark.parametrize("name", ["llama3_tied_odd_vocabulary_sharded", "gemma3"])
def test_the_printed_configuration_loads_as_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    theirs = save(make(CASES[name]), tmp_path / "theirs")
    assert main([str(theirs), "--print-config"]) == 0
    (tmp_path / "model.yaml").write_text(capsys.readouterr().out)
    loaded = load_config(["--config", str(tmp_path / "model.yaml")], is_job=False).config.model
    assert loaded == hugging_face.read(theirs).config.model
    assert not loaded.untie_embeddings_and_output_weights
    assert loaded.rope_scaling_type != "none" and loaded.vocab_size == CASES[name].settings.get("vocab_size", 61)


# -------------------------------------------------------------------------------------------------- on a grid

GRID = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "micro_batch_size": 2,
    "train_iters": 1,
    "lr": 1e-3,
    "make_vocab_size_divisible_by": 16,
}


def forward_and_save(rank: int, world_size: int, source: str, target: str, tokens: Tensor) -> Tensor | None:
    """Load on tp 2 x pp 2, run a forward pass through the pipeline, and save.

    The last stage returns its vocabulary slice of the logits.
    """
    import dataclasses

    from megapipe.assembly.runtime import TrainingRuntime
    from megapipe.comm.groups import build_process_groups
    from megapipe.config.yaml_file import to_yaml
    from megapipe.model.microbatch import Microbatch
    from megapipe.plan.resolve import resolve
    from megapipe.train.loading import load
    from megapipe.train.saving import Saving

    config = read_checkpoint(Path(source)).config
    sections = {name: {} for name in ("model", "parallel", "training", "optimizer")}
    for name, value in GRID.items():
        section = next(section for section in sections if hasattr(getattr(config, section), name))
        sections[section][name] = value
    config = dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, seq_length=LENGTH, max_position_embeddings=LENGTH)
    )
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, load=source, finetune=True, no_save_optim=True)
    )
    plan = resolve(config, world_size)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
    resumed = load(runtime, Path(source))
    runtime.stores.finish_weights()
    Saving(runtime, resumed.schedules, Path(target), to_yaml(config), None, print).write(resumed.state)
    return _forward(runtime, Microbatch(tokens))


@torch.no_grad()
def _forward(runtime: Any, microbatch: Any) -> Tensor | None:
    import torch.distributed as dist

    (stage,) = runtime.stages.values()
    pp = runtime.groups.pp
    seq, batch = microbatch.tokens.shape[1], microbatch.tokens.shape[0]
    if pp.rank == 0:
        dist.send(stage(microbatch), group=pp.handle, group_dst=1)
        return None
    hidden = torch.empty(seq, batch, runtime.plan.config.model.hidden_size)
    dist.recv(hidden, group=pp.handle, group_src=0)
    return stage(hidden, microbatch, return_logits=True).transpose(0, 1)


ON_A_GRID = ["llama3_tied_odd_vocabulary_sharded", "gemma3", "gpt2_untied_relu_narrow", "mistral_window", "olmo3"]
ON_A_GRID += ["phi3", "smollm3", "exaone4"]


@pytest.mark.parametrize("name", ON_A_GRID)
def test_tp2_pp2_computes_the_same_and_exports_the_same(rank_pools: Pools, tmp_path: Path, name: str) -> None:
    model = make(CASES[name])
    theirs = save(model, tmp_path / "theirs")
    write_checkpoint(hugging_face.read(theirs), tmp_path / "ours")
    tokens = draw_tokens(model.config.vocab_size)
    found = rank_pools(4).run(forward_and_save, str(tmp_path / "ours"), str(tmp_path / "grid"), tokens)
    whole = torch.cat([part for part in found if part is not None], dim=2)
    vocab_size = model.config.vocab_size
    assert whole.shape[2] % 32 == 0 and whole.shape[2] > vocab_size, "the vocabulary was to be padded"
    torch.testing.assert_close(whole[..., :vocab_size], logits(model, tokens), rtol=0.0, atol=1e-5)
    hugging_face.write(read_checkpoint(tmp_path / "grid"), tmp_path / "back")
    assert_same_tensors(theirs, tmp_path / "back")


def test_pretraining_goes_on_from_a_converted_model(tmp_path: Path) -> None:
    theirs = save(make(CASES["qwen2_tied"]).to(torch.bfloat16), tmp_path / "theirs")
    assert main([str(theirs), str(tmp_path / "ours"), "--no-check", "--seq-length", "8"]) == 0
    flags = (
        f"--load {tmp_path / 'ours'} --use-checkpoint-args --finetune --train-iters 2 "
        f"--save {tmp_path / 'run'} --bf16 --lr 1e-3"
    )
    code, said = pretrain(flags)
    assert code == 0, said
    assert "loaded" in said
    trained = read_checkpoint(tmp_path / "run")
    assert trained.step == 2
    assert main([str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "bf16"]) == 0
    here, there = tensors_of(theirs), tensors_of(tmp_path / "back")
    assert here.keys() == there.keys()
    assert not all(torch.equal(here[name], there[name]) for name in here)


def test_a_converted_mixture_is_finetuned_with_other_losses_and_transport(tmp_path: Path) -> None:
    theirs = save(make(CASES["mixtral"]), tmp_path / "theirs")
    assert main([str(theirs), str(tmp_path / "ours"), "--no-check", "--seq-length", "8"]) == 0
    words = "--use-checkpoint-args --finetune --train-iters 1 --lr 1e-3"
    for chosen in (
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 1e-3 --moe-expert-capacity-factor 2",
        "--moe-token-dispatcher-type allgather --moe-router-dtype fp64 --moe-router-force-load-balancing",
    ):
        code, said = pretrain(f"--load {tmp_path / 'ours'} {words} {chosen}")
        assert code == 0 and "changed since" not in said, said
    code, said = pretrain(f"--load {tmp_path / 'ours'} {words} --moe-router-topk 1")
    assert code != 0 and "moe_router_topk is 1 by flag --moe-router-topk, but 2 in the checkpoint" in said


def pretrain(flags: str) -> tuple[int, str]:
    """Run the tiny job without its model flags, which come from the checkpoint."""
    from tests.train import jobs

    kept = (
        "--micro-batch-size 2 --global-batch-size 4 --mock-data --num-workers 0 --eval-iters 0 "
        "--log-interval 1 --device cpu"
    )
    before = jobs.TINY
    jobs.TINY = kept
    try:
        return job(flags)
    finally:
        jobs.TINY = before


def test_greedy_text_of_a_converted_model_is_that_of_transformers(tmp_path: Path) -> None:
    """`megapipe generate` finds model, precision and tokenizer in the folder of the converted checkpoint."""
    tokenizers = pytest.importorskip("tokenizers")
    from megapipe.extras.cli.command import main as megapipe

    model = make(CASES["mistral_window"])
    theirs = save(model, tmp_path / "theirs")
    letters = {chr(ord("0") + number): number for number in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(theirs / "tokenizer.json"))
    assert main([str(theirs), str(tmp_path / "ours"), "--no-check"]) == 0
    prompt = "A7b"
    line = f"generate --load {tmp_path / 'ours'} --prompt {prompt} --max-new-tokens 12 --temperature 0 --ignore-eod"
    assert megapipe([*line.split(), "--output", str(tmp_path / "out")]) == 0
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    expected = model.generate(
        ids, max_new_tokens=12, do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0
    )
    text = json.loads((tmp_path / "out").read_text())["text"]
    assert text == tokenizer.decode(expected[0, ids.shape[1] :].tolist())
    assert len(text) == 12

"""`--text-only`: the text model of a model with images, by Qwen3-VL with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megapipe.errors import ConfigError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.families import TEXT_TOWERS
from megapipe.extras.convert.tables import map_tensors, unpadded
from megapipe.model.microbatch import Microbatch
from tests.extras.convert.models import CASES, EAGER, SETS, SIZES, draw_tokens, gradients, make, save, without_casts
from tests.extras.convert.test_fp64 import assert_close, stage_in_fp64

transformers = pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)
TEXT = SIZES | SETS["EXPERTS"] | {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 12}
TEXT["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]}
IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
IMAGES |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4}
MARKS = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}


@torch.no_grad()
def whole_model() -> Any:
    config = transformers.Qwen3VLMoeConfig(text_config=TEXT, vision_config=IMAGES, **MARKS)
    model = transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.float32, **EAGER).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0, 0.15, generator=generator)
    return model


@pytest.mark.filterwarnings("ignore")
def test_the_text_model_is_converted_and_what_is_left_out_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(whole_model(), tmp_path / "theirs")
    assert main([str(theirs), str(tmp_path / "ours")]) == 2
    assert "megapipe lacks images, sound or video" in (said := capsys.readouterr().err)
    assert "--text-only converts its text model" in said
    assert main([str(theirs), str(tmp_path / "ours"), "--text-only"]) == 0
    said = capsys.readouterr().out
    assert "the models agree" in said
    assert "left out (--text-only): model.visual.blocks, 1,960 parameters in 12 tensors" in said
    assert main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert "the models agree" in capsys.readouterr().out
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    first, again = hugging_face.read(theirs, text_only=True), hugging_face.read(tmp_path / "back")
    assert first.weights.keys() == again.weights.keys()
    assert all(torch.equal(first.weights[name].detach(), again.weights[name].detach()) for name in first.weights)


@pytest.mark.filterwarnings("ignore")
def test_experts_are_read_in_either_order_of_their_channels(tmp_path: Path) -> None:
    theirs = save(whole_model(), tmp_path / "theirs")
    first = {name: tensor.detach() for name, tensor in hugging_face.read(theirs, text_only=True).weights.items()}
    stored = load_file(theirs / "model.safetensors")
    turned = {name: tensor.mT.contiguous() if tensor.ndim == 3 else tensor for name, tensor in stored.items()}
    save_file(turned, theirs / "model.safetensors", {"format": "pt"})
    again = hugging_face.read(theirs, text_only=True).weights
    assert all(torch.equal(tensor, again[name].detach()) for name, tensor in first.items())


@pytest.mark.filterwarnings("ignore")
def test_logits_and_gradients_of_the_text_model_are_theirs_in_fp64(tmp_path: Path) -> None:
    model = whole_model()
    snapshot, tokens = hugging_face.read(save(model, tmp_path / "theirs"), text_only=True), draw_tokens(61).clamp(min=5)
    with without_casts():
        kind: Any = transformers.Qwen3VLMoeForConditionalGeneration
        theirs = kind._from_config(model.config, dtype=torch.float64, **EAGER).eval()
        theirs.load_state_dict(model.state_dict())
        expected = theirs(tokens, use_cache=False).logits
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        (expected * weights).sum().backward()
    stage = stage_in_fp64(snapshot)
    found = stage(Microbatch(tokens), return_logits=True)
    assert isinstance(found, torch.Tensor)
    assert_close(found.transpose(0, 1), expected, "logits")
    (found.transpose(0, 1) * weights).sum().backward()
    of_theirs = {name.replace(".language_model.", "."): gradient for name, gradient in gradients(theirs).items()}
    own = {name: parameter.grad for name, parameter in stage.named_parameters()}
    for entry in map_tensors(TEXT_TOWERS["qwen3_vl_moe_text"].rows, unpadded(snapshot.config.model), "Qwen3-VL"):
        gradient = own[entry.spec.name]
        assert gradient is not None
        for part, name in zip(entry.layout.split(gradient), entry.theirs, strict=True):
            assert_close(part, of_theirs[name], name)


@pytest.mark.filterwarnings("ignore")
def test_the_text_model_of_llama_4_is_read_and_written_as_a_model_of_its_own(tmp_path: Path) -> None:
    text = SIZES | CASES["llama4"].settings
    images = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    images |= {"image_size": 8, "patch_size": 4, "vision_output_dim": 8, "projector_input_dim": 8}
    config = transformers.Llama4Config(text_config=text, vision_config=images | {"projector_output_dim": 8})
    kind: Any = transformers.Llama4ForConditionalGeneration
    model = kind._from_config(config, dtype=torch.float32, **EAGER).eval()
    theirs = save(model, tmp_path / "theirs")
    assert main([str(theirs), str(tmp_path / "ours"), "--text-only"]) == 0
    assert main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["Llama4ForCausalLM"]
    own = model.language_model.state_dict()
    stored = load_file(tmp_path / "back" / "model.safetensors")
    assert stored.keys() == own.keys() and all(torch.equal(tensor, stored[name]) for name, tensor in own.items())


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    theirs = save(make(CASES["qwen3_moe"]), tmp_path / "theirs")
    with pytest.raises(ConfigError, match="it has no text_config: the model is a text model; leave --text-only out"):
        hugging_face.read(theirs, text_only=True)

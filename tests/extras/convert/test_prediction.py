"""The modules of multi-token prediction of DeepSeek-V3 and GLM-4.5 pass through conversion bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.families import FAMILIES
from megapipe.extras.convert.hugging_face import stored_tensors
from megapipe.extras.convert.megatron_args import MegatronGrid, write_args
from megapipe.extras.convert.snapshot import read_checkpoint, write_checkpoint
from megapipe.plan.resolve import resolve
from tests.extras.convert.models import CASES, make, save
from tests.tiny import LLAMA, tiny_config

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)
NAMES = ("deepseek_v3", "deepseek_v3_no_latent_of_queries", "glm4_moe")


def folder_with_modules(name: str, folder: Path, count: int, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model of transformers with modules after its last layer, as the published files have them."""
    model = make(CASES[name]).to(dtype)
    save(model, folder)
    tensors = {each: tensor.detach() for each, tensor in stored_tensors(folder).items()}
    tensors |= {each: tensor.float() for each, tensor in tensors.items() if each.endswith("e_score_correction_bias")}
    layers, generator = model.config.num_hidden_layers, torch.Generator().manual_seed(4)
    hidden = model.config.hidden_size

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    last = f"model.layers.{layers - 1}."
    for number in range(layers, layers + count):
        module = f"model.layers.{number}."
        for each in [each for each in tensors if each.startswith(last)]:
            tensors[module + each.removeprefix(last)] = drawn(*tensors[each].shape).to(tensors[each].dtype)
        tensors |= {f"{module}{norm}.weight": drawn(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{module}eh_proj.weight"] = drawn(hidden, 2 * hidden)
        embedding = tensors["model.embed_tokens.weight"]
        tensors[f"{module}embed_tokens.weight"] = embedding.clone()
        tensors[f"{module}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    return changed(folder, tensors, num_nextn_predict_layers=count)


def changed(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(("name", "count"), [(name, 1) for name in NAMES] + [("deepseek_v3", 2)])
def test_modules_there_and_back_are_the_same_bits(tmp_path: Path, name: str, count: int) -> None:
    theirs = folder_with_modules(name, tmp_path / "theirs", count, torch.bfloat16)
    snapshot = hugging_face.read(theirs)
    assert snapshot.config.model.mtp_num_layers == count
    write_checkpoint(snapshot, tmp_path / "ours")
    hugging_face.write(read_checkpoint(tmp_path / "ours"), tmp_path / "back")
    before, after = load_file(theirs / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for each, tensor in before.items():
        assert tensor.dtype == after[each].dtype and torch.equal(tensor, after[each]), each
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == count


def test_a_folder_that_names_modules_without_their_tensors_has_none(tmp_path: Path) -> None:
    theirs = save(make(CASES["deepseek_v3_no_latent_of_queries"]), tmp_path / "theirs")
    changed(theirs, load_file(theirs / "model.safetensors"), num_nextn_predict_layers=1)
    assert hugging_face.read(theirs).config.model.mtp_num_layers is None


def test_modules_are_left_out_on_demand(tmp_path: Path) -> None:
    theirs = folder_with_modules("deepseek_v3_no_latent_of_queries", tmp_path / "theirs", 1)
    whole = hugging_face.read(theirs)
    snapshot = hugging_face.read(theirs, frozenset({"num_nextn_predict_layers"}))
    assert {name for name in whole.tensors if "/mtp." not in name} == set(snapshot.tensors)
    hugging_face.write(snapshot, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_module_that_is_not_whole_or_shares_nothing_is_refused(tmp_path: Path) -> None:
    theirs = folder_with_modules("deepseek_v3_no_latent_of_queries", tmp_path / "theirs", 1)
    tensors = load_file(theirs / "model.safetensors")
    changed(theirs, {name: tensor for name, tensor in tensors.items() if not name.endswith("eh_proj.weight")})
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.3\.eh_proj\.weight"):
        hugging_face.read(theirs)
    for copy in ("embed_tokens", "shared_head.head"):
        name = f"model.layers.3.{copy}.weight"
        changed(theirs, tensors | {name: tensors[name] + 1})
        with pytest.raises(CheckpointError, match=rf"{name} differs from the model's own"):
            hugging_face.read(theirs)
    without = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name or ".3." not in name}
    assert hugging_face.read(changed(theirs, without)).config.model.mtp_num_layers == 1
    changed(theirs, tensors, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..* has no place"):
        hugging_face.read(theirs)


def test_formats_without_the_modules_refuse_them_by_name() -> None:
    options = LLAMA | {"kv_channels": 4, "mtp_num_layers": 1}
    config = resolve(tiny_config(**options), 1).config
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot express model\.mtp_num_layers 1"):
        FAMILIES["LlamaForCausalLM"].write(config.model)
    with pytest.raises(ConfigError, match=r"Megatron's args cannot express model\.mtp_num_layers 1"):
        write_args(config, {}, 24, MegatronGrid(1, 1))

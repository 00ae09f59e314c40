"""DeepSeek-V3: what is special in its files, and what has no equivalent here and is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapipe.api.language_model import load
from megapipe.config.config import Config
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.families import FAMILIES
from megapipe.extras.convert.megatron_args import MegatronGrid, write_args
from megapipe.extras.convert.snapshot import write_checkpoint
from megapipe.extras.convert.tables import unpadded
from megapipe.trace.parameters import model_parameters, model_states
from tests.extras.convert.models import CASES, draw_tokens, logits, make, save

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)


def test_a_loaded_model_has_the_biases_of_routers_and_continues_text_with_a_cache(tmp_path: Path) -> None:
    model = make(CASES["deepseek_v3"])
    write_checkpoint(hugging_face.read(save(model, tmp_path / "theirs")), tmp_path / "ours")
    loaded, _ = load(tmp_path / "ours")
    tokens = draw_tokens(model.config.vocab_size)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens), logits(model, tokens), rtol=0.0, atol=1e-5)
    prompt = tokens[0, :8].tolist()
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert loaded.generate([prompt], 10, temperature=0.0, stop_tokens=()) == [theirs[0, 8:].tolist()]


# of deepseek-ai/DeepSeek-V3-Base, without the kind of its weights
PUBLISHED = json.loads((Path(__file__).parents[2] / "fixtures/hugging_face/deepseek_v3.json").read_text())


def test_the_published_configuration_is_expressed_with_all_671_billion_parameters() -> None:
    family = FAMILIES["DeepseekV3ForCausalLM"]
    model = unpadded(family.read(PUBLISHED))
    specs = (*model_parameters(model, False), *model_states(model))
    predicts = [spec for spec in specs if spec.name.startswith("mtp.")]
    assert sum(spec.num_elements for spec in specs if spec not in predicts) == 671_026_419_200
    # README_WEIGHTS.md of the files: 11.5 billion unique ones, 14 with the copies of embedding and output layer
    unique, copies = sum(spec.num_elements for spec in predicts), 2 * model.vocab_size * model.hidden_size
    assert (round(unique / 1e9, 1), round((unique + copies) / 1e9)) == (11.6, 13)
    assert model.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    written = family.write(family.read(PUBLISHED))
    assert family.read(written) == family.read(PUBLISHED)


def test_a_null_number_of_dense_layers_is_the_default() -> None:
    family, name = FAMILIES["DeepseekV3ForCausalLM"], "first_k_dense_replace"
    assert family.read(PUBLISHED | {name: None}) == family.read(PUBLISHED | {name: 3})


def test_norms_of_latents_keep_their_own_epsilon() -> None:
    """Moonlight and Kimi have rms_norm_eps 1e-5, and latents are normed with 1e-6 whatever it is."""
    family = FAMILIES["DeepseekV3ForCausalLM"]
    model = family.read(PUBLISHED | {"rms_norm_eps": 1e-5})
    assert (model.norm_epsilon, model.latent_norm_epsilon) == (1e-5, 1e-6)
    assert family.write(model)["rms_norm_eps"] == 1e-5
    with pytest.raises(ConfigError, match=r"cannot express model\.latent_norm_epsilon 1e-05"):
        family.write(dataclasses.replace(model, latent_norm_epsilon=None))
    with pytest.raises(ConfigError, match=r"Megatron's args cannot express model\.latent_norm_epsilon 1e-06"):
        write_args(Config(model=model), {}, model.vocab_size, MegatronGrid(1, 1, 1, 1))


OF_V2 = {  # of deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V2: how experts are chosen
    "lite": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
    "large": {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
}


def test_deepseek_v2_is_read_with_groups_that_have_the_score_of_their_best_expert() -> None:
    family = FAMILIES["DeepseekV2ForCausalLM"]
    of_v3 = ("aux_loss_alpha", "num_nextn_predict_layers", "norm_topk_prob", "scoring_func", "topk_method")
    published = {key: value for key, value in PUBLISHED.items() if key not in of_v3} | {"norm_topk_prob": False}
    model = family.read(published | OF_V2["lite"])
    assert (model.moe_router_score_function, model.moe_router_pre_softmax) == ("softmax", True)
    assert family.read(family.write(model)) == model
    large = family.read(published | OF_V2["large"])
    assert (large.moe_router_num_groups, large.moe_router_group_topk, large.moe_router_group_score_topk) == (8, 3, 1)
    assert family.read(family.write(large)) == large
    with pytest.raises(ConfigError, match="never normalizes the weights of the chosen experts in DeepSeek-V2"):
        family.read(published | OF_V2["lite"] | {"norm_topk_prob": True})


def changed(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """Replace the tensors of a folder, and keys of its config.json."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_weights_in_8_bits_are_multiplied_by_the_scales_of_their_blocks(tmp_path: Path) -> None:
    theirs = save(make(CASES["deepseek_v3_no_latent_of_queries"]).bfloat16(), tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    name, block = "model.layers.1.self_attn.kv_b_proj.weight", [16, 8]  # [80, 14]
    rows, columns = tensors[name].shape
    scales = torch.rand(-(-rows // 16), -(-columns // 8)) + 0.5
    in_8_bits = tensors[name].to(torch.float8_e4m3fn)
    expected = in_8_bits.float()
    for row in range(rows):
        for column in range(columns):
            expected[row, column] *= scales[row // 16, column // 8]
    quantization = {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3", "activation_scheme": "dynamic"}
    stored = tensors | {name: in_8_bits, f"{name}_scale_inv": scales}
    changed(theirs, stored, quantization_config=quantization)
    found = hugging_face.read(theirs).weights["decoder.layers.1.self_attention.linear_kv_up_proj.weight"].detach()
    assert torch.equal(found, expected.bfloat16())
    changed(theirs, stored | {f"{name}_scale_inv": scales[1:]})
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight_scale_inv has shape \[4, 2\]"):
        hugging_face.read(theirs)
    changed(theirs, stored, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="quantization_config gptq cannot be read"):
        hugging_face.read(theirs)

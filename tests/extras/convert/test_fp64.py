"""In fp64 a converted model's logits and gradients equal those of transformers, whose casts to fp32 are patched out.

Its logits also equal those of the project's own reference.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.families import family_of
from megapipe.extras.convert.snapshot import Snapshot
from megapipe.extras.convert.tables import map_tensors, unpadded
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.verify.conversion import replace_parameter
from megapipe.extras.verify.oracle import reference_config
from megapipe.model.microbatch import Microbatch
from megapipe.model.stage import GPTStage
from megapipe.plan.resolve import resolve
from megapipe.schedule.partition import StageLayers
from megapipe.trace.parameters import model_states
from tests.extras.convert.models import CASES, LENGTH, draw_tokens, in_fp64, make, save, without_casts
from tests.extras.convert.models import gradients as of_stored_names

pytest.importorskip(
    "transformers", reason="the optional package transformers is not installed: pip install 'megapipe[transformers]'"
)


def stage_in_fp64(snapshot: Snapshot) -> GPTStage:
    model = unpadded(snapshot.config.model)
    whole = StageLayers(0, model.num_layers, True, True)
    stage = GPTStage(
        model, whole, Group.alone("tp"), sequence_parallel=False, recompute=RecomputeConfig(), loss=TrainingConfig()
    )
    for name, parameter in list(stage.named_parameters()):
        replace_parameter(stage, parameter, nn.Parameter(snapshot.weights[name].detach().double()))
    for name, state in list(stage.named_buffers()):
        state.copy_(snapshot.weights[name].detach())
    return stage


def assert_close(found: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert found is not None and expected is not None, name
    assert found.dtype == expected.dtype == torch.float64
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max(), name


def reference_logits(snapshot: Snapshot, tokens: Tensor, **documents: Tensor) -> Tensor:
    """Return the logits of the project's own reference in fp64. documents: their ids and positions, where packed."""
    training = dataclasses.replace(snapshot.config.training, micro_batch_size=2, train_iters=1)
    model = dataclasses.replace(snapshot.config.model, padded_vocab_size=snapshot.config.model.vocab_size)
    plan = resolve(dataclasses.replace(snapshot.config, model=model, training=training), 1)
    reference = ReferenceGPT(reference_config(plan.config)).double()
    states = {spec.name for spec in model_states(unpadded(snapshot.config.model))}
    weights = {name: tensor.detach().double() for name, tensor in snapshot.weights.items()}
    reference.load_state_dict({name: tensor for name, tensor in weights.items() if name not in states})
    for name in states:
        reference.get_submodule(name.removesuffix(".router.expert_bias")).expert_bias = weights[name]
    return reference.logits(tokens, **documents)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_theirs_in_fp64(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = make(case)
    snapshot = hugging_face.read(save(model, tmp_path / "theirs"))
    tokens = draw_tokens(model.config.vocab_size)
    with without_casts():
        theirs = in_fp64(case, model)
        theirs.get_input_embeddings().padding_idx = None  # it would have no gradient
        expected = theirs(tokens, use_cache=False).logits
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        (expected * weights).sum().backward()
    stage = stage_in_fp64(snapshot)
    found = stage(Microbatch(tokens), return_logits=True)
    assert isinstance(found, Tensor)
    assert_close(found.transpose(0, 1), expected, "logits")
    assert_close(found.transpose(0, 1), reference_logits(snapshot, tokens), "logits of the reference")
    (found.transpose(0, 1) * weights).sum().backward()
    gradients = {parameter: tensor.grad for parameter, tensor in stage.named_parameters()}
    of_theirs = of_stored_names(theirs)
    family = family_of(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    mapped = map_tensors(family.rows, unpadded(snapshot.config.model), family.architecture)
    states = model_states(unpadded(snapshot.config.model))
    assert len(mapped) == len(gradients) + len(states)
    for entry in mapped[: len(gradients)]:
        gradient = gradients[entry.spec.name]
        assert gradient is not None, entry.spec.name
        for part, parameter in zip(entry.layout.split(gradient), entry.theirs, strict=True):
            assert_close(part, of_theirs.get(parameter), parameter)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama_yarn", "mistral_window", "gemma2", "gpt2"])
def test_packed_documents_have_the_logits_of_each_document_alone(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = make(case)
    snapshot = hugging_face.read(save(model, tmp_path / "theirs"))
    tokens = draw_tokens(model.config.vocab_size)
    lengths = [9, 1, LENGTH - 10]
    documents = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(2, LENGTH),
        "document_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, LENGTH),
    }
    with without_casts():
        theirs = in_fp64(case, model)
        alone = [theirs(document, use_cache=False).logits for document in tokens.split(lengths, dim=1)]
    expected = torch.cat(alone, dim=1)
    stage = stage_in_fp64(snapshot)
    found, whole = (
        stage(Microbatch(tokens, **given), return_logits=True).transpose(0, 1)
        for given in (documents, {"position_ids": documents["position_ids"]})
    )
    assert_close(found, expected, "logits")
    assert_close(reference_logits(snapshot, tokens, **documents), expected, "logits of the reference")
    assert (whole - expected).abs().max() > 1e-3

"""--verify-grid compares the experts that every token chooses, and names the first that chose others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.extras.verify.compare import OtherChoice
from megapipe.model.router import Choice
from tests.extras.verify.grids import compared
from tests.harness import RankPool
from tests.tiny import LLAMA, tiny_config

EXPERTS: dict[str, Any] = LLAMA | {
    "num_layers": 4,
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_aux_loss_coeff": (0.05,),
    "moe_shared_expert_intermediate_size": 8,
    "global_batch_size": 8,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, full recompute": (1, FULL),
    "ep 2 of tp 2": (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1, "moe_layer_freq": "2"}),
    "ep 2 pp 2 dualpipe": (4, {"pp": 2, "ep": 2, "pipeline_schedule": "dualpipe"} | FULL),
}
Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("name", GRIDS)
def test_every_choice_is_compared_once_and_the_same(name: str, rank_pools: Pools) -> None:
    world_size, options = GRIDS[name]
    config = tiny_config(**EXPERTS | options)
    steps, report = rank_pools(world_size).run(compared, config, "fp64")[0]
    layers = 2 if config.model.moe_layer_freq else 4
    tokens = 8 * config.model.seq_length  # of the global batch
    for step in steps:
        assert sum(rank.routing.num_choices for rank in step.ranks) == layers * tokens
        assert step.passes and step.first_other_choice() is None
    assert f"the experts of every token in {layers} layer(s)" in report


def one_token_chooses_others(patch: pytest.MonkeyPatch, rank: int) -> None:
    """On rank 1 the first token of the layer of `steps` chooses its worst expert in place of its best."""
    choose = Choice._chosen

    def planted(self: Choice, scores: Tensor, *rest: Any) -> Tensor:
        chosen = choose(self, scores, *rest).clone()
        if rank == 1 and self.model.num_experts == 4:
            chosen[3, 0] = next(expert for expert in range(4) if expert not in chosen[3].tolist())
        return chosen

    patch.setattr(Choice, "_chosen", planted)


def test_a_token_that_chooses_other_experts_is_named(rank_pools: Pools) -> None:
    config = tiny_config(**EXPERTS | {"tp": 2, "sp": True, "ep": 2, "etp": 1})
    (first, *_), report = rank_pools(2).run(compared, config, "fp64", one_token_chooses_others)[0]
    assert not first.passes
    choice = first.first_other_choice()
    # 8 tokens of one sequence, 4 on each tp rank: row 3 of rank 1 is token 7
    assert isinstance(choice, OtherChoice) and (choice.layer, choice.microbatch, choice.token) == (0, 0, 7)
    assert choice.grid != choice.plain and len(set(choice.grid)) == 2
    assert [rank.routing.num_other > 0 for rank in first.ranks] == [False, True]
    words = " ".join(report.split())
    assert "first of all in the choice of experts of layer 0" in words
    assert "where token 7 of sequence 0 of microbatch 0: grid" in words
    assert "which ranks 1 (tp_rank 1 of 2)" in words


def test_a_layer_without_recorded_choices_is_refused() -> None:
    def silent(patch: pytest.MonkeyPatch, rank: int) -> None:
        patch.setattr("megapipe.extras.verify.compare.GridChoices._keep", lambda *arguments: None)

    with pytest.raises(RuntimeError, match=r"0 tokens .*256"):
        compared(0, 1, tiny_config(**EXPERTS), "fp64", silent)
    assert torch.is_grad_enabled()

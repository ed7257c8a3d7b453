"""The rule of a router: scores, choice and weights."""

from typing import Any

import pytest
import torch

from fsdp_core.model.moe.router import RouterRule

EXPERTS = 5


def logits(rows: int = 7) -> torch.Tensor:
    """Random float64 logits."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, EXPERTS, dtype=torch.float64, generator=generator)


def rule(**changes: Any) -> RouterRule:
    """Two of five experts."""
    return RouterRule(**{"num_experts": EXPERTS, "top_k": 2, **changes})


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_follow_the_formula(scores: str, normalised: bool) -> None:
    """Chosen scores, divided by their sum if asked, times the scale."""
    settings = rule(scores=scores, normalised=normalised, scale=2.5)
    x = logits()
    found = settings.score(x)
    expected = x.exp() / x.exp().sum(-1, keepdim=True) if scores == "softmax" else x.sigmoid()
    torch.testing.assert_close(found, expected)
    experts = settings.choose(found, None)
    assert experts.tolist() == [sorted(range(EXPERTS), key=lambda e: -row[e])[:2] for row in x]
    chosen = torch.stack([row[index] for row, index in zip(expected, experts, strict=True)])
    if normalised:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(settings.weigh(found, experts), chosen * 2.5)


def test_of_equal_scores_the_first_expert_wins() -> None:
    """Ties have one outcome, for few rows and for many."""
    for rows in (1, 3000):
        scores = torch.tensor([[0.1, 0.3, 0.3, 0.1, 0.3]]).repeat(rows, 1)
        assert rule().choose(scores, None).tolist() == [[1, 2]] * rows


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    """A biased expert is chosen, at the weight of its own score."""
    settings = rule(normalised=False)
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]])
    experts = settings.choose(scores, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.35]))
    assert experts.tolist() == [[0, 4]]
    torch.testing.assert_close(settings.weigh(scores, experts), torch.tensor([[0.4, 0.0]]))


def test_scores_that_all_underflow_weigh_nothing() -> None:
    """Normalising zeros gives zeros, no NaN."""
    settings = rule(scores="sigmoid")
    scores = settings.score(torch.full((1, EXPERTS), -1000.0))
    assert settings.weigh(scores, settings.choose(scores, None)).tolist() == [[0.0, 0.0]]

"""What a router decides by: its settings, and the choice of experts from scores."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

SCORES = ("softmax", "sigmoid")
TINY = 1e-20
"""Keeps the sum of sigmoid scores that all underflowed from dividing zero by zero."""


class Routing(NamedTuple):
    """Where each token goes: what crosses from the router to the rest of the layer.

    Attributes:
        probs: weight of each choice, float32 (float64 for float64 inputs) [S, K]; connected to
            the router's weight by autograd. Zero for tokens that are not valid.
        experts: int64 [S, K], distinct experts by falling score; the number of experts, which is
            nowhere, for tokens that are not valid.
    """

    probs: torch.Tensor
    experts: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """Settings of a router.

    Attributes:
        num_experts, top_k: experts in all, and of each token.
        scores: softmax over all experts, or a sigmoid of each logit.
        normalised: divide the chosen scores by their sum.
        scale: multiplies the chosen scores, after that.
        aux_coeff: coefficient of the load-balancing loss; 0 leaves it out.
        z_coeff: coefficient of the z-loss; 0 leaves it out.
        expert_bias: add a bias to the scores for the choice alone, see `Router.update_bias`.

    Raises:
        ValueError: a value out of range.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    aux_coeff: float = 0.0
    z_coeff: float = 0.0
    expert_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"Expected top_k in 1..{self.num_experts}, got {self.top_k}.")
        if self.scores not in SCORES:
            raise ValueError(f"Expected scores in {SCORES}, got {self.scores!r}.")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"Expected a finite scale > 0, got {self.scale}.")
        for name in ("aux_coeff", "z_coeff"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Expected a finite {name} >= 0, got {getattr(self, name)}.")

    @property
    def watches_load(self) -> bool:
        """Whether the slots of each expert are counted."""
        return self.aux_coeff > 0 or self.z_coeff > 0 or self.expert_bias

    def score(self, logits_SE: torch.Tensor) -> torch.Tensor:
        """Scores of all experts, [S, E]."""
        return logits_SE.softmax(-1) if self.scores == "softmax" else logits_SE.sigmoid()

    def choose(self, scores_SE: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
        """The top_k experts of each token by score plus bias, int64 [S, K].

        Of equal scores the expert of the lowest number wins, on every device and at every size: a
        stable sort says so, `topk` leaves it open.
        """
        ranked = scores_SE.detach()
        if bias_E is not None:
            ranked = ranked + bias_E
        return ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]

    def weigh(self, scores_SE: torch.Tensor, experts_SK: torch.Tensor) -> torch.Tensor:
        """Weights of the chosen experts, [S, K]."""
        chosen = scores_SE.gather(1, experts_SK)
        if self.normalised:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
        return chosen * self.scale

"""Answers questions from a rule about the changes of a case, in no time and without runs."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.bisect.differences import LegChanges
from harness.bisect.experiments import Asked, Asker, Budget, Questions
from harness.records import CaseSpec, Outcome, PlantSpec, RunSpec, Verdict, joined

Rule = Callable[[frozenset[str]], str]
"""From the changes of a candidate to the `what` of its failure, "" if it passes."""


class MadeUpAsker(Asker):
    """An asker that makes no runs.

    Args:
        rule: how the reference with some changes fails.
        of_case: in its place, how a case fails.
        chance: that a failure fires, in each run for itself.
        max_runs: budget.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        of_case: Callable[[CaseSpec], str] | None = None,
        chance: float = 1.0,
        seed: int = 0,
        max_runs: int | None = None,
    ) -> None:
        self.num_runs = 0
        self.asked: list[CaseSpec] = []
        self.ahead: set[str] = set()
        self.side_by_side = 1
        self.questions = Questions(Budget(runs=max_runs))
        self._of_case = of_case or (lambda case: _rule_of(rule, case))
        self._chance, self._random = chance, random.Random(seed)

    def ask(self, case: CaseSpec, words: str, **_: Any) -> Asked:
        """The rule's answer."""
        self.questions.budget.check(1)
        self.questions.budget.spend(1)
        self.num_runs += 1
        self.asked.append(case)
        return Asked(runs=None, verdict=self.verdict(case))  # type: ignore[arg-type] # nobody reads them

    def room(self, case: CaseSpec) -> int:
        """As many as the test says."""
        return self.side_by_side

    def make_ahead(self, cases: Sequence[CaseSpec], words: Sequence[str]) -> None:
        """Nothing is made; who asked is noted, unless the first is known."""
        assert len(words) == len(cases)
        if cases[0].id not in self.ahead:
            self.ahead |= {case.id for case in cases}

    def verdict(self, case: CaseSpec) -> Verdict:
        """What the rule says of a case, if its failure fires."""
        what: Any = self._of_case(case)
        if what and self._random.random() >= self._chance:
            what = ""
        return verdict_of(case, what)


def _rule_of(rule: Rule | None, case: CaseSpec) -> str:
    assert rule is not None
    return rule(frozenset(LegChanges(case.reference, case.candidate).names))


def verdict_of(case: CaseSpec, what: Any) -> Verdict:
    """A pass, a failure of that name, or no verdict for what is unsupported."""
    outcome: Outcome = "error" if what == "unsupported" else "failed" if what else "passed"
    return Verdict(
        case_id=case.id, outcome=outcome, what=what,
        message=f"planted {what}", checks=(), runs={}, wall_s=0.0,
    )  # fmt: skip


def run(*plants: PlantSpec, **settings: Any) -> RunSpec:
    """A run of two ranks, or of as many as its layout has."""
    given: dict[str, Any] = {"parallel": ParallelConfig(dp=2), "steps": 6}
    config = TrainConfig(**(given | settings))
    return RunSpec(
        config=config.to_dict(), device="cpu", world_size=config.parallel.world_size,
        timeout_s=60.0, plant=joined(plants),
    )  # fmt: skip


def case_of(reference: RunSpec, candidate: RunSpec) -> CaseSpec:
    """A case of these legs."""
    control = RunSpec.from_json(reference.to_json() | {"replica": 1})
    return CaseSpec(
        id="dp2-attn", scenario="made_up", labels={}, reference=reference, control=control,
        candidate=candidate, expect="bitwise", checks={"loss": {}, "state": {}},
    )  # fmt: skip

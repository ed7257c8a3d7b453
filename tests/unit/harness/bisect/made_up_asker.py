"""Answers questions from a rule about the changes of a case, in no time and without runs."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.bisect.differences import RunChanges
from harness.bisect.experiments import Asker, Questions, question_key
from harness.records import CaseSpec, Outcome, PlantSpec, RunSpec, Verdict, joined
from tests.support import records

Rule = Callable[[frozenset[str]], str]
"""From the changes of a candidate to the `what` of its failure, "" if it passes."""


class MadeUpAsker(Asker):
    """An asker that makes no runs."""

    def __init__(
        self, rule: Rule | None = None, *, of_case: Callable[[CaseSpec], str] | None = None,
        chance: float = 1.0, seed: int = 0, room: int = 1,
    ) -> None:  # fmt: skip
        self.num_runs = 0
        self.asked: list[CaseSpec] = []
        self.batches: list[int] = []
        self.questions = Questions()
        self._of_case = of_case or (lambda case: _rule_of(rule, case))
        self._chance, self._random, self._room = chance, random.Random(seed), room
        self._known: dict[str, Verdict] = {}

    def cost(self, *cases: CaseSpec) -> int:
        """One run of each that was not asked before."""
        return len({question_key(case) for case in cases} - self._known.keys())

    def ask_all(self, cases: Sequence[CaseSpec], words: str, **_: Any) -> Sequence[Verdict]:
        """The rule's answers."""
        self.num_runs += self.cost(*cases)
        self.batches.append(len(cases))
        self.asked += cases
        return [self.verdict(case) for case in cases]

    def room(self, case: CaseSpec) -> int:
        """As many as the test says."""
        return self._room

    def verdict(self, case: CaseSpec) -> Verdict:
        """What the rule says of a case, if its failure fires."""
        key = question_key(case)
        if key not in self._known:
            what: Any = self._of_case(case)
            fires = what and self._random.random() < self._chance
            self._known[key] = verdict_of(case, what if fires else "")
        return self._known[key]


def _rule_of(rule: Rule | None, case: CaseSpec) -> str:
    assert rule is not None
    return rule(frozenset(RunChanges(case.reference, case.candidate).names))


def verdict_of(case: CaseSpec, what: Any) -> Verdict:
    """A pass, a failure of that name, or no verdict for what is unsupported."""
    outcome: Outcome = "error" if what == "unsupported" else "failed" if what else "passed"
    return records.verdict(case.id, outcome=outcome, what=what, message=f"planted {what}")


def run(*plants: PlantSpec, **settings: Any) -> RunSpec:
    """A run of two ranks, or of as many as its layout has."""
    given: dict[str, Any] = {"parallel": ParallelConfig(dp=2), "steps": 6}
    config = TrainConfig(**(given | settings))
    return records.run_spec(
        config.parallel.world_size, config=config.to_dict(), timeout_s=60.0, plant=joined(plants)
    )


def program_run(folder: Path = Path("/x"), **parts: Any) -> RunSpec:
    """A run of `train.py` in a folder; `stress` is a part of its configuration."""
    stress = {"stress": parts.pop("stress")} if "stress" in parts else {}
    program = {
        "kind": "script", "target": str(folder / "train.py"), "folder": str(folder),
        "args": {}, "env": {}, "packages": {}, "record": "auto", "determinism": "", "every": 1,
        "smaller": {"steps": "args.steps"}, **parts,
    }  # fmt: skip
    config = {"program": program, "steps": 6, "taps": [], **stress}
    return records.run_spec(2, config=config, timeout_s=60.0)


def case_of(reference: RunSpec, candidate: RunSpec) -> CaseSpec:
    """A case of these legs."""
    control = RunSpec.from_json(reference.to_json() | {"replica": 1})
    checks: dict[str, Any] = {"loss": {}, "state": {}}
    return records.case_spec(
        "dp2-attn", reference, control, candidate, scenario="made_up", checks=checks
    )

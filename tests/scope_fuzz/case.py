"""A case of the fuzz: settings of a run, what is done in order, and both as text."""

import dataclasses
import json
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from fsdp_core.config import TrainConfig
from harness.scenario.matrix import expand
from harness.scenario.schema import decode_scenario

Event = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One comparison of a graphed run with its eager one.

    Attributes:
        settings: dotted key of the configuration to value; what is left out is a default.
        events: what is done in order: ("step", index), ("evaluate", index),
            ("drop",) to go on without graphs, or
            ("resume",) to go on in a new trainer with the old one's state.
        weighs: memory is counted, which takes several times as long.
    """

    settings: dict[str, Any]
    events: tuple[Event, ...] = ()
    weighs: bool = False

    def config(self, **others: Any) -> TrainConfig:
        """The graphed run of the scenario, or one with other keys at the top.

        Raises:
            ScenarioError: a rule is broken, or the trainer does not build it.
        """
        (spec,) = expand(decode_scenario(self.scenario().encode(), "case"), "cpu")
        return dataclasses.replace(TrainConfig.from_dict(spec.candidate.config), **others)

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """The inverse of `to_json`."""
        plain = json.loads(text)
        return cls(plain["settings"], tuple(map(tuple, plain["events"])), plain["weighs"])

    def scenario(self, name: str = "scope_fuzz") -> str:
        """A scenario for `harness run`; events but steps are in a comment."""
        base = json.loads(json.dumps(self.settings))
        graph = base.pop("graph", [])
        base["stress"] = base.get("stress") or "none"
        plain = {
            "name": name,
            "why": "A graphed run that was drawn at random must have the bits of its eager run.",
            "base": base,
            "axes": {"graph": ["eager", graph]},
            "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
            "checks": {"loss": {}, "state": {}, "finite": {}},
            "launch": {"device": "auto", "timeout_s": 120},
        }
        text: str = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)
        return f"# events: {json.dumps(self.events)}\n{text}"

"""A case of the fuzz: settings of a run, what is done in order, and both as text."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from fsdp_core.config import (
    ConfigError,
    DataConfig,
    FsdpConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)

Event = tuple[Any, ...]
_PARTS: dict[str, Any] = {
    "parallel": ParallelConfig, "fsdp": FsdpConfig, "optim": OptimConfig, "data": DataConfig,
}  # fmt: skip


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

    @property
    def world_size(self) -> int:
        """Ranks."""
        return ParallelConfig(**self._part("parallel")).world_size

    def _part(self, name: str) -> dict[str, Any]:
        start = f"{name}."
        return {k[len(start) :]: v for k, v in self.settings.items() if k.startswith(start)}

    def config(self, **others: Any) -> TrainConfig:
        """The graphed run, or one with other keys at the top.

        Raises:
            ConfigError: a rule is broken, or the trainer does not build it.
        """
        parts: dict[str, Any] = {}
        for name, kind in {"model": _model, **_PARTS}.items():
            try:
                parts[name] = kind(**self._part(name))
            except ConfigError as error:
                raise error.within(name) from None
        top = {key: value for key, value in self.settings.items() if "." not in key}
        return TrainConfig(**parts, **(top | others))

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """The inverse of `to_json`."""
        plain = json.loads(text)
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in plain["settings"].items()}
        return cls(settings, tuple(tuple(event) for event in plain["events"]), plain["weighs"])

    def scenario(self, name: str = "scope_fuzz") -> str:
        """A scenario for `harness run`; events but steps are in a comment."""
        base: dict[str, Any] = {}
        for key, value in self.settings.items():
            if key == "graph":
                continue
            part, _, leaf = key.rpartition(".")
            plain = list(value) if isinstance(value, tuple) else value
            (base.setdefault(part, {}) if part else base)[leaf] = plain
        base["stress"] = base.get("stress") or "none"
        plain = {
            "name": name,
            "why": "A graphed run that was drawn at random must have the bits of its eager run.",
            "base": base,
            "axes": {"graph": ["eager", list(self.settings.get("graph", ()))]},
            "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
            "checks": {"loss": {}, "state": {}, "finite": {}},
            "launch": {"device": "auto", "timeout_s": 120},
        }
        text: str = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)
        return f"# events: {json.dumps(self.events)}\n{text}"


def _model(preset: str = "dense_tiny", **overrides: Any) -> Any:
    return model_from_preset(preset, overrides)

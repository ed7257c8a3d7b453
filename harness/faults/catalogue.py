"""What is known of a planted fault: where it acts, what catches it, where a search must end.

Data only, no torch. In rows of catalogue.txt `-` is nothing; a module without a tensor is a pattern
for both. Words of the setup are those of scenario files: `tp=2` and other keys of `parallel`,
`graph=attn+mlp`, `stress=races`, `model.layers=3`; the rest are the attributes below.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from harness.records import What

Argument = Literal["step", "rank", "tensor"]
Kind = Literal[
    "hooks", "addresses", "streams", "capture", "collectives", "numerics", "data",
    "infrastructure",
]  # fmt: skip
Phase = Literal[
    "initialisation", "input", "forward", "backward", "reduce", "optimizer", "state", "capture",
    "outside",
]  # fmt: skip
"""Of a step, in the order of its work. `initialisation`: before step 0; `input`: tokens, masks and
random numbers that go in; `reduce`: gradients over ranks, and their norm; `state`: what is kept
between steps and changed by none of these; `capture`: making graphs; `outside`: the process, its
records, its machine."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The smallest run in which a fault shows.

    Attributes:
        settings: over those of `harness.faults.catalogue.BASE`, as `base` of a scenario has them.
        graph, stress: scopes and stressors of the candidate; the reference has none.
        step, rank, tensor, legs: of the plant, as far as the fault takes them; graphs are captured
            in step 2, rank -1 is the last, tensor "" is of the fault's own choice.
        checks: with their limits, besides loss, state and finite: `{"peak_memory": {...}}`.
        timeout_s: of a run; little where it ends in one.
        words: all of it, as the catalogue has it.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    graph: tuple[str, ...] = ()
    stress: tuple[str, ...] = ()
    step: int = 3
    rank: int = -1
    tensor: str = ""
    legs: tuple[str, ...] = ("candidate",)
    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeout_s: float = 120.0
    words: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Where a search must end: patterns of `fnmatch` for the module and the first wrong tensor.

    `later` is the number of steps from the plant's to the first in which anything can be wrong.
    """

    phase: Phase
    module: str = ""
    tensor: str = ""
    later: int = 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the catalogue.

    Attributes:
        name: what a scenario's `plant.fault` says.
        source: numbers of known failure modes that it stands for ("F31"), or "" for our own.
        description: one sentence for people; `symptom` is what one sees who only looks at the
            training.
        takes: which of step, rank and tensor mean something to it; giving another is an error.
        expects: the `what` values that a verdict may name when the fault is in the candidate.
        setup: the run in which it shows.
        plant: what a rank does for it, in the words of `harness.worker.plant`.
        devices: where it can be planted.
        counterpart: fault planted in the legs that do not get this one, or "".
        scopes: graph scopes of which the run needs one; empty if it needs none.
        needs: what the run's `parallel` must have, each at least; empty if any will do.
    """

    name: str
    kind: Kind
    source: str
    description: str
    symptom: str
    takes: tuple[Argument, ...]
    expects: tuple[What, ...]
    points_at: Pointer
    setup: Setup
    plant: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    counterpart: str = ""
    scopes: tuple[str, ...] = ()
    needs: Mapping[str, int] = field(default_factory=dict)

    @property
    def everywhere(self) -> bool:
        """Whether it acts on every rank, so that `plant.rank` means nothing to it."""
        return "rank" not in self.takes

    def lacks(self, parallel: Mapping[str, Any]) -> str:
        """What of `needs` a whole `parallel` section has not: 'tp 2 or more'; "" if it has all."""
        return " and ".join(
            name if least is True else f"{name} {least} or more"
            for name, least in self.needs.items()
            if parallel[name] < least
        )


_PARALLEL = ("dp", "dp_outer", "tp", "cp", "pp", "ep", "sequence_parallel", "dynamic_cp")
_LISTS = ("graph", "stress", "legs", "devices", "scopes")
_OF_FAULT = ("devices", "scopes", "needs", "counterpart")
_OF_SETUP = ("graph", "stress", "step", "rank", "legs", "checks", "timeout_s")


def read_table(text: str) -> dict[str, Fault]:
    """The faults of a table by name; `== hooks: ...` begins those of a kind, `#` is a comment.

    Raises:
        ValueError: a row is not of nine columns, or has the name of another.
    """
    kind = ""
    rows: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("== "):
            kind = line[3:].partition(":")[0]
        elif line.startswith(" "):
            rows[-1] = (kind, f"{rows[-1][1]} {line.strip()}")
        elif line and not line.startswith("#"):
            rows.append((kind, line))
    found: dict[str, Fault] = {}
    for kind, row in rows:
        columns = ["" if (word := each.strip()) == "-" else word for each in row.split(" |")]
        if len(columns) != 9 or kind not in get_args(Kind) or columns[0] in found:
            raise ValueError(f"expected 9 columns and a new name, under a kind, got {kind}: {row}")
        found[columns[0]] = _fault(cast("Kind", kind), columns)
    return found


def _fault(kind: Kind, columns: list[str]) -> Fault:
    name, source, takes, setup, expects, place, description, symptom, plant = columns
    given: dict[str, Any] = {}
    for word in setup.split():
        path, _, value = word.partition("=")
        *outer, last = (f"parallel.{path}" if path in _PARALLEL else path).split(".")
        inner = given
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = tuple(value.split("+")) if path in _LISTS else _value(value)
    phase, module, tensor = (*place.split(" ", 2), "", "")[:3]
    module, tensor = ("" if word == "-" else word for word in (module, tensor or module))
    pointer = Pointer(
        phase=cast("Phase", phase), module=module, tensor=tensor, later=given.pop("later", 0)
    )
    own = {key: given.pop(key) for key in _OF_FAULT if key in given}
    held = {key: given.pop(key) for key in _OF_SETUP if key in given}
    return Fault(
        name=name, kind=kind, source=source, description=description, symptom=symptom,
        takes=cast("Any", tuple(takes.split())), expects=cast("Any", tuple(expects.split())),
        points_at=pointer, setup=Setup(settings=given, words=setup, **held), plant=plant, **own,
    )  # fmt: skip


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


LEGS = ("candidate", "reference", "control")

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "model": "dense_tiny", "dtype": "fp32", "parallel": MappingProxyType({"dp": 2}),
        "steps": 6, "microbatches": 2, "seed": 1234,
    }
)  # fmt: skip
"""What setups build on, as `base` of a scenario has it. A key of a setup takes the place of the
whole key here: {"parallel": {"tp": 2}} is two ranks, not four."""


def is_of_any_engine(fault: Fault) -> bool:
    """Whether a fault needs nothing of our engine: it is in data, weights, records or processes."""
    in_weights = ("ulp", "nan", "negative_zero", "positive_zero")
    return fault.kind in ("data", "infrastructure") or fault.name in in_weights


CATALOGUE: Mapping[str, Fault] = MappingProxyType(
    read_table(Path(__file__).with_name("catalogue.txt").read_text(encoding="utf-8"))
)
"""Every fault by its name."""

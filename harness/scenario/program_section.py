"""The key `program` of a scenario: somebody's training program in place of the built-in one.

    script, module, entry   one of them: a file beside the scenario, a module, module:function
    args, env, packages     options, variables, package versions; axes are args.X, env.X, packages.X
    ranks, steps            processes, and the optimizer steps that each of them takes
    taps, every, determinism, record, smaller    see `harness.program.spec`
    stress                  poison, scramble: what disturbs memory between replays of CUDA graphs
    folder                  where script and modules are looked for; by default the scenario's

A setting is one leaf, `args.lr`, as in `settings`: base first, then axes, then include.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_core.config import ConfigError, tap_pattern
from harness.codec import dumps
from harness.errors import ScenarioError, shown
from harness.plant_spec import PlantSpec
from harness.program.spec import ProgramSpec, command_line
from harness.records import MAX_WORLD_SIZE
from harness.scenario.decode import (
    dotted,
    refuse,
    take_float,
    take_int,
    take_list,
    take_mapping,
    take_str,
)
from harness.scenario.yaml_source import Node, Origin

KINDS = ("script", "module", "entry")
OPEN = ("args", "env", "packages")
"""Keys that hold names of the program's own."""
PLAIN = ("ranks", "steps", "taps", "stress", "every", "determinism", "record")
KEYS = (*KINDS, *OPEN, *PLAIN, "smaller", "folder")
SETTING_KEYS = (*(f"{name}.X" for name in OPEN), *PLAIN)
DETERMINISM = ("off", "enforce")
RECORD = ("auto", "lines")
STRESSORS = ("poison", "scramble")
"""Of `harness.recorder.graphs`, which needs torch."""
Put = Callable[[str, Any, Origin], None]


@dataclass(frozen=True, slots=True)
class ProgramLeg:
    """The run of a program that a set of settings describes."""

    spec: ProgramSpec
    steps: int
    world_size: int
    taps: tuple[str, ...]
    stress: tuple[str, ...]
    plant: PlantSpec | None = None
    graph: tuple[str, ...] = ()
    microbatches: int = 0
    compiled: str = "none"
    engine: str = ""
    num_steps_before_graphs: int = 0

    @property
    def identity(self) -> Hashable:
        """Equal for runs that do the same."""
        spec = self.spec
        words = command_line(spec.args) if spec.kind != "entry" else spec.args
        told = {"words": words, "env": spec.env, "packages": spec.packages}
        rest = (spec.kind, spec.target, spec.record, spec.determinism, spec.every)
        return (dumps(told), rest, self.steps, self.world_size, self.taps, self.stress)

    def plain(self) -> dict[str, Any]:
        """`RunSpec.config`."""
        plain = {"program": self.spec.to_json(), "steps": self.steps, "taps": list(self.taps)}
        # Keys of runs without it are older than this.
        return plain | ({"stress": list(self.stress)} if self.stress else {})


class ProgramVocabulary:
    """What `program`, axes and `--set` may say where a scenario has a program."""

    def __init__(self, node: Node, path: str) -> None:
        """Take what does not change from run to run.

        Raises:
            ScenarioError: no program, or more than one; a file that is not there.
        """
        entries = take_mapping(node, "program", legal=KEYS, required=("steps",))
        given = [name for name in KINDS if name in entries]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise refuse(node, "program", "one of script, module and entry", got=got, legal=KINDS)
        self.kind = given[0]
        self.folder = Path(path).resolve().parent
        if "folder" in entries:
            self.folder = (self.folder / take_str(entries["folder"], "program.folder")).resolve()
        self.target = _target(self.kind, entries[self.kind], self.folder)
        self.smaller = {
            name: take_str(value, f"program.smaller.{name}")
            for name, value in _mapping(entries.get("smaller"), "program.smaller").items()
        }
        self.origin = node.origin
        self.base = tuple(
            each
            for name, value in entries.items()
            if name not in (*KINDS, "smaller", "folder")
            for each in self.decode(name, value, node.keys[name], "program")
        )

    def decode(
        self, key: str, node: Node, written: Origin, where: str
    ) -> "tuple[tuple[str, Any, Origin], ...]":
        """The settings, as leaf, value and origin, that `key: node` stands for.

        Raises:
            ScenarioError: unknown key, or a value of the wrong type.
        """
        full = dotted(where, key)
        head, _, name = key.partition(".")
        if head in OPEN and name:
            return ((key, _value(head, node, full), node.origin),)
        if key in OPEN:
            entries = _mapping(node, full)
            return tuple(
                (f"{key}.{each}", _value(key, value, f"{full}.{each}"), value.origin)
                for each, value in entries.items()
            )
        if key not in PLAIN:
            raise written.error(full, expected="a known key", got=shown(key), legal=SETTING_KEYS)
        return ((key, _plain(key, node, full), node.origin),)

    def build(self, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> ProgramLeg:
        """The run that leaves and their values describe.

        Raises:
            ScenarioError: values that do not go together.
        """
        parts: dict[str, dict[str, Any]] = {name: {} for name in OPEN}
        for leaf, value in values.items():
            head, _, name = leaf.partition(".")
            if head in OPEN and value is not None:
                parts[head][name] = list(value) if isinstance(value, tuple) else value
        for pattern in values.get("taps", ()):
            try:
                tap_pattern(pattern)
            except ConfigError as error:
                raise origins["taps"].error(
                    "taps", expected=error.expected, got=shown(error.got), legal=error.legal
                ) from None
        enforced = values.get("determinism") == "enforce"
        spec = ProgramSpec(
            kind=self.kind,  # type: ignore[arg-type] # one of KINDS
            target=self.target,
            folder=str(self.folder),
            args=parts["args"],
            env=parts["env"],
            packages=parts["packages"],
            record=values.get("record", "auto"),
            determinism="enforce" if enforced else "",
            every=values.get("every", 1),
            smaller=self.smaller,
        )
        return ProgramLeg(
            spec,
            values["steps"],
            values.get("ranks", 1),
            tuple(values.get("taps", ())),
            tuple(values.get("stress", ())),
        )


def _target(kind: str, node: Node, folder: Path) -> str:
    text = take_str(node, f"program.{kind}")
    if kind == "script":
        path = folder / text
        if not path.is_file():
            raise refuse(node, "program.script", "a file, by its path from the scenario's folder")
        return str(path.resolve())
    if kind == "entry" and not all(text.partition(":")):
        raise refuse(node, "program.entry", "module:function")
    return text


def _mapping(node: Node | None, key: str) -> dict[str, Node]:
    return take_mapping(node, key) if node is not None else {}


def _value(head: str, node: Node, full: str) -> Any:
    if head == "args":
        if isinstance(node.value, tuple):
            return tuple(_scalar(each, full) for each in node.value)
        return _scalar(node, full)
    if node.value is None:
        return None
    if head == "packages":
        # 2.10 would lose its zero as a number.
        text = node.raw or node.value
        if not isinstance(text, str) or not text:
            raise refuse(node, full, "a version")
        return text
    if isinstance(node.value, bool | dict | tuple):
        raise refuse(node, full, "a text or a number")
    return node.value if isinstance(node.value, str) else node.raw or str(node.value)


def _scalar(node: Node, full: str) -> Any:
    if isinstance(node.value, bool) and node.raw.lower() not in ("", "true", "false"):
        raise refuse(node, full, f'true, false, or "{node.raw}" in quotes')
    if isinstance(node.value, dict | tuple):
        raise refuse(node, full, "a text, a number, a bool, null, or a list of these")
    if isinstance(node.value, str) and node.raw:
        try:
            return take_float(node, full)  # YAML 1.1 reads 1e-3 as a text
        except ScenarioError:
            return node.value
    return node.value


def _plain(key: str, node: Node, full: str) -> Any:
    if key in ("ranks", "steps", "every"):
        number = take_int(node, full, minimum=1)
        if key == "ranks" and number > MAX_WORLD_SIZE:
            raise refuse(node, full, f"at most {MAX_WORLD_SIZE} ranks")
        return number
    if key == "stress":
        entries = take_list(node, full, "stressors") if node.value != () else ()
        return tuple(take_str(each, full, legal=STRESSORS) for each in entries)
    if key == "taps":
        entries = take_list(node, full, "patterns") if node.value != () else ()
        return tuple(take_str(each, full) for each in entries)
    return take_str(node, full, legal=DETERMINISM if key == "determinism" else RECORD)

"""The key `program` of a scenario: somebody's training program in place of the built-in one.

    script, module, entry   one of them: a file beside the scenario, a module, module:function
    args, env, packages     options, variables, package versions; axes are args.X, env.X, packages.X
    ranks, steps            processes, and the optimizer steps that each of them takes
    taps, every, determinism, record, smaller    see `harness.program.spec`
    stress                  poison, scramble: what disturbs memory between replays of CUDA graphs
    folder                  where script and modules are looked for; by default the scenario's

A setting is one leaf, `args.lr`, as in `settings`: base first, then axes, then include.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_core.config import ConfigError, tap_pattern
from harness.codec import dumps
from harness.errors import ScenarioError, shown
from harness.program.spec import ProgramSpec, command_line
from harness.records import MAX_WORLD_SIZE
from harness.scenario.decode import (
    Taker,
    dotted,
    refuse,
    take_count,
    take_float,
    take_int,
    take_list,
    take_mapping,
    take_str,
)
from harness.scenario.settings import Leg, Setting
from harness.scenario.yaml_source import Node, Origin

KINDS = ("script", "module", "entry")
DETERMINISM = ("off", "enforce")
STRESSORS = ("poison", "scramble")
"""Of `harness.recorder.graphs`, which needs torch."""


def _words(node: Node, full: str, *, what: str, legal: tuple[str, ...] = ()) -> tuple[str, ...]:
    entries = take_list(node, full, what, may_be_empty=True)
    return tuple(take_str(each, full, legal=legal) for each in entries)


def _argument(node: Node, full: str) -> Any:
    if isinstance(node.value, tuple):
        return tuple(_scalar(each, full) for each in node.value)
    return _scalar(node, full)


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


def _variable(node: Node, full: str) -> str | None:
    if isinstance(node.value, bool | dict | tuple):
        raise refuse(node, full, "a text or a number")
    if node.value is None or isinstance(node.value, str):
        return node.value
    return node.raw or str(node.value)


def _version(node: Node, full: str) -> str | None:
    if node.value is None:
        return None
    text = node.raw or node.value  # 2.10 would lose its zero as a number
    if not isinstance(text, str) or not text:
        raise refuse(node, full, "a version")
    return text


OPEN: Mapping[str, Taker] = {"args": _argument, "env": _variable, "packages": _version}
"""Keys that hold names of the program's own."""
PLAIN: Mapping[str, Taker] = {
    "ranks": partial(take_int, least=1, most=MAX_WORLD_SIZE),
    "steps": take_count,
    "taps": partial(_words, what="patterns"),
    "stress": partial(_words, what="stressors", legal=STRESSORS),
    "every": take_count,
    "determinism": partial(take_str, legal=DETERMINISM),
    "record": partial(take_str, legal=("auto", "lines")),
}
KEYS = (*KINDS, *OPEN, *PLAIN, "smaller", "folder")
SETTING_KEYS = (*(f"{name}.X" for name in OPEN), *PLAIN)


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
        smaller = (
            take_mapping(entries["smaller"], "program.smaller") if "smaller" in entries else {}
        )
        self.smaller = {k: take_str(value, f"program.smaller.{k}") for k, value in smaller.items()}
        self.base = tuple(
            each
            for name, value in entries.items()
            if name not in (*KINDS, "smaller", "folder")
            for each in self.decode(name, value, node.keys[name], "program")
        )

    def decode(self, key: str, node: Node, written: Origin, where: str) -> tuple[Setting, ...]:
        """The settings that `key: node` stands for.

        Raises:
            ScenarioError: unknown key, or a value of the wrong type.
        """
        full = dotted(where, key)
        head, _, name = key.partition(".")
        if head in OPEN and name:
            return (Setting(key, OPEN[head](node, full), node.origin),)
        if key in OPEN:
            return tuple(
                Setting(f"{key}.{each}", OPEN[key](value, f"{full}.{each}"), value.origin)
                for each, value in take_mapping(node, full).items()
            )
        if key not in PLAIN:
            raise written.error(full, expected="a known key", got=shown(key), legal=SETTING_KEYS)
        return (Setting(key, PLAIN[key](node, full), node.origin),)

    def build(self, settings: Mapping[str, Setting]) -> Leg:
        """The run that settings describe, by leaf.

        Raises:
            ScenarioError: values that do not go together.
        """
        values = {leaf: setting.value for leaf, setting in settings.items()}
        opened: dict[str, dict[str, Any]] = {name: {} for name in OPEN}
        for leaf, value in values.items():
            head, _, name = leaf.partition(".")
            if head in OPEN and value is not None:
                opened[head][name] = list(value) if isinstance(value, tuple) else value
        steps, taps, stress = values["steps"], values.get("taps", ()), values.get("stress", ())
        for pattern in taps:
            try:
                tap_pattern(pattern)
            except ConfigError as error:
                raise settings["taps"].origin.error(
                    "taps", expected=error.expected, got=shown(error.got), legal=error.legal
                ) from None
        spec = ProgramSpec(
            kind=self.kind,  # type: ignore[arg-type] # one of KINDS
            target=self.target,
            folder=str(self.folder),
            **opened,
            record=values.get("record", "auto"),
            determinism="enforce" if values.get("determinism") == "enforce" else "",
            every=values.get("every", 1),
            smaller=self.smaller,
        )
        world_size = values.get("ranks", 1)
        words = command_line(spec.args) if spec.kind != "entry" else spec.args
        told = dumps({"words": words, "env": spec.env, "packages": spec.packages})
        rest = (spec.kind, spec.target, spec.record, spec.determinism, spec.every)

        def plain() -> dict[str, Any]:
            held = {"program": spec.to_json(), "steps": steps, "taps": list(taps)}
            # Keys of runs without it are older than this.
            return held | ({"stress": list(stress)} if stress else {})

        return Leg(
            plain=plain, identity=(told, rest, steps, world_size, taps, stress), steps=steps,
            world_size=world_size, taps=taps,
        )  # fmt: skip


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

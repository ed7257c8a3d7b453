"""A program that the harness did not write, as a run's specification holds it.

`RunSpec.config` of such a run is {"program": ProgramSpec, "steps": ..., "taps": [...], ...}: keys
that the built-in trainer's configuration has, too, mean the same in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.codec import Json, RecordError
from harness.provenance import code_of_program

Kind = Literal["script", "module", "entry", "command"]
POSITIONAL = "_"
"""Name in `args` of arguments that stand alone."""
ENFORCED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""Variables that `determinism: enforce` sets."""


@dataclass(frozen=True, kw_only=True)
class ProgramSpec(Json):
    """How to start a program, and how to record it.

    Attributes:
        kind: `script`, a file for Python; `module`, for `python -m`; `entry`, `module:function`;
            `command`, of a run that was recorded by hand.
        target: the absolute path, the module, module and function, or the command's first word,
            its other words being `args` without a name.
        folder: of the scenario, absolute: modules are looked for there first. Of a command, where
            it was started.
        args: options by name; `command_line` says what becomes of them.
        env: variables over those of the harness.
        packages: versions by package name; an environment is made for them.
        record: `auto`, or `lines` where only what the script itself records counts.
        determinism: `enforce`: deterministic kernels and seeded generators from the start.
        every: state is digested in each step whose number this divides.
        smaller: what the bisector may make smaller: `layers` to `args.n_layers`.
    """

    kind: Kind
    target: str
    folder: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    record: Literal["auto", "lines"] = "auto"
    determinism: Literal["", "enforce"] = ""
    every: int = 1
    smaller: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise RecordError(f"program.every: expected an integer >= 1, got {self.every}")
        if self.kind == "entry" and not all(self.target.partition(":")):
            raise RecordError(f"program.entry: expected module:function, got {self.target!r}")


def folder_of(program: ProgramSpec) -> Path:
    """Where a program lies: its script's folder, or that in which its module is looked for."""
    return Path(program.target).parent if program.kind == "script" else Path(program.folder)


class Capabilities(NamedTuple):
    """What can be asked of a program beyond its records; of the built-in trainer, all of it."""

    layouts: bool


def program_of(config: Mapping[str, Any]) -> ProgramSpec | None:
    """The program of a run's configuration; None for the built-in trainer.

    Raises:
        RecordError: it does not decode.
    """
    plain = config.get("program")
    return None if plain is None else ProgramSpec.from_json(plain)


def capabilities_of(config: Mapping[str, Any]) -> Capabilities:
    """What can be asked of the program of a run's configuration."""
    return Capabilities(layouts=config.get("program") is None)


def command_line(args: Mapping[str, Any]) -> list[str]:
    """Options as a command line: {lr: 0.1, amp: true, sizes: [1, 2], out=: x} as

        --lr 0.1 --amp --sizes 1 --sizes 2 out=x

    true is the option alone, false and null leave it out, a list repeats it. A name that begins
    with a dash is taken as it is; one that ends in `=` is written as `name=value`; `_` is for
    arguments without a name, which come last.
    """
    options = [(name, value) for name, value in args.items() if name != POSITIONAL]
    words: list[str] = []
    for name, value in [*options, (POSITIONAL, args.get(POSITIONAL))]:
        if value is None or value is False:
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            text = str(each).lower() if isinstance(each, bool) else str(each)
            if name == POSITIONAL:
                words.append(text)
            elif name.endswith("="):
                words.append(f"{name}{text}")
            else:
                option = name if name.startswith("-") else f"--{name}"
                words += [option] if each is True else [option, text]
    return words


def codes_of(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of the programs that configurations start: name to a hash of the code, each once."""
    programs = filter(None, map(program_of, configs))
    return {f"program {p.target}": code_of_program(folder_of(p)) for p in programs}

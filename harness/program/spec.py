"""A program that the harness did not write, as a run's specification holds it.

`RunSpec.config` of such a run is {"program": ProgramSpec, "steps": ..., "taps": [...], ...}: keys
that the built-in trainer's configuration has, too, mean the same in it.
"""

import atexit
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import harness
from harness import provenance
from harness.program.packages import Say, prepare
from harness.provenance import (
    COMMIT_VARIABLE,
    PROGRAM_VARIABLE,
    code_of_program,
    code_of_scripts,
    commit_of_program,
)
from harness.recorder import FOLDER_VARIABLE, RUN_VARIABLE
from harness.values import Json, RecordError

Kind = Literal["script", "module", "entry", "command"]
POSITIONAL = "_"
"""Name in `args` of arguments that stand alone."""
ENFORCED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""Variables that `determinism: enforce` sets."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which ranks find each other: the same for all, no run would begin."""


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


def program_of(config: Mapping[str, Any]) -> ProgramSpec | None:
    """The program of a run's configuration; None for the built-in trainer.

    Raises:
        RecordError: it does not decode.
    """
    plain = config.get("program")
    return None if plain is None else ProgramSpec.from_json(plain)


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


def commit_of_configs(configs: Iterable[Mapping[str, Any]]) -> str:
    """The commits of the code that configurations run, joined by commas."""
    programs = {program and folder_of(program) for program in map(program_of, configs)}
    return ", ".join(
        sorted({commit_of_program(f) if f else provenance.describe() for f in programs} - {""})
    )


# --- one rank of a program, with the recorder in it ---------------------------------------------

# script, module   the rank's process becomes a fresh interpreter that runs the program, in the
#                  environment that torchrun would give it
# entry            the function is called in this process, a fork of the warm server
#
# The rendezvous store is hosted by the run's leader, as torchrun's agent does.
SITE = Path(harness.__file__).resolve().parent / "recorder" / "site"


def run_program(program: ProgramSpec, folder: Path, key: str) -> int:
    """Run one rank to its end; RANK and its companions are set. Does not return for a script."""
    os.environ.update(environment(program, folder, os.environ) | {RUN_VARIABLE: key})
    sys.stdout.flush()
    sys.stderr.flush()
    if program.kind != "entry":
        # The leader asks for stacks by it: until the recorder's `sitecustomize` has set that up,
        # and again once the interpreter has shut down, it must not end the rank.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        words = command(program)
        os.execve(words[0], words, os.environ)
    return _call(program)


def make_environments(programs: Iterable[ProgramSpec], say: Say) -> None:
    """Make the environments that programs ask for, before ranks look for one; as `prepare`."""
    for packages in {tuple(sorted(each.packages.items())) for each in programs if each.packages}:
        prepare(dict(packages), say=say)


def command(program: ProgramSpec) -> list[str]:
    """The command of a script or a module, in the environment of its packages."""
    what = ["-m", program.target] if program.kind == "module" else [program.target]
    return [str(prepare(program.packages)), *what, *command_line(program.args)]


def environment(program: ProgramSpec, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of one rank over those that the harness gives all ranks."""
    return {
        # What torchrun says to the processes that it starts.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "deltazero",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": environ.get("RANK", "0"), "ROLE_WORLD_SIZE": environ.get("WORLD_SIZE", "1"),
        # The harness' own commit, which all ranks inherit, is not that of the program.
        PROGRAM_VARIABLE: code_of_scripts(folder_of(program)), COMMIT_VARIABLE: "",
    } | recording(program, folder, environ)  # fmt: skip


def recording(program: ProgramSpec, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make every rank which inherits them record into a run's folder.

    The program's own are among them; its PYTHONPATH comes after the recorder's, which would not
    be found without.
    """
    before = {**environ, **program.env}.get("PYTHONPATH", "").split(os.pathsep)
    own = [program.folder] if program.kind == "module" else []
    paths = dict.fromkeys([str(SITE), str(SITE.parents[2]), *own, *filter(None, before)])
    enforced = ENFORCED if program.determinism == "enforce" else {}
    return enforced | program.env | {
        FOLDER_VARIABLE: str(folder.absolute()), "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


def _call(program: ProgramSpec) -> int:
    """Call `module:function` with the arguments by name; it returns an exit code or None."""
    from harness.recorder import session as recording

    sys.path.insert(0, program.folder)
    session = recording.begin()
    if session is None:
        raise RuntimeError(f"the folder of this run holds records already: {json.dumps(sys.argv)}")
    module, _, function = program.target.partition(":")
    sys.argv = [program.target]  # the forkserver's words are none of its options
    try:
        code = getattr(importlib.import_module(module), function)(**program.args)
    except BaseException as error:
        session.fail(error)
        raise
    finally:
        # As an interpreter ends. The session's own end was registered before all of the program's.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return code if isinstance(code, int) else 0

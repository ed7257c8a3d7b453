"""One rank of somebody's program, with the recorder in it.

    script, module   the rank's process becomes a fresh interpreter that runs the program, in the
                     environment that torchrun would give it
    entry            the function is called in this process, a fork of the warm server

The rendezvous store is hosted by the run's leader, as torchrun's agent does.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import harness
from harness.program.packages import Say, prepare
from harness.program.spec import ENFORCED, ProgramSpec, command_line, folder_of
from harness.provenance import PROGRAM_VARIABLE, code_of_scripts
from harness.recorder import FOLDER_VARIABLE, RUN_VARIABLE

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
    return recording(program, folder, environ) | {
        # What torchrun says to the processes that it starts.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "deltazero",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": environ.get("RANK", "0"), "ROLE_WORLD_SIZE": environ.get("WORLD_SIZE", "1"),
        PROGRAM_VARIABLE: code_of_scripts(folder_of(program)), **program.env,
    }  # fmt: skip


def recording(program: ProgramSpec, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make every rank which inherits them record into a run's folder."""
    before = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    own = [program.folder] if program.kind == "module" else []
    paths = dict.fromkeys([str(SITE), str(SITE.parents[2]), *own, *before])
    variables = {FOLDER_VARIABLE: str(folder.absolute()), "PYTHONPATH": os.pathsep.join(paths)}
    return variables | (ENFORCED if program.determinism == "enforce" else {})


def _call(program: ProgramSpec) -> int:
    """Call `module:function` with the arguments by name; it returns an exit code or None."""
    from harness.recorder import session as recording

    sys.path.insert(0, program.folder)
    session = recording.begin()
    if session is None:
        raise RuntimeError(f"the folder of this run holds records already: {json.dumps(sys.argv)}")
    module, _, function = program.target.partition(":")
    try:
        code = getattr(importlib.import_module(module), function)(**program.args)
    except SystemExit:
        session.end()
        raise
    except BaseException as error:
        session.fail(error)
        raise
    session.end()
    return code if isinstance(code, int) else 0

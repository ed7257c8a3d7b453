"""The command line as a process of its own, on a small scenario of stub ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def scenario(folder: Path, *, seeds: list[int] | None = None, steps: int = 10) -> Path:
    """A scenario file in `folder`: two cases for each seed."""
    path = folder / "rough.yaml"
    path.write_text(
        json.dumps({
            "name": "rough",
            "why": "A machine that is not as it should be.",
            "base": {"steps": steps, "microbatches": 1},
            "axes": {
                "seed": seeds or [1, 2],
                "parallel": [{"dp": 2}],
                "graph": ["eager", ["attn"], ["full_iteration"]],
            },
            "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
            "checks": {"loss": {}, "state": {}},
            "launch": {"device": "cpu", "timeout_s": 120, "slots": 4},
        })
    )  # fmt: skip
    return path


def start(
    *args: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    bare: tuple[str, ...] = (),
    through: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """A harness over stub ranks; its output is captured unless `more` says otherwise.

    `bare` names variables that it is started without, `through` a command that starts it.
    """
    environ = {name: value for name, value in os.environ.items() if name not in bare}
    settings: dict[str, Any] = {
        "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    }  # fmt: skip
    return subprocess.Popen(
        [*through, sys.executable, "-m", "tests.rough_machine.stubbed", *args],
        cwd=cwd, env=environ | {"PYTHONPATH": str(ROOT)} | (env or {}), **(settings | more),
    )  # fmt: skip


def run(*args: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a harness that is left alone."""
    process = start(*args, cwd=cwd, env=env)
    out, err = process.communicate(timeout=240)
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

"""`python -m tests.chaos.harness ARGS`: the command line, over ranks without torch.

With WITHOUT_REPORTS in the environment it makes none, as they take seconds; with JUMPING_CLOCK
`time.time()` goes back and forth by days at each call. The functions start it in a process.
"""

import functools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> int:
    """As `harness.__main__`, over stub ranks."""
    try:
        from harness.__main__ import secure_streams

        secure_streams()
        from harness import cli
        from harness.cli import run as report_commands
        from harness.engine.local import LocalEngine
        from harness.runner import launch
    except KeyboardInterrupt:
        sys.stderr.write("harness: interrupted\n")
        return 2
    engine = functools.partial(LocalEngine, entry="tests.chaos.ranks:rank_main")
    setattr(launch, "LocalEngine", engine)  # noqa: B010 - the class, by what makes it
    if os.environ.get("WITHOUT_REPORTS"):
        setattr(report_commands, "build_reports", lambda folder, *_: {})  # noqa: B010
    return cli.main()


def scenario(folder: Path, *, seeds: list[int] | None = None, **base: Any) -> Path:
    """A scenario file in `folder`: two cases for each seed and layout."""
    path = folder / "chaos.yaml"
    path.write_text(json.dumps({
        "name": "chaos", "why": "A machine that is not as it should be.",
        "base": {"steps": 10, "microbatches": 1} | base,
        "axes": {"seed": seeds or [1, 2], "parallel": [{"dp": 2}],
                 "graph": ["eager", ["attn"], ["full_iteration"]]},
        "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}, "peak_memory": {"max_ratio": 2.0}},
        "launch": {"device": "cpu", "timeout_s": 120, "slots": 4},
    }))  # fmt: skip
    return path


def start(
    *args: str, cwd: Path, env: dict[str, str] | None = None, bare: tuple[str, ...] = (),
    through: tuple[str, ...] = (), real: bool = False, **more: Any,
) -> Any:  # fmt: skip
    """A harness over stub ranks; its output is captured unless `more` says otherwise.

    Args:
        args: the command line.
        cwd: its working folder.
        env: further variables.
        bare: names of variables that it is started without.
        through: a command that starts it.
        real: over the real worker.
        more: options of `subprocess.Popen`.
    """
    environ = {name: value for name, value in os.environ.items() if name not in bare}
    given: dict[str, Any] = {
        "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    }  # fmt: skip
    return subprocess.Popen(
        [*through, sys.executable, "-m", "harness" if real else "tests.chaos.harness", *args],
        cwd=cwd, env=environ | {"PYTHONPATH": str(ROOT)} | (env or {}), **(given | more),
    )  # fmt: skip


def ended(process: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a harness that is left alone."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def run(*args: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The same of a new one."""
    return ended(start(*args, cwd=cwd, env=env))


if __name__ == "__main__":
    if os.environ.get("JUMPING_CLOCK"):
        _real, _rng = time.time, random.Random(5)
        setattr(time, "time", lambda: _real() + _rng.uniform(-1e6, 1e6))  # noqa: B010
    sys.exit(main())

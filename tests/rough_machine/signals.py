"""What a shell user sees of Ctrl-C and of other ways to be told to stop."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil

from tests.rough_machine.harness_process import run, scenario, start

INTERRUPTED = 2


def each(folder: Path) -> list[str]:
    """Once or twice, at work: exit code 2, nobody left behind, --resume goes on."""
    wrong = []
    for name, numbers in (
        ("SIGINT", [signal.SIGINT]), ("SIGINT twice", [signal.SIGINT] * 2),
        ("SIGTERM", [signal.SIGTERM]), ("SIGHUP", [signal.SIGHUP]),
        ("all", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]),
    ):  # fmt: skip
        here = folder / name.replace(" ", "_")
        here.mkdir()
        path = scenario(here, steps=50)
        process = start("run", str(path), "--out", "run", "--no-history", cwd=here)
        while not list(here.glob("run/runs/*/rank0.jsonl")) and process.poll() is None:
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True)
        for number in numbers:
            process.send_signal(number)
        out, err = (text.decode(errors="replace") for text in process.communicate(timeout=60))
        if process.returncode != INTERRUPTED or "--resume" not in err or "Traceback" in err:
            wrong.append(f"{name}: exit code {process.returncode}: {(out + err)[-300:]}")
        if psutil.wait_procs(below, timeout=10)[1]:
            wrong.append(f"{name}: processes were left behind")
        code, out, err = run("run", "--resume", "run", "--no-history", cwd=here)
        if code:
            wrong.append(f"{name}: resumed with exit code {code}: {(out + err)[-300:]}")
    return wrong


def at_random(folder: Path, times: int = 12) -> list[str]:
    """Ctrl-C at any moment, imports and reports included: no traceback, a code that says so."""
    wrong = []
    rng = random.Random(11)
    path = scenario(folder)
    for number in range(times):
        process = start(
            "run", str(path), "--out", f"run{number}", "--no-history", cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(0.3 + rng.uniform(0.0, 4.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        out, err = (text.decode(errors="replace") for text in process.communicate(timeout=60))
        if process.returncode not in (0, INTERRUPTED, -signal.SIGINT) or "Traceback" in err:
            wrong.append(f"#{number}: exit code {process.returncode}: {(out + err)[-500:]}")
    return wrong

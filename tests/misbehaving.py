"""`python -m tests.misbehaving`: what the harness answers about programs that misbehave.

    row of `support/programs/misbehaving/EXPECTED.py` -> scenario -> `harness run` -> verdict

Prints a table of the rows with what was expected and what came, and what is left running; ends
with 1 if an answer is wrong, missing, or does not name what it should (minutes).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from harness.records import Verdict
from harness.store import RunFolder
from tests.support.programs.misbehaving.EXPECTED import ROWS, Row

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests/support/programs/misbehaving"


def write_scenario(row: Row, folder: Path) -> Path:
    """The scenario of a row, in `folder`; JSON is YAML, too."""
    axis, (reference, candidate) = f"args.{row.axis}", row.values
    path = folder / f"{row.name}.yaml"
    plain = {
        "name": row.name,
        "why": f"{row.reason}.",
        "program": {
            "script": str(PROGRAMS / f"{row.script}.py"), "args": row.args, "ranks": 2,
            "steps": row.steps,
        },
        "axes": {axis: [reference, candidate]},
        "compare": {"axis": axis, "reference": reference, "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}, "finite": {}},
        "launch": {"device": "cpu", "timeout_s": 300, "stall_s": 60},
    }  # fmt: skip
    path.write_text(json.dumps(plain, indent=1))
    return path


def faults_of(row: Row, verdict: Verdict | None) -> list[str]:
    """What is wrong with an answer, in words."""
    if verdict is None:
        return ["no verdict"]
    got = {verdict.outcome, f"{verdict.outcome}/{verdict.what}"}
    faults = [] if got & set(row.outcomes) else ["the outcome"]
    return faults + [f"{word!r} is not named" for word in row.says if word not in verdict.message]


def left_running() -> list[str]:
    """Command lines of processes of the programs."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [" ".join(line) for line in lines if any(str(PROGRAMS) in word for word in line)]


def table(rows: Sequence[Row], verdicts: dict[str, Verdict]) -> tuple[list[str], int]:
    """Lines of the table, messages of wrong answers under it, and the number of wrong ones."""
    lines = ["| row | expected | got | s | right? |", "| --- | --- | --- | --- | --- |"]
    messages = []
    for row in rows:
        verdict = verdicts.get(row.name)
        faults = faults_of(row, verdict)
        got = "-" if verdict is None else f"{verdict.outcome}/{verdict.what}".rstrip("/")
        took = "-" if verdict is None else f"{verdict.wall_s:.0f}"
        right = "; ".join(faults) or "yes"
        lines.append(f"| {row.name} | {' or '.join(row.outcomes)} | {got} | {took} | {right} |")
        if faults:
            messages.append(f"{row.name}: {verdict.message if verdict else 'no verdict'}")
    return [*lines, "", *messages], len(messages)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.misbehaving", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-k", default="", help="only rows whose name holds this")
    parser.add_argument("--keep", action="store_true", help="keep the folder of runs")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if options.k in row.name]
    root = Path(tempfile.mkdtemp(prefix="misbehaving-"))
    before, began_s = set(left_running()), time.monotonic()
    scenarios = [str(write_scenario(row, root)) for row in rows]
    with (root / "log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "harness", "run", *scenarios, "--out", str(root / "runs")],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
        ).returncode  # fmt: skip
    verdicts: dict[str, Verdict] = {}
    if (root / "runs").is_dir():
        store = RunFolder.open(root / "runs")
        scenario_of = {case.id: case.scenario for case in store.cases}
        verdicts = {scenario_of[verdict.case_id]: verdict for verdict in store.verdicts()}
    lines, wrong = table(rows, verdicts)
    left = [line for line in left_running() if line not in before]
    lines += [f"left running: {line}" for line in left]
    took_s = time.monotonic() - began_s
    lines.append(f"\n{len(rows)} rows, {wrong} wrong, exit code {code}, {took_s:.0f} s")
    if wrong or left or options.keep:
        lines.append(f"kept: {root}")
    else:
        shutil.rmtree(root)
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(wrong or left))


if __name__ == "__main__":
    sys.exit(main())

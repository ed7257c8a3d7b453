"""`python -m tests.misbehaving`: what the harness answers about programs that misbehave.

    row -> scenario -> `harness run` -> verdict

A row is a case: the program with an option one way is the reference, the other way the candidate.
`mode` compares one that behaves with one that does not: whatever changes a bit, a step or an exit
code must fail, naming rank, step or tensor; whatever changes none of them must pass. `tag` changes
nothing, so that both runs do the same: what is odd but right must pass, and a reference that is
wrong itself gives no verdict. Prints a table, and what is left running; ends with 1 if an answer is
wrong, missing, or does not name what it should (minutes).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.records import Verdict
from harness.store import RunFolder

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests/support/misbehaving.py"


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        how: of `support/misbehaving.py`.
        axis: option that differs: `mode` or `tag`.
        values: of the reference, of the candidate.
        outcomes: right answers, as `outcome` or `outcome/what`.
        reason: why these are right.
        says: what the message must name, each of them.
        args: further options, the same in both.
        steps: optimizer steps that the scenario states.
    """

    how: str
    axis: str
    values: tuple[str, str]
    outcomes: Sequence[str]
    reason: str
    says: Sequence[str] = ()
    args: dict[str, str | bool] = field(default_factory=dict)
    steps: int = 6

    @property
    def name(self) -> str:
        """Of the scenario: unique, letters and underscores."""
        others = "_".join(key if value is True else str(value) for key, value in self.args.items())
        return "_".join(filter(None, (self.how, *self.values, others)))


def _bad(how: str, outcomes: Sequence[str], reason: str, says: Sequence[str] = ()) -> Row:
    return Row(how, "mode", ("good", "bad"), outcomes, reason, says)


def _odd(how: str, mode: str, outcomes: Sequence[str], reason: str) -> Row:
    return Row(how, "tag", ("a", "b"), outcomes, reason, args={"mode": mode})


MISSING = ("failed/missing_step",)
DIVERGED = ("failed/diverged",)
STUCK = ("failed/hang", "failed/crashed")
PASSED = ("passed",)

ROWS = (
    # Ranks that leave: exit code 0 is no proof of work.
    _bad("exits_early", MISSING, "three of six steps, exit code 0", ("rank 1", "step 3")),
    Row(
        "exits_early", "mode", ("good", "bad"), (*MISSING, *STUCK),
        "its peer loses the connection: the rank that left is to be named, not the peer",
        ("rank 1",), {"ddp": True},
    ),
    _bad("leaves_at_once", MISSING, "no end record, exit code 0", ("rank 1", "step 3")),
    _bad("takes_unequal_steps", MISSING, "rank 1 took five steps of six", ("rank 1", "step 5")),
    Row(
        "takes_unequal_steps", "mode", ("good", "more"), ("failed/record_after_end",),
        "rank 1 took a seventh step", ("rank 1", "step 6"),
    ),
    _odd("exits_early", "bad", ("error/missing_step",), "the reference itself is not whole"),
    _bad("exits_with_3", ("failed/crashed",), "all steps are there, but it says it failed",
         ("rank 1", "3")),
    _bad("raises_at_exit", PASSED, "Python's exit code is 0, and no step is missing"),
    # Ranks that hang.
    _bad("ignores_sigterm", ("failed/hang",), "it waits for ever and only SIGKILL ends it",
         ("rank 1",)),
    _bad("leaves_out_a_collective", STUCK, "rank 0 waits in all_reduce, rank 1 in barrier",
         ("rank",)),
    _bad("disagrees_about_a_collective", (*STUCK, *DIVERGED),
         "gloo may hang, fail, or mix the two: it must not pass", ("step 3",)),
    # What has nothing to do with training.
    _bad("prints_a_gigabyte", PASSED, "printing changes no bit, and is no hang"),
    _bad("leaves_a_child", PASSED, "the run is over when its ranks are; the child is ended"),
    _bad("changes_folder", PASSED, "records go to the run's folder, wherever the rank is"),
    _bad("deletes_the_model", PASSED, "all steps were taken; no hook may need the model later"),
    _bad("makes_a_new_process_group", PASSED, "the same sums, over another group"),
    _bad("spawns_a_trainer", PASSED, "steps of a helper are not the rank's"),
    _bad("trains_in_a_thread", PASSED, "the thread of a backward pass changes no bit"),
    # Optimizers.
    _odd("has_two_optimizers", "good", PASSED, "both step once: six steps, not twelve"),
    _bad("has_two_optimizers", DIVERGED, "the second decays its weights", ("step 0",)),
    _odd("keeps_an_optimizer", "good", PASSED, "who steps is observed, whoever came before"),
    _bad("keeps_an_optimizer", DIVERGED, "only gradients and weights of the last step show it",
         ("rank 1", "step 5")),
    _bad("steps_twice", ("failed",), "twelve steps, or six that differ: never a pass"),
    Row("steps_twice", "tag", ("a", "b"), PASSED, "twelve steps, as the scenario states",
        args={"mode": "bad"}, steps=12),
    _bad("never_steps", ("failed/missing_step", "failed/empty_run"), "no step was taken"),
    _odd("never_steps", "bad", ("error/missing_step", "error/empty_run"),
         "two runs without a step agree by testing nothing"),
    _bad("swallows_errors", MISSING, "rank 1 left one step out and went on", ("rank 1",)),
    Row("swallows_errors", "mode", ("good", "late"), PASSED,
        "the error came after the step, and changed nothing"),
    # Parameters and state.
    _odd("has_a_parameter_on_one_rank", "good", PASSED, "ranks may hold different tensors"),
    _bad("has_a_parameter_on_one_rank", DIVERGED, "one parameter of one rank is off",
         ("rank 1", "extra")),
    _odd("replaces_parameters", "good", PASSED, "the new parameter has the old one's name"),
    _bad("replaces_parameters", DIVERGED, "from step 3 on", ("step 3",)),
    Row("loads_a_checkpoint", "mode", ("good", "whole"), PASSED, "loading all state changes none"),
    _bad("loads_a_checkpoint", DIVERGED, "the optimizer's state is lost in step 3", ("step 3",)),
    _odd("has_a_nan_buffer", "always", PASSED, "both runs hold it: a mask may hold infinities"),
    _bad("has_a_nan_buffer", ("failed/nonfinite", "failed/diverged"), "only the candidate has it",
         ("unused", "rank 1")),
    # A reference that does not repeat itself.
    _odd("seeds_from_the_clock", "bad", ("incomparable/nondeterministic_reference",),
         "the control differs: nothing may be said of the candidate"),
    _bad("seeds_from_the_clock", DIVERGED, "the weights differ before step 0", ("before step 0",)),
)  # fmt: skip


def write_scenario(row: Row, folder: Path) -> Path:
    """The scenario of a row, in `folder`; JSON is YAML, too."""
    axis, (reference, candidate) = f"args.{row.axis}", row.values
    path = folder / f"{row.name}.yaml"
    plain = {
        "name": row.name,
        "why": f"{row.reason}.",
        "program": {
            "script": str(PROGRAM), "args": {"how": row.how, **row.args}, "ranks": 2,
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
    return [" ".join(line) for line in lines if str(PROGRAM) in line]


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

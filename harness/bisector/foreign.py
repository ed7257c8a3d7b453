"""What bisect leaves of a failing case of somebody's program: a scenario, a script without us.

    legs -> a scenario with one compared axis -> run again by `repro`
    legs -> a script that starts the program twice -> run here, seen to fail or not

Besides, the program at another commit of its own repository, and with other releases of a package.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from harness.bisector.asking import Asker, brief
from harness.bisector.commit_range import Checkout, CommitRange, Run
from harness.bisector.commit_runs import same_end
from harness.bisector.differences import leaves_of
from harness.bisector.failure import Failure, failure_of
from harness.bisector.questions import UNRESOLVED, Question, Reply
from harness.program.spec import ProgramSpec, command_line, folder_of, program_of
from harness.records import CaseSpec, RunSpec, Verdict, What
from harness.repeats import FIRST_REPEAT
from harness.scenario.program_section import OPEN
from harness.store import LEGS

TEMPLATE = Path(__file__).with_name("standalone.py")
BEYOND_BITS: tuple[What, ...] = ("memory_regression", "throughput_regression", "noisy")
"""Failures that a comparison of bits does not show."""
_USUAL = {"taps": [], "stress": [], "every": 1, "determinism": "", "record": "auto"}
"""Settings that a scenario need not say."""
SCRIPT_RUNS = 2
SPARE_S = 120.0
"""For the script itself, and for packages that it installs."""


class _Quoted(str):
    """A text that YAML would take for a number without its quotes."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def scenario_texts(
    case: CaseSpec, reference: RunSpec, candidate: RunSpec, *, name: str, why: str, folder: Path
) -> Iterator[str]:
    """Scenarios in `folder` whose one case may be that of the legs, one for each compared axis."""
    before, after = leaves_of(reference.config), leaves_of(candidate.config)
    differing = [x for x in dict.fromkeys((*after, *before)) if before.get(x) != after.get(x)]
    program = _program(candidate)
    place = folder.absolute()
    for axis in differing:
        same = {leaf: value for leaf, value in after.items() if leaf != axis and value is not None}
        values = [_plain(each.get(axis, _USUAL.get(axis))) for each in (before, after)]
        values = ["off" if axis == "determinism" and not value else value for value in values]
        section: dict[str, Any] = {
            "folder": os.path.relpath(program.folder, place),
            program.kind: program.target,
            "ranks": candidate.world_size,
            "steps": same.get("steps", candidate.config["steps"]),
        }
        if program.kind == "script":
            section["script"] = os.path.relpath(program.target, program.folder)
        for part in OPEN:
            held = {leaf.partition(".")[2]: _plain(value)
                    for leaf, value in same.items() if leaf.partition(".")[0] == part}  # fmt: skip
            section |= {part: held} if held else {}
        section |= {k: same[k] for k, plain in _USUAL.items() if same.get(k, plain) != plain}
        section |= {"smaller": dict(program.smaller)} if program.smaller else {}
        launch = {"device": candidate.device, "timeout_s": candidate.timeout_s}
        launch |= {} if candidate.stall_s is None else {"stall_s": candidate.stall_s}
        plain = {
            "name": name, "why": why, "program": section, "axes": {axis: values},
            "compare": {"axis": axis, "reference": values[0], "expect": case.expect},
            "checks": {k: v for k, v in case.checks.items() if k not in ("throughput", "soak")},
            "launch": launch,
        }  # fmt: skip
        yield yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def _program(spec: RunSpec) -> ProgramSpec:
    program = program_of(spec.config)
    assert program is not None
    return program


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _Quoted(value) if isinstance(value, str) else value


# --- the script


def script_text(reference: RunSpec, candidate: RunSpec, *, story: str) -> str:
    """A script that starts the program as both legs do and compares them, by torch alone."""
    programs = {leg: _program(s) for leg, s in zip(LEGS[::2], (reference, candidate), strict=True)}
    program = programs["candidate"]
    case = {
        "kind": program.kind, "target": program.target, "folder": program.folder,
        "ranks": candidate.world_size, "timeout_s": candidate.timeout_s,
        "deterministic": program.determinism == "enforce",
        "runs": {
            leg: {
                "words": command_line(each.args) if each.kind != "entry" else [],
                "args": each.args, "env": each.env, "packages": each.packages,
            }
            for leg, each in programs.items()
        },
    }  # fmt: skip
    text = TEMPLATE.read_text(encoding="utf-8")
    # A docstring must not end early, nor hold an escape.
    said = story.replace("\\", "/").replace('"""', "'''").rstrip('"')
    plain = json.dumps(case, indent=1).replace('"""', '\\"\\"\\"')
    return text.replace("__STORY__", said, 1).replace("__CASE__", plain, 1)


def seen_to_fail(path: Path, failure: Failure, candidate: RunSpec, asker: Asker) -> str:
    """Run a stand-alone script; "" if it fails, else why it could not be made to fail.

    Raises:
        OutOfBudget: it takes two runs.
    """
    if failure.what in BEYOND_BITS:
        return f"the script could not be made to fail: it does not compare {failure.what}"

    def find_out() -> Reply:
        try:
            done = subprocess.run(
                [sys.executable, str(path)], capture_output=True, text=True, errors="replace",
                timeout=2 * candidate.timeout_s + SPARE_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Reply(words="it did not end", runs=SCRIPT_RUNS)
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        words = f"exit code {done.returncode}: {said[0] if said else 'it said nothing'}"
        return Reply(words=words, detail={"code": done.returncode}, runs=SCRIPT_RUNS)

    words = "does the stand-alone script fail?"
    question = Question(key=f"script {candidate.key}", words=words, runs=SCRIPT_RUNS)
    reply = asker.journal.ask(question, find_out) if asker.journal is not None else find_out()
    if reply.detail.get("code") == 1:
        return ""
    return f"the script could not be made to fail: {reply.words}"


# --- other commits of the program


def program_range(case: CaseSpec, commits: str) -> CommitRange:
    """The commits of the repository that the program of a case lies in."""
    return CommitRange(folder_of(_program(case.candidate)), commits)


def commit_run(case: CaseSpec, verdict: Verdict, asker: Asker, top: Path) -> Run:
    """Runs the case with the program of a commit, under this harness; `top` is its repository."""
    failure, asker = failure_of(verdict), asker.without_journal()

    def run(checkout: Checkout) -> Reply:
        legs: dict[str, Any] = {leg: at_commit(getattr(case, leg), checkout, top) for leg in LEGS}
        program = _program(legs["candidate"])
        if program.kind == "script" and not Path(program.target).is_file():
            return Reply(answer=UNRESOLVED, words="no verdict: the script is not in this commit")
        if checkout.attempt:
            number = FIRST_REPEAT + checkout.attempt
            legs["candidate"] = replace(legs["candidate"], replica=number)
        question = replace(
            case, id=f"commit-{legs['candidate'].key}", labels={"question": "commits"}, repeats=0,
            skip_reason="", **legs,
        )  # fmt: skip
        found = asker.ask(question, "").verdict
        answer = failure.answer(found)
        if answer == "fails" and not same_end(verdict, found.ending):
            answer = UNRESOLVED
        return Reply(answer=answer, words=brief(found))

    return run


def at_commit(spec: RunSpec, checkout: Checkout, top: Path) -> RunSpec:
    """The run with the paths of a checkout; the commit makes it another run than the last one.

    So are arguments that name a file of the repository `top`, or with a slash a folder of it, from
    where we are, if the commit has it: what it lacks, as data that git ignores, stays the user's.
    """

    def moved(path: str) -> str:
        inside = Path(path).is_absolute() and Path(path).is_relative_to(top)
        return str(checkout.folder / Path(path).relative_to(top)) if inside else path

    program = dict(spec.config["program"])

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [argument(each) for each in value]
        if not isinstance(value, str) or not value or "\0" in value:
            return value
        named = Path(value).resolve()
        there = Path(moved(str(named)))
        is_kept = there == named or not (named.is_file() or (os.sep in value and named.is_dir()))
        return value if is_kept or not there.exists() else str(there)

    program |= {name: moved(program[name]) for name in ("target", "folder")}
    program["args"] = {name: argument(value) for name, value in program["args"].items()}
    return replace(spec, config=spec.config | {"program": program, "commit": checkout.commit})

"""What is run at a commit: a case with the harness of the commit, or with a program's own code.

    a case              passes, or fails as it did; whatever else it does is no verdict
    the built-in one    under the commit's harness, once a probe has said what that knows
    a program's         under this harness, with the paths of the checkout

The interpreter is ours, the packages are the commit's: `PYTHONPATH` begins with the worktree, and
has nothing of the user's own checkout. An editable installation of our packages is shut out
(`SHUT_OUT`): it would lend a commit the modules that it lacks.

    a key that the commit does not know, at its default    left out: it does what the default says
    at another value                                       no verdict: it cannot do that
    a key that only the commit knows                       its own default
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_core.config import TrainConfig
from harness.bisect.chance import FAILS, PASSES, UNRESOLVED
from harness.bisect.commits import (
    HASH_CHARS,
    LEFT_OUT,
    OF_HOOKS,
    PUT_IN,
    Checkout,
    CommitRange,
    Run,
)
from harness.bisect.differences import config_of, leaves_of, program_in
from harness.bisect.experiments import Asker, Reply, brief, failure_of
from harness.codec import Json, dumps
from harness.engine.process import die_with_parent
from harness.errors import Infrastructure, Interrupted, one_line
from harness.program.spec import folder_of
from harness.records import CaseSpec, Ending, ExitCode, PlantSpec, RunSpec, Verdict
from harness.repeats import FIRST_REPEAT
from harness.store import CASE_FILE, LEGS
from harness.store.files import make_folder, read_object, read_tail, with_checksum, write_atomic
from harness.store.verify import unused

GRACE_S = 10.0
TAIL_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 24
_CODES = {"failed": ExitCode.FAILED, "incomparable": ExitCode.NO_VERDICT}
"""Exit codes of outcomes that can be searched for."""

SHUT_OUT = """\
import importlib.machinery, importlib.util, os, sys
for finder in sys.meta_path:
    module = sys.modules.get(getattr(finder, "__module__", ""))
    mapping = getattr(module, "MAPPING", None)
    if isinstance(mapping, dict):
        for name in ("fsdp_core", "harness", "reports"):
            mapping.pop(name, None)
here = os.path.dirname(os.path.abspath(__file__))
others = [path for path in sys.path if os.path.abspath(path) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""A `sitecustomize` of runs at commits; that of the user comes after it."""
PROBE = """\
import dataclasses, json, fsdp_core, harness, harness.cli
found = {"files": [harness.__file__, fsdp_core.__file__]}
try:
    from fsdp_core.config import TrainConfig
    found["config"] = TrainConfig().to_dict()
except Exception: pass
try:
    from harness import records
    for kind in ("CaseSpec", "RunSpec", "PlantSpec"):
        if hasattr(records, kind):
            found[kind] = [each.name for each in dataclasses.fields(getattr(records, kind))]
except Exception: pass
print(json.dumps(found))
"""
"""For `python -c` with the commit's packages: one line of JSON, or an end that says why not."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the harness of a commit knows; None where it does not say.

    Attributes:
        files: of the packages that it would run.
        config: setting to default.
        kinds: class to the names of its fields.
    """

    files: tuple[str, ...]
    config: dict[str, Any] | None = None
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read_probe(text: str) -> Known:
    """What `PROBE` printed.

    Raises:
        ValueError: something else.
    """
    plain = json.loads(text.strip().splitlines()[-1] if text.strip() else text)
    if not isinstance(plain, dict) or not isinstance(plain.get("files"), list):
        raise ValueError(f"expected an object with files, got {text!r:.80}")
    config = plain.get("config")
    return Known(
        files=tuple(map(str, plain["files"])),
        config=leaves_of(config) if isinstance(config, dict) else None,
        kinds={k: plain[k] for k in ("CaseSpec", "RunSpec", "PlantSpec") if k in plain},
    )


@dataclass(frozen=True, kw_only=True)
class Translated:
    """A case in the words of a commit.

    Attributes:
        plain: what goes into its `case.json`.
        why_not: "", or what of the case the commit does not know.
        left_out: settings at their defaults that it does not know.
        put_in: settings that it alone knows, at its defaults.
    """

    plain: dict[str, Any]
    why_not: str = ""
    left_out: tuple[str, ...] = ()
    put_in: tuple[str, ...] = ()

    @property
    def detail(self) -> dict[str, list[str]]:
        """Of a reply: by `LEFT_OUT` and `PUT_IN`, what there is."""
        found = {LEFT_OUT: list(self.left_out), PUT_IN: list(self.put_in)}
        return {name: settings for name, settings in found.items() if settings}


def translated(case: Mapping[str, Any], known: Known) -> Translated:
    """A case, as `CaseSpec.to_json` has it, for the harness of a commit."""
    work = _Translation(known)
    plain = work.fields_of("CaseSpec", CaseSpec, case)
    for leg in LEGS:
        plain[leg] = work.fields_of("RunSpec", RunSpec, plain[leg])
        plain[leg]["config"] = work.config(plain[leg]["config"])
        if isinstance(plain[leg].get("plant"), dict):
            plain[leg]["plant"] = work.plant(plain[leg]["plant"])
    return Translated(
        plain=plain, why_not=", ".join(dict.fromkeys(work.unknown)),
        left_out=tuple(dict.fromkeys(work.left_out)), put_in=tuple(dict.fromkeys(work.put_in)),
    )  # fmt: skip


class _Translation:
    def __init__(self, known: Known) -> None:
        self._known = known
        self.unknown: list[str] = []
        self.left_out: list[str] = []
        self.put_in: list[str] = []

    def fields_of(self, name: str, kind: type[Json], plain: Mapping[str, Any]) -> dict[str, Any]:
        """An object without what the commit does not know."""
        silent = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
        names = self._known.kinds.get(name, plain)
        for key in plain.keys() - names:
            if key not in silent or not _same(plain[key], silent[key]):
                self.unknown.append(f"{key} of a {name}")
        return {key: value for key, value in plain.items() if key in names}

    def plant(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """A plant, and those beside it."""
        kept = self.fields_of("PlantSpec", PlantSpec, plain)
        if kept.get("beside"):
            kept["beside"] = [self.plant(each) for each in kept["beside"]]
        return kept

    def config(self, plain: dict[str, Any]) -> dict[str, Any]:
        """A configuration in the settings of the commit."""
        theirs = self._known.config
        if theirs is None:
            return plain
        ours, defaults = leaves_of(plain), leaves_of(TrainConfig().to_dict())
        kept = {}
        for leaf, value in ours.items():
            if leaf in theirs:
                kept[leaf] = value
            elif leaf in defaults and _same(value, defaults[leaf]):
                self.left_out.append(leaf)
            else:
                self.unknown.append(f"{leaf} = {value}")
        for leaf in sorted(theirs.keys() - ours.keys()):
            kept[leaf] = theirs[leaf]
            self.put_in.append(leaf)
        return config_of(kept)


def _same(one: Any, other: Any) -> bool:
    """As JSON has them: 1 is not true, a tuple is a list."""
    if isinstance(other, Json):
        other = other.to_json()
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# --- with the harness of the commit


def case_run(place: Path, verdict: Verdict, folder: Path, room: Sequence[str] = ()) -> Run:
    """Runs a case again, with the harness of the commit.

    Args:
        place: case folder, with `case.json`.
        verdict: of the failure that is searched for.
        folder: gets a run folder a run.
        room: further options of `harness rerun`, each with its value.
    """

    def run(checkout: Checkout) -> Reply:
        make_folder(folder)
        log = folder / f"{_name(checkout)}.log"
        # Where we are, for paths of the case; the interpreter does not look there for modules.
        env = python_environment(checkout) | {"PYTHONSAFEPATH": "1"}
        known = _probe(checkout, log, env)
        if isinstance(known, Reply):
            return known
        case = translated(read_object(place / CASE_FILE), known)
        if case.why_not:
            return Reply(answer=UNRESOLVED, words=f"no verdict: it does not know {case.why_not}")
        out = unused(folder / _name(checkout))
        asked = out.with_name(f"{out.name}.case")
        make_folder(asked)
        write_atomic(asked / CASE_FILE, dumps(with_checksum(case.plain)) + "\n")
        command = (
            *(sys.executable, "-m", "harness", "rerun", str(asked.absolute())),
            *("--out", str(out.absolute()), "--json", "--no-history", *room),
        )
        answers = log.with_suffix(".json")
        try:
            code = _run(command, log, env, answers)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        if code in (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise Interrupted(f"interrupted at {checkout.commit[:HASH_CHARS]}")
        reply = _judged(code, answers, log, verdict)
        return replace(reply, detail=case.detail)

    return run


def python_environment(checkout: Checkout) -> dict[str, str]:
    """Of a run whose modules are the commit's."""
    others = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and not Path(entry).absolute().is_relative_to(checkout.repository)
    ]
    site = checkout.folder.with_name("site")
    make_folder(site)
    write_atomic(site / "sitecustomize.py", SHUT_OUT)
    path = os.pathsep.join([str(site), str(checkout.folder), *others])
    # What git sets for its hooks would make each git of the run that of the user's checkout.
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"PYTHONPATH": path}


def _name(checkout: Checkout) -> str:
    return f"{checkout.commit[:HASH_CHARS]}-{checkout.attempt}"


def _probe(checkout: Checkout, log: Path, env: Mapping[str, str]) -> Known | Reply:
    """What the commit's harness knows; no verdict for a commit that does not import."""
    probed = log.with_suffix(".probe")
    code = _run((sys.executable, "-c", PROBE), log, env, probed)
    if code != 0:
        return Reply(answer=UNRESOLVED, words=f"does not build: {_last_line(log)}")
    try:
        known = read_probe(read_tail(probed, MAX_ANSWER_BYTES).decode(errors="replace"))
    except ValueError as error:
        return Reply(answer=UNRESOLVED, words=one_line(f"no verdict: it cannot be asked: {error}"))
    inside = [Path(f).resolve().is_relative_to(checkout.folder.resolve()) for f in known.files]
    if not inside[0]:
        raise Infrastructure(f"expected harness of {checkout.folder}, got {known.files[0]}")
    if not all(inside):
        elsewhere = known.files[inside.index(False)]
        return Reply(answer=UNRESOLVED, words=f"no verdict: it would run {elsewhere}")
    return known


def _judged(code: int | None, answers: Path, log: Path, wanted: Verdict) -> Reply:
    try:
        plain = json.loads(read_tail(answers, MAX_ANSWER_BYTES))
        (verdict,) = plain["verdicts"]
        # Other commits have other fields; these three are as old as verdicts.
        outcome, what, message = (str(verdict[name]) for name in ("outcome", "what", "message"))
        ending = _ending(verdict.get("ending"))
    except (ValueError, KeyError, TypeError):
        return Reply(
            answer=UNRESOLVED, words=f"no verdict: exit code {code} {_last_line(log)}".strip()
        )
    if outcome == "passed" and code == ExitCode.PASSED:
        return Reply(answer=PASSES, words=outcome)
    is_same = (outcome, what) == (wanted.outcome, wanted.what) and same_end(wanted, ending)
    if is_same and code == _CODES.get(outcome):
        return Reply(answer=FAILS, words=one_line(f"{outcome} {what}".strip()))
    words = f"no verdict: {outcome} {what} {message}"
    return Reply(answer=UNRESOLVED, words=one_line(words.strip()))


def _ending(plain: object) -> Ending | None:
    """The two fields that are compared, of a harness that may have others; None of an older one."""
    if not isinstance(plain, dict):
        return None
    return Ending(exception=str(plain.get("exception", "")), signal=str(plain.get("signal", "")))


def same_end(wanted: Verdict, ending: Ending | None) -> bool:
    """Whether a run was ended by the same exception or signal; not if only one is known."""
    if wanted.what != "crashed" or wanted.ending is None:
        return True
    ours = wanted.ending
    return ending is not None and (ours.exception, ours.signal) == (
        ending.exception, ending.signal
    )  # fmt: skip


def _last_line(log: Path) -> str:
    lines = read_tail(log, TAIL_BYTES).decode(errors="replace").strip().splitlines()
    return one_line(lines[-1])[:200] if lines else ""


def _run(command: Sequence[str], log: Path, env: Mapping[str, str], stdout: Path) -> int:
    """Its exit code; whatever it has started ends with it."""
    make_folder(log.parent)
    with log.open("ab") as said, Path(stdout).open("wb") as answers:
        process = subprocess.Popen(
            command, cwd=Path.cwd(), env=dict(env), stdin=subprocess.DEVNULL, stderr=said,
            stdout=answers, start_new_session=True,
            # Killed without a word, we leave nobody at work in a worktree that goes away.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            return process.wait()
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its children: asked first, so that a harness keeps what it has."""
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# --- with the program of the commit


def program_range(case: CaseSpec, commits: str) -> CommitRange:
    """The commits of the repository that the program of a case lies in."""
    return CommitRange(folder_of(program_in(case.candidate)), commits)


def commit_run(case: CaseSpec, verdict: Verdict, asker: Asker, top: Path) -> Run:
    """Runs the case with the program of a commit, under this harness; `top` is its repository."""
    failure, asker = failure_of(verdict), asker.unaccounted()

    def run(checkout: Checkout) -> Reply:
        legs: dict[str, Any] = {leg: at_commit(getattr(case, leg), checkout, top) for leg in LEGS}
        program = program_in(legs["candidate"])
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

"""The run folder: everything that a harness run leaves behind, how it is read again, and verified.

    manifest.json, scenario.yaml, cases.json   what was planned; a folder is one with a manifest
    runs/KEY/       spec.json, rankN.jsonl, rankN.contents; `save_outcome` makes the run finished
    cases/ID/       case.json, links to the files of its three runs, verdict.json

A manifest speaks for the plan, a verdict for outcomes and these for what ranks wrote, by checksums.
What is not as they say is in `RankRecords.problems`, never dropped and never an exception.
"""

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from harness.errors import Infrastructure, UsageError, shown
from harness.masking import Masker
from harness.provenance import variables
from harness.records import (
    FOLDER_VERSION,
    CaseSpec,
    Json,
    RankRecords,
    RecordError,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
    What,
    dumps,
)  # fmt: skip
from harness.repeats import confirming_runs, runs_of
from harness.store.files import (
    CHANGED,
    checksum_of,
    link_tree,
    lock,
    make_folder,
    parsed,
    read_object,
    read_plain,
    read_sealed,
    refusals,
    told,
    with_checksum,
    write_atomic,
    write_object,
)  # fmt: skip
from harness.store.streams import read_ranks

__all__ = [
    "CASES_FILE", "CASE_FILE", "LEGS", "MANIFEST_FILE", "OUTCOME_FILE", "OWN_FOLDERS",
    "SEARCH_FILE", "SHARDS_FILE", "SPEC_FILE", "VERDICT_FILE", "CaseRuns", "RunFolder", "begin_run",
    "find_verdict", "kept_folder", "kept_folders", "load_case", "load_run_folder", "read_outcome",
    "save_outcome", "sealed_outcome", "set_aside",
]  # fmt: skip
"""Of `harness.store`."""
MANIFEST_FILE, SCENARIO_FILE, CASES_FILE = "manifest.json", "scenario.yaml", "cases.json"
LOCK_FILE, SPEC_FILE, OUTCOME_FILE = "lock", "spec.json", "outcome.json"
CASE_FILE, VERDICT_FILE = "case.json", "verdict.json"
SHARDS_FILE, SEARCH_FILE = "shards.json", "bisect.json"
"""Of a shard (`harness.runner.plan`); of a search: what `harness bisect` asked."""
OWN_FOLDERS = ("runs", "cases", "report")
"""Folders of a run folder that are written to."""
LEGS = ("reference", "control", "candidate")
RANK_FILES = ("rank*.jsonl", "rank*.contents")
MAX_CACHED_BYTES = 256 << 20
"""Of rank files whose records a process keeps."""
RACY_NS = 100_000_000
"""A file that changed so lately may change again without another time of change."""
_FOR_PEOPLE = ("why", "notes", "command")
"""Keys of a manifest's texts that only people read: nothing is made from them again."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_+=,@-][A-Za-z0-9_+=,@.-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class CaseRuns:
    """A case with its three runs."""

    case: CaseSpec
    reference: RunResult
    control: RunResult
    candidate: RunResult


@dataclass(frozen=True, kw_only=True)
class _Plan(Json):
    cases: tuple[CaseSpec, ...]


class RunFolder:
    """One run folder, at its absolute `path`. Reading needs no lock; who writes calls `acquire`.

    `scenario_text` is the scenario file as it was, `cases` are all that were planned, in order.
    """

    def __init__(
        self, path: Path, manifest: dict[str, Any], scenario_text: str, cases: Sequence[CaseSpec]
    ) -> None:
        self.path, self.manifest, self.scenario_text = path, manifest, scenario_text
        self.cases = tuple(cases)
        self._lock: int | None = None

    @classmethod
    def create(
        cls, path: Path, manifest: Mapping[str, Any], scenario_text: str,
        cases: Sequence[CaseSpec], *, fill: Callable[[Self], None] = lambda folder: None,
    ) -> Self:  # fmt: skip
        """Make a new run folder and lock it; `fill` puts in what must be there once it is one.

        Raises:
            UsageError: there is something else at `path`, or two cases share an id.
            Infrastructure: it cannot be written.
        """
        path = path.absolute()
        _check_vacant(path)
        if len({case.id for case in cases}) != len(cases):
            raise UsageError("two cases share an id")
        make_folder(path)
        masker = Masker(os.environ)
        said = {"schema": FOLDER_VERSION} | _without_secrets(manifest, masker)
        kept: dict[str, Any] = json.loads(json.dumps(said))  # as `open` gives it: no tuples
        folder = cls(path, kept, masker.text(scenario_text), cases)
        folder.acquire()
        try:
            plan = dumps({"cases": [case.to_json() for case in cases]}) + "\n"
            texts = {SCENARIO_FILE: folder.scenario_text, CASES_FILE: plan}
            for name, text in texts.items():
                write_atomic(path / name, text)
            fill(folder)
            sums = {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}
            # Last: its presence makes the folder a run folder.
            sealed = json.dumps(with_checksum(kept, sums), indent=2, sort_keys=True)
            write_atomic(path / MANIFEST_FILE, f"{sealed}\n")
        except BaseException:
            folder.release()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a run folder.

        Raises:
            UsageError: not a run folder, written by another harness, or its files are damaged.
        """
        path = path.absolute()
        try:
            if not (path / MANIFEST_FILE).is_file():
                raise UsageError(f"{path} is not a run folder: it has no {MANIFEST_FILE}")
            for name in OWN_FOLDERS:
                if (path / name).is_symlink():
                    raise RecordError(f"{name} is a link: what is written there is somebody else's")
            manifest, sums = read_sealed(path / MANIFEST_FILE)
            schema = manifest.get("schema")
            if repr(schema) != str(FOLDER_VERSION):
                raise UsageError(f"{path} was written by another harness (schema {schema!r}, "
                                 f"this one reads {FOLDER_VERSION})")  # fmt: skip
            data = {name: read_plain(path / name) for name in (SCENARIO_FILE, CASES_FILE)}
            for name, content in data.items():
                if sums.get(name) != sha256(content).hexdigest():
                    raise RecordError(f"{name}: {CHANGED}")
            plan = _Plan.from_json(parsed(data[CASES_FILE], CASES_FILE))
            return cls(path, manifest, data[SCENARIO_FILE].decode(), plan.cases)
        except (OSError, RecordError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is a damaged run folder: {told(error)}") from error

    def acquire(self) -> None:
        """Lock it, until `release` or the death of this process; raises as `files.lock`."""
        if self._lock is None:
            self._lock = lock(self.path / LOCK_FILE)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def run_folder(self, key: str) -> Path:
        return self.path / "runs" / _safe(key)

    def case_folder(self, case_id: str) -> Path:
        return self.path / "cases" / _safe(case_id)

    def finished(self, key: str) -> RunOutcome | None:
        """Outcome of a run; None if it did not finish or its outcome cannot be trusted."""
        return read_outcome(self.run_folder(key), key)[0]

    def load_run(self, spec: RunSpec) -> RunResult:
        return load_run_folder(self.run_folder(spec.key), spec)

    def leg_folder(self, case: CaseSpec, leg: str) -> Path:
        """Where a run of a case is read: with the case only where no run at all was kept."""
        current = self.run_folder(getattr(case, leg).key)
        return current if current.parent.exists() else self.case_folder(case.id) / leg

    def seal_case(self, case: CaseSpec) -> Path:
        """Make the case's folder, with its own links to its runs' files (or `Infrastructure`)."""
        folder = self.case_folder(case.id)
        building = folder.with_name(f".{folder.name}.tmp")
        with refusals("write", folder):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            for leg in LEGS:
                source = self.run_folder(getattr(case, leg).key)
                if source.is_dir():
                    link_tree(source, building / leg)
            write_object(building / CASE_FILE, case)
            set_aside(folder)
            building.rename(folder)
        return folder

    def save_verdict(self, verdict: Verdict, case: CaseSpec) -> None:
        """Store the answer for a case, with what it was made from (or `Infrastructure`)."""
        folder = self.case_folder(case.id)
        make_folder(folder)
        runs = [*runs_of(case), *confirming_runs(case).values()]
        paths = {spec.key: self.run_folder(spec.key) / OUTCOME_FILE for spec in runs}
        paths[CASE_FILE] = folder / CASE_FILE
        with refusals("read", folder):
            sums = {name: checksum_of(path) for name, path in paths.items() if path.exists()}
        write_object(folder / VERDICT_FILE, verdict, sums)

    def load_verdict(self, case_id: str) -> Verdict | None:
        """The answer for a case; None if there is none to trust."""
        return find_verdict(self.case_folder(case_id), case_id)[0]

    def verdicts(self) -> tuple[Verdict, ...]:
        """Stored answers in the order of `cases`; cases without one are left out."""
        found = (self.load_verdict(case.id) for case in self.cases)
        return tuple(verdict for verdict in found if verdict is not None)


def set_aside(folder: Path) -> Path | None:
    """Keep the folder of a run or a case under the name of its attempt; None if there is none."""
    if not folder.exists():
        return None
    kept = kept_folder(folder, len(kept_folders(folder)))
    with refusals("set aside", folder):
        folder.rename(kept)
    return kept


def kept_folder(folder: Path, number: int) -> Path:
    """Where attempt `number` of a run's or a case's folder is kept once there is a later one."""
    return folder.with_name(f"{folder.name}.attempt{number}")


def kept_folders(folder: Path) -> list[Path]:
    """Earlier attempts of a run's or a case's folder that are kept, oldest first."""
    names = (kept_folder(folder, number) for number in itertools.count())
    return list(itertools.takewhile(Path.exists, names))


def find_verdict(folder: Path, case_id: str) -> tuple[Verdict | None, str]:
    """The answer in a case's folder, or None and why there is none to trust."""
    try:
        verdict = Verdict.from_json(read_sealed(folder / VERDICT_FILE)[0])
    except FileNotFoundError:
        return None, f"{VERDICT_FILE}: missing" if folder.is_dir() else "the case was not judged"
    except (OSError, RecordError) as error:
        return None, f"{VERDICT_FILE}: {told(error).removeprefix(f'{VERDICT_FILE}: ')}"
    if verdict.case_id != case_id:
        return None, f"{VERDICT_FILE} is that of case {verdict.case_id}"
    return verdict, ""


def begin_run(folder: Path, spec: RunSpec) -> None:
    """Make a run's folder with its specification (`Infrastructure`: one has finished there)."""
    make_folder(folder)
    if (folder / OUTCOME_FILE).exists():
        raise Infrastructure(f"{folder} holds a finished run already")
    write_atomic(folder / SPEC_FILE, dumps(spec) + "\n")


def sealed_outcome(folder: Path, outcome: RunOutcome) -> str:
    """What `outcome.json` holds: the outcome, and checksums of its run's files."""
    with refusals("read", folder):
        sums = {path.name: checksum_of(path) for path in files_of_run(folder)}
    return dumps(with_checksum(outcome, sums)) + "\n"


def save_outcome(folder: Path, outcome: RunOutcome) -> None:
    """Store what happened to a run; this is what makes it finished."""
    write_atomic(folder / OUTCOME_FILE, sealed_outcome(folder, outcome))


def read_outcome(folder: Path, run: RunSpec | str) -> tuple[RunOutcome | None, str]:
    """The outcome of a run, or of a key, in `folder`; or None and why there is none to trust."""
    keys = (run,) if isinstance(run, str) else (run.key, run.recorded)
    try:
        outcome = RunOutcome.from_json(read_sealed(folder / OUTCOME_FILE)[0])
    except FileNotFoundError:
        return None, "the run did not finish" if folder.is_dir() else "the run was not made"
    except (OSError, RecordError) as error:
        return None, f"{OUTCOME_FILE} does not decode: {told(error)}"
    if outcome.key not in keys:
        return None, f"{OUTCOME_FILE} belongs to run {outcome.key}"
    return dataclasses.replace(outcome, key=keys[0]), ""


def changed_files(folder: Path) -> dict[str, str]:
    """Files of a finished run, by name, that are not as they were when it ended, and why."""
    try:
        sums = read_sealed(folder / OUTCOME_FILE)[1]
    except (OSError, RecordError):
        return {}
    found = {path.name: "not there when the run ended" for path in files_of_run(folder)
             if path.name not in sums}  # fmt: skip
    for name, expected in sums.items():
        try:
            if checksum_of(folder / name) != expected:
                found[name] = CHANGED
        except FileNotFoundError:
            found[name] = "missing"
        except OSError as error:
            found[name] = error.strerror or str(error)
    return found


def files_of_run(folder: Path) -> list[Path]:
    """What a run is made from and what its ranks wrote: all that its outcome speaks for."""
    paths = [path for pattern in RANK_FILES for path in folder.glob(pattern)]
    return sorted([*paths, *folder.glob(SPEC_FILE)])


def load_run_folder(folder: Path, spec: RunSpec) -> RunResult:
    """Read one run's folder. Without a trustworthy outcome it counts as interrupted or not run."""
    outcome, why = read_outcome(folder, spec)
    if outcome is None:
        what: What = "interrupted" if folder.is_dir() else "not_run"
        outcome = RunOutcome(key=spec.key, what=what, message=why)
    return RunResult(spec=spec, outcome=outcome, ranks=_records(folder, spec.world_size))


_cached: dict[tuple[object, ...], tuple[int, tuple[RankRecords, ...]]] = {}
"""Records that were decoded already, by the state of their files; the last used comes last."""


def _records(folder: Path, world_size: int) -> tuple[RankRecords, ...]:
    """Records of a run's ranks, those of damaged files with a problem; decoded once a process."""
    state: list[tuple[object, ...]] = [(world_size,)]
    num_bytes, newest_ns = 0, 0
    for path in (folder / OUTCOME_FILE, *files_of_run(folder)):
        with suppress(OSError):
            about = path.lstat()
            num_bytes += about.st_size
            newest_ns = max(newest_ns, about.st_ctime_ns)
            state.append((path.name, about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns))
    key = tuple(state)
    if (found := _cached.pop(key, None)) is None:
        changed, ranks = changed_files(folder), []
        for rank in read_ranks(folder, world_size):
            why = changed.get(f"rank{rank.rank}.jsonl")
            damage = () if why is None else (f"line 0: {why}",)
            ranks.append(dataclasses.replace(rank, problems=(*damage, *rank.problems)))
        found = num_bytes, tuple(ranks)
    if time.time_ns() - newest_ns > RACY_NS:
        _cached[key] = found
        while sum(size for size, _ in _cached.values()) > MAX_CACHED_BYTES:
            del _cached[next(iter(_cached))]
    return found[1]


def load_case(folder: Path) -> CaseRuns:
    """Read a case folder, wherever it was copied to (`UsageError`: it is none, or damaged)."""
    path = folder / CASE_FILE
    if not path.is_file():
        raise UsageError(f"{folder} is not a case folder (it has no {CASE_FILE})")
    try:
        case = CaseSpec.from_json(read_object(path))
    except (OSError, RecordError) as error:
        raise UsageError(f"{folder} is a damaged case folder: {told(error)}") from error
    legs = {leg: load_run_folder(folder / leg, getattr(case, leg)) for leg in LEGS}
    return CaseRuns(case=case, **legs)


def _check_vacant(path: Path) -> None:
    ours = {LOCK_FILE, SCENARIO_FILE, CASES_FILE, SHARDS_FILE}
    with refusals("look into", path):
        if path.is_file():
            raise UsageError(f"{path}: expected a folder or nothing, got a file")
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if MANIFEST_FILE in names:
        raise UsageError(f"{path} is a run folder already; continue it with --resume")
    if any(name not in ours and not name.endswith(".tmp") for name in names):
        raise UsageError(f"{path}: expected a new or empty folder, it holds other files")


def _safe(name: str) -> str:
    """A name that stays inside its folder: no slash, no dot first, not too long."""
    if not _SAFE_NAME.fullmatch(name):
        raise UsageError(f"expected a name that is safe as a file name, got {name!r}")
    return name


def _without_secrets(value: Any, masker: Masker, key: str = "") -> Any:
    if isinstance(value, Json):
        return value.to_json()
    if isinstance(value, Mapping):
        if key == "variables":
            return variables(value)
        return {name: _without_secrets(each, masker, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(entry, masker, key) for entry in value]
    return masker.text(value) if isinstance(value, str) and key in _FOR_PEOPLE else value


# --- what is damaged, and which verdicts stand --------------------------------------------------

# manifest.json -> scenario.yaml, cases.json
# verdict.json  -> case.json, outcome.json of each run -> spec.json, records, kept contents
#
# Each speaks for the files after it by their checksums. A pass stands on all of them: where one is
# not as it was, the answer is an error. Other answers are kept: damage after a case failed must not
# turn the failure into a question. Nothing is judged again, and nothing is changed.
DEFAULT_OUT = Path("out")
TRUSTING = ("passed", "skipped")
"""Outcomes that damage must not leave standing."""
_EARLIER = re.compile(r"\.attempt\d+$")


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found: `verdicts` of cases that have one, those of damaged passes being errors; ids
    of cases that are `unjudged`; `damage`, one line a file, its path in the folder first.

    `num_runs` counts those that the `num_cases` planned need.
    """

    verdicts: tuple[Verdict, ...]
    num_cases: int
    num_runs: int
    unjudged: tuple[str, ...]
    damage: tuple[str, ...]


def inspect(path: Path) -> Inspection:
    """Try every checksum of a run folder (`UsageError`: it is none, or damaged beyond reading)."""
    folder = RunFolder.open(path)
    verdicts, unjudged, runs = [], [], set[str]()
    damage: dict[tuple[Path, str], None] = {}  # runs are shared by cases, each file is named once
    for case in folder.cases:
        stored = folder.load_verdict(case.id)
        found = list(_damage(folder.case_folder(case.id), case, folder))
        damage |= dict.fromkeys(found)
        if stored is None:
            unjudged.append(case.id)
        else:
            verdicts.append(_standing(stored, found, folder.path))
        if not case.skip_reason:
            repeats = None if stored is None else stored.confirmation
            is_made = repeats is not None and repeats.outcome != "not_made"
            specs = [*runs_of(case), *(confirming_runs(case).values() if is_made else ())]
            runs |= {spec.key for spec in specs}
    # Questions of a search are in no plan.
    planned = {case.id for case in folder.cases}
    for place in sorted(each.parent for each in folder.path.glob(f"cases/*/{CASE_FILE}")):
        if place.name in planned or place.name.startswith(".") or _EARLIER.search(place.name):
            continue
        try:
            case = CaseSpec.from_json(read_object(place / CASE_FILE))
            if case.id != place.name:
                raise RecordError(f"is that of case {case.id}")
            damage |= dict.fromkeys(_damage(place, case, folder, is_question=True))
        except (OSError, RecordError, UsageError) as error:
            damage[place / CASE_FILE, told(error)] = None
    return Inspection(
        verdicts=tuple(verdicts), num_cases=len(folder.cases), num_runs=len(runs),
        unjudged=tuple(unjudged), damage=tuple(_line(folder.path, *each) for each in damage),
    )  # fmt: skip


def verified(folder: RunFolder, case: CaseSpec, stored: Verdict) -> Verdict:
    """The stored verdict, or an error if it is a pass and files that it rests on are damaged."""
    return _standing(stored, _damage(folder.case_folder(case.id), case, folder), folder.path)


def verified_alone(place: Path, case: CaseSpec, stored: Verdict) -> Verdict:
    """As `verified`, of a case's folder by itself, wherever it lies, with its three runs."""
    return stored if case.skip_reason else _standing(stored, _damage(place, case), place)


def _standing(stored: Verdict, found: Iterable[tuple[Path, str]], root: Path) -> Verdict:
    if stored.outcome not in TRUSTING or not (damage := list(found)):
        return stored
    # Whole folders that are gone were not made, as far as anybody can tell.
    gone = next(((path, why) for path, why in damage if not path.parent.exists()), None)
    what: What = "not_run" if gone is not None else "corrupt_record"
    message = f"{_line(root, *(gone or damage[0]))} ({VERDICT_FILE} says {stored.outcome})"
    return dataclasses.replace(stored, outcome="error", what=what, message=message, checks=())


def _line(root: Path, path: Path, why: str) -> str:
    return f"{path.relative_to(root)}: {why.removeprefix(f'{path.name}: ')}"


def _damage(
    place: Path, case: CaseSpec, folder: RunFolder | None = None, *, is_question: bool = False
) -> Iterator[tuple[Path, str]]:
    """Files of the case at `place` and of its runs that are not as they were, and what is wrong."""
    sums: dict[str, str] = {}
    verdict, why = find_verdict(place, case.id)
    if verdict is not None:
        sums = read_sealed(place / VERDICT_FILE)[1]
    elif place.exists() and ((place / VERDICT_FILE).exists() or not is_question):
        yield place / VERDICT_FILE, why
    yield from _case_file_damage(place / CASE_FILE, case, sums.get(CASE_FILE))
    if case.skip_reason:
        if verdict is not None and verdict.outcome == "passed":
            yield place / VERDICT_FILE, "says passed of a case that was to be skipped"
        return
    due = set(sums)
    if verdict is not None and verdict.outcome in TRUSTING:
        due |= {spec.key for spec in runs_of(case)}
    for spec, at in _runs_at(place, case, folder):
        path = at / OUTCOME_FILE
        outcome, why = read_outcome(at, spec)
        if outcome is not None:
            if spec.key in due and sums.get(spec.key) != checksum_of(path):
                yield path, "not the one that the verdict was made from"
        elif spec.key in due or path.exists():
            yield path, why if path.exists() or path.is_symlink() else "missing"
        yield from ((at / name, changed) for name, changed in changed_files(at).items())


def _runs_at(
    place: Path, case: CaseSpec, folder: RunFolder | None
) -> Iterator[tuple[RunSpec, Path]]:
    """Runs that the case may rest on, in the run folder and with the case."""
    legs = [(getattr(case, leg), place / leg) for leg in LEGS]
    if folder is not None:
        at = [(getattr(case, leg), folder.leg_folder(case, leg)) for leg in LEGS]
        more = (*runs_of(case)[len(LEGS) :], *confirming_runs(case).values())
        yield from (*at, *((spec, folder.run_folder(spec.key)) for spec in more))
        legs = [each for each in legs if place.exists() and each not in at]
    yield from legs


def _case_file_damage(
    path: Path, case: CaseSpec, checksum: str | None
) -> Iterator[tuple[Path, str]]:
    if checksum is None and not path.exists():
        return
    try:
        if CaseSpec.from_json(read_object(path)) != case:
            yield path, "not the case that was planned"
        elif checksum not in (None, checksum_of(path)):
            yield path, CHANGED
    except (OSError, RecordError) as error:
        yield path, told(error)


# --- where run folders and cases are ----------------------------------------------------------


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that is free."""
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def newest_run(out: Path = DEFAULT_OUT) -> Path:
    """The run folder made last under `out`, no search's (`UsageError`: there is none)."""
    made = [path for path in out.glob(f"*/{MANIFEST_FILE}")
            if path.is_file() and not path.with_name(SEARCH_FILE).exists()]  # fmt: skip
    if not made:
        raise UsageError(f"expected a run folder, {out}/ holds none")
    return max(made, key=lambda path: path.stat().st_mtime_ns).parent


def find_case(name: str, run: Path | None) -> tuple[Path, CaseSpec]:
    """A case's folder by its path, or by its id in a run folder (the newest by default).

    Raises:
        UsageError: there is no such case, or nothing at the path.
    """
    path = Path(name)
    if run is None and (path / CASE_FILE).is_file():
        return path, load_case(path).case
    is_path = len(path.parts) > 1 or (path / MANIFEST_FILE).is_file()  # no id has a slash
    if run is None and is_path:
        inside = ", ".join(sorted(f"cases/{each.name}" for each in path.glob("cases/*"))[:10])
        told = f"as {inside} in it" if inside else f"it has no {CASE_FILE}"
        raise UsageError(f"{shown(name)}: expected a case folder, {told}")
    folder = RunFolder.open(run or newest_run())
    ids = {each.id: each for each in folder.cases}
    if name not in ids:
        known = ", ".join([*ids][:10])
        raise UsageError(f"{shown(name)}: expected a case folder or id; {folder.path} has {known}")
    return folder.case_folder(name), ids[name]


def find_answer(name: str, run: Path | None) -> tuple[Path, CaseSpec, Verdict | None, str]:
    """A case's folder, the case, and its verdict; None and why if there is none that can be read.

    A pass stands on the files of its runs and on those that lie with the case, which are the same
    unless somebody copied them (`UsageError`: there is no such case).
    """
    place, case = find_case(name, run)
    stored, why = find_verdict(place, case.id)
    parent = place.absolute().parent.parent
    if stored is None:
        return place, case, None, why
    if (parent / MANIFEST_FILE).is_file() and place.name == case.id:
        folder = RunFolder.open(parent)
        for planned in (each for each in folder.cases if each.id == case.id):
            stored = verified(folder, planned, stored)
    return place, case, verified_alone(place, case, stored), ""


def bisect_line(case: CaseSpec, verdict: Verdict, place: Path) -> str:
    """The command that finds where the runs of a case in the folder `place` first differ, or ""."""
    parts = verdict.outcome == "failed" or verdict.what == "nondeterministic_reference"
    is_found = parts and case.expect == "bitwise"
    return f"harness bisect {shlex.quote(str(place))}" if is_found else ""

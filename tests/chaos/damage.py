"""Every kind of damage to every kind of file of a run folder, and what may come of it.

good folder -> copy -> damage -> every other command that reads one, then harness check, report,
                                 run --resume, check

bytes     a disk, a copy or an editor did it; checksums are as they were
lines     the same, line by line, in a rank's records
places    files and folders that change places
hands     somebody changed what a file says, its checksum too: only judging again can tell
harmless  nothing that a verdict rests on
"""

import hashlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.history.ledger import History
from harness.records import ExitCode
from harness.store.files import MAX_FILE_BYTES, checksum_of
from tests.chaos import good
from tests.chaos.good import rewrite

Damage = Callable[[Path, random.Random], Path]
"""Damages a run folder; the file that it changed."""
Where = Callable[[Path], Path]
Lines = list[bytes]
Plain = list[dict[str, Any]]
CASE = "dp2-attn"
NUM_FLIPS = 12


def run_of(leg: str, name: str = "") -> Where:
    """The run of a leg of the case, or a file of it."""

    def where(folder: Path) -> Path:
        runs = json.loads((folder / "cases" / CASE / "verdict.json").read_bytes())["runs"]
        return folder / "runs" / str(runs[leg]) / name

    return where


def in_case(name: str, case: str = CASE) -> Where:
    return lambda folder: folder / "cases" / case / name


FILES: dict[str, Where] = {
    "manifest": lambda folder: folder / "manifest.json",
    "scenario": lambda folder: folder / "scenario.yaml",
    "cases": lambda folder: folder / "cases.json",
    "spec": run_of("candidate", "spec.json"), "outcome": run_of("candidate", "outcome.json"),
    "reference": run_of("reference", "rank0.jsonl"), "control": run_of("control", "rank1.jsonl"),
    "candidate": run_of("candidate", "rank1.jsonl"),
    "verdict": in_case("verdict.json"), "case": in_case("case.json"),
}  # fmt: skip
NOT_EVIDENCE = ("spec", "case")
"""Files that no verdict rests on: a run's key says what it was, the plan what the case is."""

# --- bytes ------------------------------------------------------------------------------------


def of_bytes(
    change: Callable[[bytearray, random.Random], bytes | bytearray],
) -> Callable[..., object]:
    return lambda path, rng: path.write_bytes(change(bytearray(path.read_bytes()), rng))


def _flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _zeros(data: bytearray, rng: random.Random) -> bytearray:
    """What journals leave of a block that never reached the disk."""
    start = rng.randrange(max(len(data) - 16, 1))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    return data


def _a_link(path: Path, rng: random.Random) -> None:
    """To its own contents, somewhere else."""
    elsewhere = path.with_name(f".{path.name}.elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def anew(make: Callable[[Path], object]) -> Callable[..., object]:
    """Something else in its place."""

    def change(path: Path, rng: random.Random) -> None:
        path.unlink()
        make(path)

    return change


BYTES: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": of_bytes(_flip), "zeros": of_bytes(_zeros), "a_link": _a_link,
    "truncate": of_bytes(lambda data, rng: data[: rng.randrange(len(data))]),
    "empty": of_bytes(lambda data, rng: b""), "missing": lambda path, rng: path.unlink(),
    "a_folder": anew(Path.mkdir), "a_pipe": anew(os.mkfifo),
    "utf16": of_bytes(lambda data, rng: data.decode().encode("utf-16")),
    "latin": of_bytes(lambda data, rng: bytes(data).replace(b"a", b"\xe4", 1)),
    # More than a file may have, of which a file system stores next to nothing.
    "huge": lambda path, rng: os.truncate(path, MAX_FILE_BYTES + 1),
    "nested": of_bytes(lambda data, rng: b'{"a":' * 100_000),
}  # fmt: skip

# --- lines ------------------------------------------------------------------------------------


def of_lines(change: Callable[[Lines, random.Random], Lines]) -> Damage:
    """A change of the candidate's lines."""

    def damage(folder: Path, rng: random.Random) -> Path:
        path = FILES["candidate"](folder)
        lines = path.read_bytes().splitlines(keepends=True)
        path.unlink()  # a new file: the sealed case keeps the old one, as after a copy
        path.write_bytes(b"".join(change(lines, rng)))
        return path

    return damage


def in_step(**changes: Any) -> Damage:
    """Values of one step of the candidate, as an editor that knows no checksum changes them."""

    def change(lines: Lines, rng: random.Random) -> Lines:
        place = rng.randrange(2, len(lines) - 1)  # past start and initial
        plain = json.loads(lines[place])
        assert set(changes) <= set(plain)
        lines[place] = json.dumps(plain | changes).encode() + b"\n"
        return lines

    return of_lines(change)


OTHER_LOSS = {"bits": "40000001", "value": 2.000000238418579}
LINES: dict[str, Damage] = {
    "duplicated": of_lines(lambda ls, rng: [*ls[:3], ls[2], *ls[3:]]),
    "step_gone": of_lines(lambda ls, rng: [*ls[:2], *ls[3:]]),
    "steps_reordered": of_lines(lambda ls, rng: [*ls[:2], ls[3], ls[2], *ls[4:]]),
    "start_gone": of_lines(lambda ls, rng: ls[1:]), "end_gone": of_lines(lambda ls, rng: ls[:-1]),
    "end_first": of_lines(lambda ls, rng: [ls[-1], *ls[:-1]]),
    "step_after_end": of_lines(lambda ls, rng: [*ls, ls[2]]),
    "junk_after_end": of_lines(lambda ls, rng: [*ls, b"\x00\xff\xfe"]),
    "blank_line": of_lines(lambda ls, rng: [*ls[:2], b"\n", *ls[2:]]),
    "last_line_cut": of_lines(lambda ls, rng: [*ls[:-1], ls[-1][:-1]]),
    "carriage_returns": of_lines(lambda ls, rng: [line[:-1] + b"\r\n" for line in ls]),
    "two_files_in_one": of_lines(lambda ls, rng: ls * 2),
    "other_version": of_lines(
        lambda ls, rng: [ls[0].replace(b'"schema":1', b'"schema":2'), *ls[1:]]),
    "twice_the_key": of_lines(lambda ls, rng: [*ls[:2], b'{"step":9,' + ls[2][1:], *ls[3:]]),
    "peak_smaller": in_step(peak_bytes=1), "slower": in_step(step_s=9.0),
    "infinite": in_step(step_s=float("inf")), "a_bool": in_step(live_bytes=True),
    "huge_number": in_step(live_bytes=10**400), "negative_rank": in_step(rank=-1),
    "no_digest": in_step(digests={}), "nonfinite_told": in_step(nonfinite={"grads": ["w"]}),
    "value_not_of_bits": in_step(loss={"bits": "40000000", "value": 3.0}),
    "other_loss": in_step(loss=OTHER_LOSS),
}  # fmt: skip

# --- places -----------------------------------------------------------------------------------


def swapped(first: Where, second: Where) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        one, two, aside = first(folder), second(folder), folder / "aside"
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        return one

    return damage


def copied(source: Where, target: Where) -> Damage:
    """One file, or folder, in place of another."""

    def damage(folder: Path, rng: random.Random) -> Path:
        old, path = source(folder), target(folder)
        if old.is_dir():
            shutil.rmtree(path)
            return Path(shutil.copytree(old, path))
        path.unlink()
        return Path(shutil.copy(old, path))

    return damage


def gone(*places: Where) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        paths = [place(folder) for place in places]
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return paths[0]

    return damage


PLACES: dict[str, Damage] = {
    "ranks_swapped": swapped(run_of("candidate", "rank0.jsonl"), FILES["candidate"]),
    "legs_swapped": swapped(run_of("candidate"), run_of("reference")),
    "records_of_legs_swapped": swapped(run_of("candidate", "rank0.jsonl"), FILES["reference"]),
    "control_is_reference": copied(run_of("reference"), run_of("control")),
    "records_of_reference": copied(run_of("reference", "rank1.jsonl"), FILES["control"]),
    "rank_copied": copied(run_of("candidate", "rank0.jsonl"), FILES["candidate"]),
    "outcome_of_other": copied(run_of("reference", "outcome.json"), FILES["outcome"]),
    "verdict_of_other": copied(in_case("verdict.json", "dp2-full_iteration"), FILES["verdict"]),
    "verdict_for_case": copied(FILES["case"], FILES["verdict"]),
    "run_gone": gone(run_of("candidate")),
    "runs_gone": gone(lambda folder: folder / "runs", in_case("reference")),
    "extra_rank": lambda folder, rng: Path(
        shutil.copy(FILES["candidate"](folder), run_of("candidate", "rank7.jsonl")(folder))),
}  # fmt: skip
MENDED = ("verdict_of_other", "verdict_for_case")
"""Places that hold no verdict of the case: `--resume` gives it one, from records that are whole."""

# --- hands ------------------------------------------------------------------------------------


def in_records(change: Callable[[Plain], object], *wheres: Where) -> Damage:
    """Change the records of ranks, and their checksums in the outcome of the run with them."""

    def damage(folder: Path, rng: random.Random) -> Path:
        path = folder
        for where in wheres or (FILES["candidate"],):
            path = where(folder)
            plain = [json.loads(line) for line in path.read_bytes().splitlines()]
            change(plain)
            lines = [json.dumps(values, sort_keys=True, separators=(",", ":")) for values in plain]
            path.unlink()
            path.write_text("\n".join(lines) + "\n")
            outcome = path.with_name("outcome.json")
            files = json.loads(outcome.read_bytes())["files"]
            rewrite(outcome, {"files": files | {path.name: checksum_of(path)}})
        return path

    return damage


def in_object(**objects: dict[str, Any]) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        for name, changes in objects.items():
            rewrite(FILES[name](folder), changes)
        return FILES[name](folder)

    return damage


def in_plan(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the case in the plan, and the checksums of plan and manifest."""

    def damage(folder: Path, rng: random.Random) -> Path:
        path, manifest = folder / "cases.json", folder / "manifest.json"
        plain = json.loads(path.read_bytes())
        change(next(case for case in plain["cases"] if case["id"] == CASE))
        path.write_text(json.dumps(plain))
        files = json.loads(manifest.read_bytes())["files"]
        files["cases.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
        rewrite(manifest, {"files": files})
        return path

    return damage


def step(**changes: Any) -> Callable[[Plain], None]:
    return lambda plain: plain[3].update(changes)


def start(**changes: Any) -> Callable[[Plain], None]:
    return lambda plain: plain[0].update(changes)


ENDED_WELL = {
    "what": "", "message": "", "culprit_rank": None,
    "ranks": [{"rank": r, "code": 0, "killed_by_harness": False} for r in range(2)],
}  # fmt: skip
FORGED = {"outcome": "passed", "what": "", "message": "every check said yes", "difference": None}
ERROR = {"kind": "error", "rank": 1, "step": 2, "what": "crashed", "type": "E", "message": "m",
         "traceback": "", "blames": None}  # fmt: skip
GOOD_LOSS = {"bits": "40000000", "value": 2.0}
ELSEWHERE = "w2-eager-r0-000000000000"
RECORDS: dict[str, Callable[[Plain], object]] = {
    "step_cut": lambda plain: plain.pop(2),
    "last_step_cut": lambda plain: (plain.pop(4), plain[-1].update(steps=3)),
    "reordered": lambda plain: plain.insert(2, plain.pop(3)),
    "other_rank": lambda plain: [values.update(rank=0) for values in plain],
    "other_run": start(run=ELSEWHERE), "other_schema": start(schema=2),
    "smaller_world": start(world_size=1), "other_environment": start(
        environment={"fingerprint": {}}),
    "no_tensors": lambda plain: plain[0]["tensors"].update(weights=[]),
    "loss_differs": step(loss=OTHER_LOSS), "nan_told": step(nonfinite={"grads": ["w"]}),
    "nan_in_loss": step(loss={"bits": "7fc00000", "value": None}),
    "more_memory": lambda plain: plain[-1].update(peak_bytes=1 << 40),
    "no_replays": lambda plain: plain[-1].update(replays=0),
    "error_too": lambda plain: plain.insert(4, ERROR),
}  # fmt: skip
OBJECTS: dict[str, dict[str, dict[str, Any]]] = {
    "outcome_crashed": {"outcome": {"what": "crashed", "message": "it says so"}},
    "outcome_code": {"outcome": {"ranks": [{"rank": 0, "code": 1}, {"rank": 1, "code": 0}]}},
    "outcome_twice": {"outcome": {"ranks": [{"rank": 0, "code": 0}] * 2}},
    "outcome_other_key": {"outcome": {"key": ELSEWHERE}},
    "manifest_newer": {"manifest": {"schema": 99}},
    "manifest_bool": {"manifest": {"schema": True}},
}
PLANS: dict[str, Callable[[dict[str, Any]], object]] = {
    "world_of_a_billion": lambda case: case["candidate"].update(world_size=10**9),
    "world_of_one": lambda case: case["candidate"].update(world_size=1),
    "reference_itself": lambda case: case.update(candidate=case["reference"]),
    "unsafe_id": lambda case: case.update(id="../../../etc"),
    "skipped_in_plan": lambda case: case.update(skip_reason="not today"),
    "no_checks": lambda case: case.update(checks={}),
    "unknown_check": lambda case: case.update(checks={"vibes": {}}),
}
IN_PASSED: dict[str, Damage] = {
    **{name: in_records(change) for name, change in RECORDS.items()},
    **{name: in_object(**objects) for name, objects in OBJECTS.items()},
    **{name: in_plan(change) for name, change in PLANS.items()},
    "outcome_removed_verdict_kept": gone(FILES["outcome"]),
}
IN_CRASHED: dict[str, Damage] = {
    "outcome_forged": in_object(outcome=ENDED_WELL),
    "both_forged": in_object(outcome=ENDED_WELL, verdict=FORGED),
}
IN_NAN: dict[str, Damage] = {
    "nan_not_told": in_records(
        step(nonfinite={}), *(run_of("candidate", f"rank{rank}.jsonl") for rank in range(2))),
    "nan_replaced": in_records(step(loss=GOOD_LOSS, nonfinite={})),
}  # fmt: skip

# --- harmless ---------------------------------------------------------------------------------


def done(where: Where, act: Callable[[Path], object]) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        path = where(folder)
        act(path)
        return path

    return damage


def written(where: Where, data: bytes) -> Damage:
    return done(where, lambda path: path.write_bytes(data))


def dated(where: Where, unix_s: int) -> Damage:
    return done(where, lambda path: os.utime(path, (unix_s, unix_s)))


def attempt(folder: Path) -> Path:
    run = run_of("candidate")(folder)
    return run.with_name(f"{run.name}.attempt0")


HARMLESS: dict[str, Damage] = {
    "future_mtime": dated(FILES["candidate"], 32503680000),
    "past_mtime": dated(FILES["verdict"], 1),
    "stderr_gone": written(run_of("candidate", "rank0.stderr"), b"\xff"),
    "note_beside": written(lambda folder: folder / "notes.txt", b"mine"),
    "lock_left": written(lambda folder: folder / "lock", b"process 1 on elsewhere\n"),
    "half_written": written(lambda folder: folder / ".manifest.json.77.tmp", b"{"),
    "created_in_the_future": in_object(manifest={"created": "9999-12-31T23:59:59+00:00"}),
    "created_nonsense": in_object(manifest={"created": "\x00\ud800 tomorrow"}),
    "ended_in_the_future": in_object(outcome={"started_unix_s": 1e300, "wall_s": 1e18}),
    "ended_before_time": in_object(outcome={"started_unix_s": -1e300, "wall_s": -5.0}),
    "attempt_is_a_file": written(attempt, b""),
}

# --- the corpus -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One damaged folder.

    Attributes:
        name: kind of damage, and the file.
        base: which good folder it is made from.
        damage: what is done; None for a file that cannot be opened.
        denied: that file, by its name in `FILES`.
        may_pass: whether records and outcomes are still those of a pass.
        mends: whether `--resume` judges again, over records that are whole.
        named: whether a line must name the damaged file.
    """

    name: str
    base: str = "passed"
    damage: Damage | None = None
    denied: str = ""
    may_pass: bool = False
    mends: bool = False
    named: bool = True


def specimens() -> Iterator[Specimen]:
    """All of them, in a fixed order."""
    for file in FILES:
        of_file = partial(Specimen, may_pass=file in NOT_EVIDENCE, mends=file == "verdict")
        for kind in BYTES:
            for number in range(NUM_FLIPS if kind == "flip" else 1):
                suffix = f"#{number}" if kind == "flip" else ""
                yield of_file(name=f"{kind}:{file}{suffix}", damage=partial(_to_file, kind, file))
        yield of_file(name=f"denied:{file}", denied=file)
    for group, base, damages in (
        ("lines", "passed", LINES), ("places", "passed", PLACES), ("hands", "passed", IN_PASSED),
        ("forged over a NaN", "nan", IN_NAN), ("forged over a crash", "crashed", IN_CRASHED),
        ("harmless", "passed", HARMLESS),
    ):  # fmt: skip
        for name, damage in damages.items():
            yield Specimen(
                name=f"{group}:{name}", base=base, damage=damage, mends=name in MENDED,
                named=False, may_pass=group == "harmless",
            )  # fmt: skip


def _to_file(kind: str, file: str, folder: Path, rng: random.Random) -> Path:
    path = FILES[file](folder)
    BYTES[kind](path, rng)
    return path


def copy(source: Path, target: Path) -> Path:
    """A copy in which files that are links of each other still are."""
    seen: dict[int, str] = {}

    def copy_file(old: str, new: str) -> None:
        number = os.stat(old).st_ino  # noqa: PTH116 - shutil hands out strings
        if number in seen:
            os.link(seen[number], new)
        else:
            seen[number] = new
            shutil.copy2(old, new)

    shutil.copytree(source, target, copy_function=copy_file)
    return target


def examine(specimen: Specimen, base: Path, folder: Path) -> list[str]:
    """What is wrong with how the harness takes a specimen, in words; empty if nothing is.

    Args:
        specimen: what to do to the copy.
        base: the good folder that it is made from.
        folder: where to put the copy.
    """
    copy(base, folder)
    if specimen.damage is None:
        path = FILES[specimen.denied](folder)
        with good.denied(frozenset({path})):
            return [*_judged(specimen, folder, path)]
    path = specimen.damage(folder, random.Random(zlib.crc32(specimen.name.encode())))
    return [*_judged(specimen, folder, path)]


def _read(specimen: Specimen, folder: Path) -> Iterator[str]:
    """What other readers make of it: no traceback, and no pass shown, merged or recorded."""
    merged, database = folder.with_name("merged"), folder.with_name("history")
    again = folder.with_name("again")
    for args in (
        ("show", CASE, str(folder), "--json"), ("show", str(folder / "cases" / CASE)),
        ("compare", str(folder), str(folder)), ("merge", str(folder), "--out", str(merged)),
        ("history", "--add", str(folder), "--history", str(database)),
        ("rerun", CASE, str(folder), "--out", str(again), "--no-history"),
    ):  # fmt: skip
        code, out, err = good.harness(*args)
        if code == ExitCode.INTERNAL or "Traceback" in out + err:
            yield f"{args[0]}: exit code {code}: {err.strip()[-300:]}"
        # Who makes all checksums fit, makes a pass: `show` judges nothing again.
        believed = "--json" in args and out.startswith("{") and specimen.named
        passed = believed and (json.loads(out)["verdict"] or {}).get("outcome") == "passed"
        # What cannot be opened here may be in the folder that it is linked into.
        merged_well = args[0] == "merge" and code == ExitCode.PASSED and not specimen.denied
        if not specimen.may_pass and (passed or merged_well):
            yield f"{args[0]}: passed"
    if database.exists() and specimen.named and not specimen.may_pass:
        told = (case for entry in History.open(database).entries() for case in entry.cases)
        if any(case.case_id == CASE and case.outcome == "passed" for case in told):
            yield "history: passed"
    for made in (merged, again, database):
        shutil.rmtree(made, ignore_errors=True)


def _judged(specimen: Specimen, folder: Path, path: Path) -> Iterator[str]:
    # Each reader takes the checksum of a huge file several times.
    if not specimen.name.startswith("huge:"):
        yield from _read(specimen, folder)
    for number, command in enumerate((("check",), ("report",), ("run", "--resume"), ("check",))):
        may_pass = specimen.may_pass or (specimen.mends and number >= 2)
        code, out, err = good.harness(*command, str(folder))
        words = " ".join(command)
        if code == ExitCode.INTERNAL or "Traceback" in out + err:
            yield f"{words}: exit code {code}: {err.strip()[-300:]}"
        # Reports of a failed case are built, and that is all that this exit code says.
        built = command == ("report",) and specimen.base != "passed"
        if not may_pass and not built and code == ExitCode.PASSED:
            yield f"{words}: passed"
        if number == 0 and specimen.named and path.name not in err:
            yield f"check does not name {path.name}: {(out + err).strip()[:300]}"
    code, out, _ = good.harness("check", str(folder), "--json")
    if not (specimen.may_pass or specimen.mends or code in (ExitCode.USAGE, ExitCode.INTERNAL)):
        found = {verdict["case_id"]: verdict["outcome"] for verdict in json.loads(out)["verdicts"]}
        if found.get(CASE) == "passed":
            yield "its verdict is passed"


def damage_folders(root: Path, word: str = "") -> Iterator[str]:
    """Examine all specimens, or those whose name holds a word; what was taken wrongly."""
    chosen = [specimen for specimen in specimens() if word in specimen.name]
    bases = {kind: good.make(root / f"good-{kind}", kind) for kind in {s.base for s in chosen}}
    for number, specimen in enumerate(chosen):
        folder = root / f"{number:03}"
        yield from (f"{specimen.name}: {why}"
                    for why in examine(specimen, bases[specimen.base], folder))  # fmt: skip
        shutil.rmtree(folder)
    print(f"  {len(chosen)} damaged folders", flush=True)  # noqa: T201

"""The corpus: every kind of damage to every kind of file, and what may come of it.

good folder -> copy -> damage -> every other command that reads one, then harness check, report,
                                 run --resume, check
"""

import contextlib
import json
import os
import random
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.records import ExitCode
from tests.damaged_folders import good, hands, kinds
from tests.damaged_folders.kinds import CASE, Damage

NOT_EVIDENCE = ("spec", "case")
"""Files that no verdict rests on: a run's key says what it was, the plan what the case is."""


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One damaged folder.

    Attributes:
        name: kind of damage, and the file.
        base: which good folder it is made from.
        damage: what is done; None for a file that cannot be opened.
        denied: that file, by its name in `kinds.FILES`.
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
    for file in kinds.FILES:
        for kind in kinds.BYTES:
            for number in range(kinds.NUM_FLIPS if kind == "flip" else 1):
                suffix = f"#{number}" if kind == "flip" else ""
                yield Specimen(
                    name=f"{kind}:{file}{suffix}",
                    damage=_to_file(kind, file),
                    may_pass=file in NOT_EVIDENCE,
                    mends=file == "verdict",
                )
        yield Specimen(
            name=f"denied:{file}",
            denied=file,
            may_pass=file in NOT_EVIDENCE,
            mends=file == "verdict",
        )
    groups: tuple[tuple[str, str, dict[str, Damage]], ...] = (
        ("lines", "passed", kinds.LINES),
        ("places", "passed", kinds.PLACES),
        ("hands", "passed", hands.IN_PASSED),
        ("forged over a NaN", "nan", hands.IN_NAN),
        ("forged over a crash", "crashed", hands.IN_CRASHED),
    )
    for group, base, damages in groups:
        for name, damage in damages.items():
            yield Specimen(
                name=f"{group}:{name}",
                base=base,
                damage=damage,
                mends=name in kinds.MENDED,
                named=False,
            )
    for name, damage in hands.HARMLESS.items():
        yield Specimen(name=f"harmless:{name}", damage=damage, may_pass=True, named=False)


def _to_file(kind: str, file: str) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        path = kinds.FILES[file](folder)
        kinds.BYTES[kind](path, rng)
        return path

    return damage


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
        path = kinds.FILES[specimen.denied](folder)
        with good.denied(frozenset({path})):
            return _examine(specimen, folder, path)
    path = specimen.damage(folder, random.Random(zlib.crc32(specimen.name.encode())))
    return _examine(specimen, folder, path)


def _read(specimen: Specimen, folder: Path) -> Iterator[str]:
    """What other readers make of it: no traceback, and no pass shown, merged or recorded."""
    merged, database = folder.with_name("merged"), folder.with_name("history.sqlite")
    for args in (
        ("show", CASE, str(folder), "--json"), ("show", str(folder / "cases" / CASE)),
        ("compare", str(folder), str(folder)), ("merge", str(folder), "--out", str(merged)),
        ("history", "--add", str(folder), "--history", str(database)),
        ("rerun", CASE, str(folder), "--out", str(folder.with_name("again")), "--no-history"),
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
        with contextlib.closing(sqlite3.connect(database)) as connection:
            if ("passed",) in connection.execute(
                "SELECT outcome FROM cases WHERE case_id = ?", (CASE,)
            ).fetchall():
                yield "history: passed"
    shutil.rmtree(merged, ignore_errors=True)
    shutil.rmtree(folder.with_name("again"), ignore_errors=True)
    database.unlink(missing_ok=True)


def _examine(specimen: Specimen, folder: Path, path: Path) -> list[str]:
    # Each reader takes the checksum of a huge file several times.
    wrong = [] if specimen.name.startswith("huge:") else [*_read(specimen, folder)]
    for number, command in enumerate((("check",), ("report",), ("run", "--resume"), ("check",))):
        may_pass = specimen.may_pass or (specimen.mends and number >= 2)
        code, out, err = good.harness(*command, str(folder))
        words = " ".join(command)
        if code == ExitCode.INTERNAL or "Traceback" in out + err:
            wrong.append(f"{words}: exit code {code}: {err.strip()[-300:]}")
        # Reports of a failed case are built, and that is all that this exit code says.
        built = command == ("report",) and specimen.base != "passed"
        if not may_pass and not built and code == ExitCode.PASSED:
            wrong.append(f"{words}: passed")
        if number == 0 and specimen.named and path.name not in err:
            wrong.append(f"check does not name {path.name}: {(out + err).strip()[:300]}")
    code, out, _ = good.harness("check", str(folder), "--json")
    if not (specimen.may_pass or specimen.mends) and code not in (
        ExitCode.USAGE,
        ExitCode.INTERNAL,
    ):
        found = {verdict["case_id"]: verdict["outcome"] for verdict in json.loads(out)["verdicts"]}
        if found.get(CASE) == "passed":
            wrong.append("its verdict is passed")
    return wrong

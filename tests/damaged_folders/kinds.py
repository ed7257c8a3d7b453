"""Kinds of damage: each changes a good run folder, and names the file that it changed.

bytes     a disk, a copy or an editor did it; checksums are as they were
lines     the same, line by line, in a rank's records
hands     somebody changed what a file says, its checksum too
harmless  nothing that a verdict rests on
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.store.files import MAX_FILE_BYTES

Damage = Callable[[Path, random.Random], Path]
CASE = "dp2-attn"


def run_of(folder: Path, leg: str) -> Path:
    """The run of a leg of the case."""
    cases = json.loads((folder / "cases.json").read_bytes())["cases"]
    outcomes = json.loads((folder / "cases" / CASE / "verdict.json").read_bytes())["runs"]
    assert any(case["id"] == CASE for case in cases)
    return folder / "runs" / str(outcomes[leg])


FILES: dict[str, Callable[[Path], Path]] = {
    "manifest": lambda folder: folder / "manifest.json",
    "scenario": lambda folder: folder / "scenario.yaml",
    "cases": lambda folder: folder / "cases.json",
    "spec": lambda folder: run_of(folder, "candidate") / "spec.json",
    "outcome": lambda folder: run_of(folder, "candidate") / "outcome.json",
    "reference": lambda folder: run_of(folder, "reference") / "rank0.jsonl",
    "control": lambda folder: run_of(folder, "control") / "rank1.jsonl",
    "candidate": lambda folder: run_of(folder, "candidate") / "rank1.jsonl",
    "verdict": lambda folder: folder / "cases" / CASE / "verdict.json",
    "case": lambda folder: folder / "cases" / CASE / "case.json",
}


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def missing(path: Path, rng: random.Random) -> None:
    path.unlink()


def a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path, rng: random.Random) -> None:
    """To its own contents, somewhere else."""
    elsewhere = path.with_name(f".{path.name}.elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def a_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def utf16(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes().decode().encode("utf-16"))


def latin(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes().replace(b"a", b"\xe4", 1))


def huge(path: Path, rng: random.Random) -> None:
    """More than a file may have, of which a file system stores next to nothing."""
    os.truncate(path, MAX_FILE_BYTES + 1)


def nested(path: Path, rng: random.Random) -> None:
    path.write_bytes(b'{"a":' * 100_000)


def zeros(path: Path, rng: random.Random) -> None:
    """What journals leave of a block that never reached the disk."""
    size = path.stat().st_size
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(size - 16, 1))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


BYTES: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": flip, "truncate": truncate, "empty": empty, "missing": missing, "a_folder": a_folder,
    "a_link": a_link, "a_pipe": a_pipe, "utf16": utf16, "latin": latin, "huge": huge,
    "nested": nested, "zeros": zeros,
}  # fmt: skip
NUM_FLIPS = 12


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def _put(path: Path, lines: list[bytes]) -> Path:
    # A new file: the sealed case keeps the old one, as after a copy.
    path.unlink()
    path.write_bytes(b"".join(lines))
    return path


def changed_lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Damage:
    """A change of the candidate's lines."""

    def damage(folder: Path, rng: random.Random) -> Path:
        path = FILES["candidate"](folder)
        return _put(path, change(lines_of(path), rng))

    return damage


def in_step(**changes: Any) -> Damage:
    """Values of one step of the candidate, as an editor that knows no checksum changes them."""

    def change(lines: list[bytes], rng: random.Random) -> list[bytes]:
        place = rng.randrange(2, len(lines) - 1)  # past start and initial
        plain = json.loads(lines[place])
        assert set(changes) <= set(plain)
        lines[place] = json.dumps(plain | changes).encode() + b"\n"
        return lines

    return changed_lines(change)


def _swap(lines: list[bytes], i: int, j: int) -> list[bytes]:
    lines[i], lines[j] = lines[j], lines[i]
    return lines


LINES: dict[str, Damage] = {
    "duplicated": changed_lines(lambda lines, rng: [*lines[:3], lines[2], *lines[3:]]),
    "step_gone": changed_lines(lambda lines, rng: [*lines[:2], *lines[3:]]),
    "steps_reordered": changed_lines(lambda lines, rng: _swap(lines, 2, 3)),
    "start_gone": changed_lines(lambda lines, rng: lines[1:]),
    "end_gone": changed_lines(lambda lines, rng: lines[:-1]),
    "end_first": changed_lines(lambda lines, rng: [lines[-1], *lines[:-1]]),
    "step_after_end": changed_lines(lambda lines, rng: [*lines, lines[2]]),
    "junk_after_end": changed_lines(lambda lines, rng: [*lines, b"\x00\xff\xfe"]),
    "blank_line": changed_lines(lambda lines, rng: [*lines[:2], b"\n", *lines[2:]]),
    "last_line_cut": changed_lines(lambda lines, rng: [*lines[:-1], lines[-1][:-1]]),
    "carriage_returns": changed_lines(lambda ls, rng: [line[:-1] + b"\r\n" for line in ls]),
    "two_files_in_one": changed_lines(lambda lines, rng: lines * 2),
    "other_version": changed_lines(
        lambda lines, rng: [lines[0].replace(b'"schema":1', b'"schema":2'), *lines[1:]]
    ),
    "twice_the_key": changed_lines(
        lambda lines, rng: [*lines[:2], b'{"step":9,' + lines[2][1:], *lines[3:]]
    ),
    "peak_smaller": in_step(peak_bytes=1),
    "slower": in_step(step_s=9.0),
    "infinite": in_step(step_s=float("inf")),
    "a_bool": in_step(live_bytes=True),
    "huge_number": in_step(live_bytes=10**400),
    "negative_rank": in_step(rank=-1),
    "no_digest": in_step(digests={}),
    "nonfinite_told": in_step(nonfinite={"grads": ["w"]}),
    "value_not_of_bits": in_step(loss={"bits": "40000000", "value": 3.0}),
    "other_loss": in_step(loss={"bits": "40000001", "value": 2.000000238418579}),
}


def swapped(first: Callable[[Path], Path], second: Callable[[Path], Path]) -> Damage:
    """Two files, or folders, change places."""

    def damage(folder: Path, rng: random.Random) -> Path:
        one, two = first(folder), second(folder)
        aside = folder / "aside"
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        return one

    return damage


def copied(source: Callable[[Path], Path], target: Callable[[Path], Path]) -> Damage:
    """One file, or folder, in place of another."""

    def damage(folder: Path, rng: random.Random) -> Path:
        source_path, path = source(folder), target(folder)
        if source_path.is_dir():
            shutil.rmtree(path)
            shutil.copytree(source_path, path)
        else:
            path.unlink()
            shutil.copy(source_path, path)
        return path

    return damage


def in_run(leg: str, name: str = "") -> Callable[[Path], Path]:
    return lambda folder: run_of(folder, leg) / name


def _gone(*paths: Path) -> Path:
    for path in paths:
        shutil.rmtree(path)
    return paths[0]


def _extra_rank(folder: Path, rng: random.Random) -> Path:
    run = run_of(folder, "candidate")
    return Path(shutil.copy(run / "rank1.jsonl", run / "rank7.jsonl"))


PLACES: dict[str, Damage] = {
    "ranks_swapped": swapped(
        in_run("candidate", "rank0.jsonl"), in_run("candidate", "rank1.jsonl")
    ),
    "legs_swapped": swapped(in_run("candidate"), in_run("reference")),
    "records_of_legs_swapped": swapped(
        in_run("candidate", "rank0.jsonl"), in_run("reference", "rank0.jsonl")
    ),
    "control_is_reference": copied(in_run("reference"), in_run("control")),
    "records_of_reference": copied(
        in_run("reference", "rank1.jsonl"), in_run("control", "rank1.jsonl")
    ),
    "rank_copied": copied(in_run("candidate", "rank0.jsonl"), in_run("candidate", "rank1.jsonl")),
    "outcome_of_other": copied(
        in_run("reference", "outcome.json"), in_run("candidate", "outcome.json")
    ),
    "verdict_of_other": copied(
        lambda folder: folder / "cases" / "dp2-full_iteration" / "verdict.json", FILES["verdict"]
    ),
    "verdict_for_case": copied(FILES["case"], FILES["verdict"]),
    "run_gone": lambda folder, rng: _gone(run_of(folder, "candidate")),
    "runs_gone": lambda folder, rng: _gone(folder / "runs", folder / "cases" / CASE / "reference"),
    "extra_rank": _extra_rank,
}
MENDED = ("verdict_of_other", "verdict_for_case")
"""Places that hold no verdict of the case: `--resume` gives it one, from records that are whole."""

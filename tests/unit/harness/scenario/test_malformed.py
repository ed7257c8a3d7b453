"""Every malformed scenario of the corpus: its one line, and its exit code.

`malformed.txt` has one mistake a scenario, each under a line `=== NAME LINE` with what is to be
said, `@` for the file's path; `options.txt` those of options. A line that ends in `legal values:`
goes on with names that may grow.
"""

import os
import re
import shlex
import time
from pathlib import Path

import pytest

from harness.cli import main
from tests.support.fake_engine import Capsys

HERE = Path(__file__).parent
_, *CORPUS = re.split(r"^=== ", (HERE / "malformed.txt").read_text(), flags=re.MULTILINE)
NOTHING_LEFT = ("exclude_everything",)


def complaint(capsys: Capsys, *args: str | Path) -> tuple[int, str]:
    """Exit code of `harness run` and the only line that it says."""
    began = time.process_time()
    code = main(["run", *map(str, args)])
    assert time.process_time() - began < 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err.rstrip("\n")


def fits(err: str, expected: str) -> bool:
    """Whether a line is as expected, or begins so where it goes on with legal values."""
    whole = f"harness: {expected}"
    return err.startswith(whole) if expected.endswith("legal values:") else err == whole


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.split()[0])
def test_one_clear_line(entry: str, tmp_path: Path, capsys: Capsys) -> None:
    """A mistake costs one line with file, line, key, expected, got; exit 4, or 5 for no case."""
    head, _, text = entry.partition("\n")
    name, _, expected = head.partition(" ")
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    (tmp_path / "train.py").touch()
    code, err = complaint(capsys, path, "--dry-run")
    assert fits(err, expected.replace("@", str(path))), err
    assert code == (5 if name in NOTHING_LEFT else 4)


@pytest.mark.parametrize("line", (HERE / "options.txt").read_text().splitlines())
def test_a_wrong_option_is_named(line: str, capsys: Capsys) -> None:
    """An error in an option names the option, not the file, and never goes unnoticed."""
    options, _, expected = line.partition("\t")
    path = f"{HERE / 'legal.yaml'}::the_reference_is_no_case"
    code, err = complaint(capsys, path, *shlex.split(options))
    assert (code, fits(err, expected)) == (4, True), err


MONSTERS: dict[str, tuple[bytes, str]] = {
    "huge": ((b"# " + b"x" * 999_997 + b"\n") * 30, "file: expected at most 1,000,000 bytes"),
    "laughs": (b"a0: &a0 [x, x]\na1: &a1 [*a0, *a0]\n", "a0: expected values written out"),
    "deep": (b"base: " + b"[" * 900_000, "nesting"),
    "mappings": (b"{a: " * 200_000, "expected at most 20 levels"),
    "wide": (b"name: [" + b"1, " * 300_000 + b"]", "expected at most 20,000 values, got more"),
    "binary": (b"name: case\nwhy: \x80\n", ":2: file: expected UTF-8 text, got byte 0x80"),
    "nul": (b"name: case\nwhy: a\0b\n", ":2: file: expected text, got the control character 0x00"),
    "random": (bytes((i * 7919 + i // 251) % 256 for i in range(500_000)),
               "file: expected UTF-8 text, got byte"),
    "long number": (b"seed: " + b"9" * 5000, "syntax: expected a finite decimal number"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MONSTERS, "missing", "folder", "pipe"])
def test_monsters_cost_one_line_and_no_time(name: str, tmp_path: Path, capsys: Capsys) -> None:
    """30 MB, anchors, deep and wide files, no file, a pipe: one line, exit 4, under 2 s."""
    path = tmp_path / "it.yaml"
    data, said = MONSTERS.get(name, (b"", "file: expected a scenario file, got "))
    if data:
        path.write_bytes(data)
    elif name == "folder":
        path = tmp_path / "missing" / ".." / "gone.yaml"
    elif name == "pipe":
        os.mkfifo(path)
    code, err = complaint(capsys, path)
    assert code == 4
    assert err.startswith(f"harness: {path}:")
    assert said in err

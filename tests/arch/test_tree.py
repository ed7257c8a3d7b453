"""Rules of the tree that no linter knows: sizes, names, and what no file may mention."""

import ast
import re
import time
from pathlib import Path

import pytest

from tests import pace
from tests.arch.tree import PACKAGES, ROOT, code_files, settings, syntax, text_files

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
JUNK_DRAWERS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
# Spelled in pieces, so that this file does not mention them either.
NOT_OURS = re.compile(
    r"(?<![\w.])/(?:wor" r"k|home/\w+|root)/"
    r"|\.\./shar" r"ed\b"
    r"|\b(?:cla" r"ude|anthro" r"pic|chat" r"gpt|copi" r"lot)\b",
    re.IGNORECASE,
)  # fmt: skip


def relative(path: Path) -> str:
    """Path for a message."""
    return str(path.relative_to(ROOT))


def test_files_are_short() -> None:
    """A file over the limit is two files."""
    lengths = {relative(p): len(p.read_text().splitlines()) for p in code_files()}
    assert {name: n for name, n in lengths.items() if n >= MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    """A function over the limit does two things."""
    long = {
        f"{relative(path)}:{node.lineno} {node.name}": lines
        for path in code_files()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) >= MAX_FUNCTION_LINES
    }
    assert long == {}


def test_no_junk_drawers() -> None:
    """A module is named after what it holds."""
    assert [relative(p) for p in code_files() if JUNK_DRAWERS & set(p.stem.split("_"))] == []


def test_nothing_mentions_a_machine() -> None:
    """No absolute path of one machine."""
    files = text_files()
    assert len(files) > 50
    found = [
        f"{relative(path)}:{number}: {line.strip()[:80]}"
        for path in files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if NOT_OURS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see /wor" "k/main", True), ("in /ro" "ot/x", True), ("fix issue 12", False),
        ("../shar" "ed/design.md", True), ("tests/work/x", False), ("PR 4231", False),
    ],
)  # fmt: skip
def test_the_pattern_finds_what_it_should(text: str, found: bool) -> None:
    """The rule above is not green by a broken pattern."""
    assert bool(NOT_OURS.search(text)) == found


def test_unit_tests_mirror_the_source() -> None:
    """A test file under tests/unit stands where the package that it tests stands."""
    folders = {p.parent for p in (ROOT / "tests" / "unit").rglob("test_*.py")}
    packages = {f: ROOT / f.relative_to(ROOT / "tests" / "unit") for f in folders}
    assert folders
    assert [relative(f) for f, p in packages.items() if not (p / "__init__.py").is_file()] == []


def test_tests_hold_no_packages() -> None:
    """Tests are imported by path: an __init__.py there would change module names."""
    assert [relative(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_ci_runs_the_commands_of_the_readme() -> None:
    """What the README tells people to type is what CI types."""
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    make = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "bench"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", make, re.MULTILINE)
    assert {"lint", "test"} <= set(re.findall(r"^make (\w+)$", ci, re.MULTILINE))


def test_the_packages_are_all_installed() -> None:
    """The wheel holds the three packages, and the report's templates."""
    find = settings()["tool"]["setuptools"]["packages"]["find"]
    assert find["include"] == [f"{name}*" for name in PACKAGES]
    assert list((ROOT / "reports" / "templates").iterdir())


# --- clocks that somebody sets are for stamps; durations are taken by the one that only runs ------


def test_the_wall_clock_is_for_stamps() -> None:
    """`time.time()` is read for values that are named after the epoch, and for nothing else."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in code_files()
        if path.relative_to(ROOT).parts[0] in ("harness", "fsdp_core", "reports")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "time.time(" in line and "unix_s" not in line
    ]
    assert found == []


# --- the ruler of time limits ---------------------------------------------------------------------


def test_paces_are_work_over_the_pace_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that slows down slows the ruler too; the least of several runs counts."""
    clock = 0.0
    speed = iter([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 9.0, 1.0])  # of each piece, in order

    def take(seconds: float) -> None:
        nonlocal clock
        clock += seconds * next(speed)

    monkeypatch.setattr(time, "process_time", lambda: clock)
    monkeypatch.setattr(pace, "one_pace", lambda: take(0.1))
    ratios = [pace.in_paces(lambda: take(0.5), times=1) for _ in range(3)]
    assert ratios == pytest.approx([5.0, 5.0, 45.0])
    speed = iter([1.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    assert pace.in_paces(lambda: take(0.5), times=2) == pytest.approx(5.0)

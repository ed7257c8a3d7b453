"""Contracts of harness.typed: what a terminal shows can be typed where it is read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.typed import program, typed

ROOT = Path(__file__).parents[3]
SCRIPT = f"#!{sys.executable}\nfrom harness.typed import program\nprint(program())\n"


def printed(*command: str, path: str = "/usr/bin", cwd: Path) -> str:
    """What a command prints that was started there."""
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=True,
        env={"PATH": path, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a command in `.venv/bin`, as `make demo` leaves it."""
    script = tmp_path / ".venv/bin/harness"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    script.chmod(0o755)
    return tmp_path


def test_a_command_is_shown_as_it_was_started(tree: Path) -> None:
    """By its path, by its name where PATH has it, or by the interpreter that was typed."""
    bin_ = str(tree / ".venv/bin")
    assert printed(".venv/bin/harness", cwd=tree) == ".venv/bin/harness\n"
    assert printed(f"{bin_}/harness", path=f"{bin_}:/usr/bin", cwd=tree) == "harness\n"
    python = os.path.relpath(sys.executable, tree)
    told = printed(python, "-m", "harness", "list", "-h", cwd=tree)
    assert " ".join(told.split()).startswith(f"Usage: {python} -m harness list [OPTIONS]")


def test_only_the_program_of_a_command_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that merely speak of it stay, and so does everything after the first word."""
    monkeypatch.setattr(sys, "argv", ["a b/harness", "run"])
    assert program() == "'a b/harness'"
    assert typed("harness run harness.yaml") == "'a b/harness' run harness.yaml"
    for text in ("harnesses", "run harness run", ""):
        assert typed(text) == text


def test_elsewhere_it_is_the_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pytest, or in somebody's own program."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert program() == "harness"

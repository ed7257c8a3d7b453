"""Run the commands of the examples, and compare what is printed with what the page has.

    python -m tests.cookbook                 all of docs/DEBUGGING.md (six minutes on two cores)
    python -m tests.cookbook -k two_layouts  only sections with a command that has this word
    python -m tests.cookbook --write         put what is printed now where it has changed

All commands run in one new folder, in a terminal of 100 columns; times, paths, names of runs,
commits and addresses may differ (`transcript.py`). Exit codes: 0 as the page says, 1 some lines
changed, which are told with the place of their command, 4 usage.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.cookbook.terminal import run_in_terminal
from tests.cookbook.transcript import Step, changes, read_steps

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "DEBUGGING.md"
Changed = list[tuple[Step, list[str]]]


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cookbook")
    parser.add_argument("folder", nargs="?", type=Path, help="to work in")
    parser.add_argument("-k", default="", metavar="WORD", help="only sections with this word")
    parser.add_argument("--write", action="store_true", help="put what has changed into the page")
    asked = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    chosen = _chosen(page, asked.k)
    if not chosen:
        sys.stderr.write(f"-k {asked.k}: expected a word of a command, got one of none\n")
        return 4
    changed: Changed = []
    for step, printed in follow(chosen, asked.folder or Path(tempfile.mkdtemp(prefix="cookbook-"))):
        changed.append((step, printed))
        if asked.write:
            # At once, of the page as it was: a run that is killed leaves what it has seen.
            PAGE.write_text(_written(page, changed), encoding="utf-8")
    sys.stdout.write(f"{len(chosen)} commands, {len(changed)} printed something else\n")
    return 1 if changed else 0


def _chosen(page: str, word: str) -> list[Step]:
    """Steps of the sections of which a command has the word."""
    heads = [number for number, line in enumerate(page.splitlines(), 1) if line.startswith("## ")]
    sections: dict[int, list[Step]] = {}
    for step in read_steps(page):
        sections.setdefault(sum(head < step.line for head in heads), []).append(step)
    return [
        step for steps in sections.values() if any(word in step.command for step in steps)
        for step in steps
    ]  # fmt: skip


def follow(steps: list[Step], folder: Path) -> Iterator[tuple[Step, list[str]]]:
    """Run commands one after the other; those that printed something else, with their screen."""
    folder = folder.resolve()
    (folder / "scenarios").mkdir(parents=True)
    (folder / "scenarios" / "cookbook.yaml").symlink_to(ROOT / "scenarios" / "cookbook.yaml")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for step in steps:
        sys.stdout.write(f"{PAGE.name}:{step.line}: {step.command}\n")
        sys.stdout.flush()
        # Relative, as somebody would see them who works at the top of the tree.
        text = run_in_terminal(step.command, folder, environment).replace(f"{folder}/", "")
        printed = text.splitlines()
        if told := changes(step.shown, printed):
            sys.stdout.write("".join(f"    {line}\n" for line in told))
            yield step, printed


def _written(page: str, changed: Changed) -> str:
    """The page with what was printed, the last first: lines before it stay where they are."""
    lines = page.splitlines()
    for step, printed in reversed(changed):
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(printed)).strip("\n")
        lines[step.first : step.last] = text.splitlines()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

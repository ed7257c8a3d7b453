"""Put known bugs back, one at a time, in a copy of the tree, and see the test of each fail.

    python -m tests.known_bugs.put_back [NAME ...]

A test that passes with its bug is no test. Exit codes: 0 all fail, 1 some pass or cannot run, 4 no
such bug.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.known_bugs.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
COPIED = ("fsdp_core", "harness", "reports", "benchmarks", "scenarios", "tests", "pyproject.toml")
TESTS_FAILED = 1  # pytest's exit code, others are of runs that tested nothing
TIMEOUT_S = 300.0


def put_back(bug: Bug, tree: Path) -> None:
    """Change the copy.

    Raises:
        ValueError: the right text is not there exactly once.
    """
    path = tree / bug.file
    text = path.read_text()
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name}: expected its text once in {bug.file}: {bug.right!r}")
    path.write_text(text.replace(bug.right, bug.wrong))


def run_test(bug: Bug, tree: Path) -> tuple[int, str]:
    """pytest's exit code with the bug, and the first line that says what is wrong."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", bug.test]
    ran = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": str(tree)},
    )  # fmt: skip
    errors = [line[1:].strip() for line in ran.stdout.splitlines() if line.startswith("E  ")]
    return ran.returncode, errors[0] if errors else ran.stdout.strip()[-200:]


def main(names: Sequence[str]) -> int:
    """Try each; the exit code."""
    unknown = set(names) - {bug.name for bug in BUGS}
    if unknown:
        print(f"no such bug: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 4
    survivors = 0
    for bug in BUGS:
        if names and bug.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name in COPIED:
                source, target = ROOT / name, Path(folder, name)
                if source.is_dir():
                    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(source, target)
            put_back(bug, Path(folder))
            code, said = run_test(bug, Path(folder))
        is_caught = code == TESTS_FAILED
        survivors += not is_caught
        print(f"{'caught' if is_caught else f'SURVIVED ({code})':8} {bug.name}: {bug.symptom}")
        print(f"         {bug.test}\n         {said[:160]}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Put slips into what gives the verdict or shards, one at a time, and print which test sees each.

    python -m tests.mutations [-k NAME] [--jobs N]

Each job has a copy of the tree. The tests named are run without any slip first: they must pass.
Exit codes: 0, 1 a slip survived, does not apply or broke an import, 2 tests fail without one,
4 nothing is named so.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.sharding import SHARDING

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "harness",
    "fsdp_core",
    "reports",
    "tests",
    "scenarios",
    "benchmarks",
    "docs",
    "pyproject.toml",
)
TIMEOUT_S = 600.0
SURVIVED = "survived"
ALL = [*MUTATIONS, *SHARDING]


class Answer(NamedTuple):
    """What became of one slip; `seen_by` is a test's id, or why none has seen it."""

    name: str
    is_seen: bool
    seen_by: str
    seconds: float


def applied(mutation: Mutation, root: Path = ROOT) -> str:
    """The text of the file with the slip in it.

    Raises:
        ValueError: the text to replace does not occur exactly once, or a test is missing.
    """
    text = (root / mutation.file).read_text()
    if (found := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file}: expected the text once, found it {found} times")
    for test in mutation.tests:
        path, _, name = test.partition("::")
        if f"def {name}" not in (root / path).read_text():
            raise ValueError(f"there is no {test}")
    mutated = text.replace(mutation.old, mutation.new)
    compile(mutated, mutation.file, "exec")
    return mutated


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("-k", default="", metavar="NAME", help="names or files that contain this")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(arguments)
    chosen = [each for each in ALL if asked.k in each.name or asked.k in each.file]
    if not chosen:
        _tell(f"no mutation is named {asked.k}")
        return 4
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(asked.jobs):
            trees.put(_copy(Path(folder) / str(number)))
        code, failing, seconds = _run_tests(
            trees.queue[0], sorted({test for each in chosen for test in each.tests})
        )
        _tell(f"without a slip: exit code {code} {failing}, {seconds:.0f} s")
        if code:
            return 2
        with ThreadPoolExecutor(asked.jobs) as pool:
            answers = list(pool.map(lambda each: _answer(each, trees), chosen))
    return _summary(answers)


def _copy(tree: Path) -> Path:
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=ignored)
        else:
            shutil.copy2(ROOT / part, tree / part)
    return tree


def _answer(mutation: Mutation, trees: "queue.Queue[Path]") -> Answer:
    tree = trees.get()
    try:
        answer = _in_tree(mutation, tree)
    except (ValueError, SyntaxError) as error:
        answer = Answer(mutation.name, False, f"does not apply: {error}", 0.0)
    finally:
        shutil.copy2(ROOT / mutation.file, tree / mutation.file)
        trees.put(tree)
    _tell(_row(answer))
    return answer


def _in_tree(mutation: Mutation, tree: Path) -> Answer:
    mutated = applied(mutation, tree)
    # A new file: bytecode of the old one is known by its time.
    (tree / mutation.file).unlink()
    (tree / mutation.file).write_text(mutated)
    code, failing, seconds = _run_tests(tree, mutation.tests)
    if code == 1 and failing:
        return Answer(mutation.name, True, failing, seconds)
    why = SURVIVED if code == 0 else f"no answer: exit code {code}"
    return Answer(mutation.name, False, why, seconds)


def _run_tests(tree: Path, tests: Iterable[str]) -> tuple[int, str, float]:
    """Exit code of pytest, the first test that fails, seconds."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--tb=no", "-rfE", *tests]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    try:
        ended = subprocess.run(
            [*command, "-p", "no:cacheprovider"], cwd=tree, env=environ, timeout=TIMEOUT_S,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, "", time.monotonic() - started
    lines = [line.split(" ", 2) for line in ended.stdout.splitlines()]
    failing = next((line[1] for line in lines if line[0] in ("FAILED", "ERROR") and line[1:]), "")
    return ended.returncode, failing.rpartition("/")[2], time.monotonic() - started


def _summary(answers: Sequence[Answer]) -> int:
    width = max(len(answer.name) for answer in answers)
    sys.stdout.writelines(_row(answer, width) + "\n" for answer in answers)
    unseen = [answer.name for answer in answers if not answer.is_seen]
    seconds = sum(answer.seconds for answer in answers)
    _tell(f"{len(answers)} mutations, {len(answers) - len(unseen)} seen, {seconds:.0f} s of tests")
    if unseen:
        _tell(f"not seen: {', '.join(unseen)}")
    return 1 if unseen else 0


def _row(answer: Answer, width: int = 0) -> str:
    return f"{answer.name:{width}}  {answer.seen_by}  {answer.seconds:.1f} s"


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

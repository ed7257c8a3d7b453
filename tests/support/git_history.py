"""Synthetic histories: real repositories, made in one go, whose commits pass, fail or do not build.

programs     each commit changes `program/work.py`; `python -m program` ends with 1 where the fault
             is in, and with a SyntaxError, of which `python -m compileall` knows first, where a
             commit does not build
harnesses    the same of a package that answers `python -m harness rerun` at once, as ours does
"""

import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

MAIN = "import sys\nfrom program.work import fails\nsys.exit(fails())\n"
RIGHT, WRONG, BROKEN = (
    "def fails():\n    return False\n",
    "def fails():\n    return True\n",
    "def fails(:\n",
)
SOMETIMES = "import random\ndef fails():\n    return random.random() < {rate}\n"
ANSWER = """\
import json, os, sys
from pathlib import Path
from harness.work import fails
def main():
    assert sys.argv[1] == "rerun", sys.argv
    if log := os.environ.get("ASKED_OF_HISTORY"):
        with open(log, "a") as file:
            file.write(" ".join(sys.argv[1:]) + "\\n")
    case = json.loads((Path(sys.argv[2]) / "case.json").read_text())
    answer = {"case_id": case["id"], "message": "as the history has it"}
    bad = fails()
    answer |= {"outcome": "failed" if bad else "passed", "what": "diverged" if bad else ""}
    print(json.dumps({"verdicts": [answer]}))
    sys.exit(int(bad))
"""
Files = Mapping[str, str]


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def make_history(root: Path, commits: Sequence[Files]) -> list[str]:
    """A repository with these files, commit by commit, oldest first; their hashes."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    stream = []
    for number, files in enumerate(commits):
        message = f"Change {number}"
        stream += [
            "commit refs/heads/main",
            f"committer Somebody <somebody@example.com> {1_700_000_000 + number} +0000",
            f"data {len(message)}",
            message,
        ]
        for path, text in files.items():
            stream += [f"M 100644 inline {path}", f"data {len(text.encode())}", text]
    subprocess.run(
        ["git", "-C", str(root), "fast-import", "--quiet"],
        input="\n".join(stream) + "\n", text=True, check=True, capture_output=True,
    )  # fmt: skip
    git(root, "reset", "--hard", "--quiet")
    return git(root, "rev-list", "--reverse", "main").split()


def programs(
    number: int, first_bad: int, broken: Collection[int] = (), wrong: str = WRONG
) -> list[Files]:
    """A commit that passes and `number` after it, bad from `first_bad` (1 to `number`) on."""
    start = {"program/__init__.py": "", "program/__main__.py": MAIN}
    return [
        {
            **(start if place == 0 else {}),
            "program/work.py": f"# change {place}\n"
            + (BROKEN if place in broken else wrong if place >= first_bad else RIGHT),
        }
        for place in range(number + 1)
    ]


def harnesses(
    number: int, first_bad: int, broken: Collection[int] = (), wrong: str = WRONG
) -> list[Files]:
    """As `programs`, of a harness that makes no runs; with `ASKED_OF_HISTORY` it logs its words."""
    start = {
        "fsdp_core/__init__.py": "", "harness/__init__.py": "", "harness/cli.py": ANSWER,
        "harness/__main__.py": "from harness.cli import main\nmain()\n",
    }  # fmt: skip
    return [
        {
            **(start if place == 0 else {}),
            "harness/work.py": files["program/work.py"],
        }
        for place, files in enumerate(programs(number, first_bad, broken, wrong))
    ]

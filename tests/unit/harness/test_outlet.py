"""Standard streams that are closed, have no reader, or are full."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRINTS = """
import sys
from harness.__main__ import secure_streams
secure_streams()
from harness.errors import Infrastructure
file = open({path!r}, "w")
try:
    for number in range(20000):
        print("line", number)
    print("told", file=sys.stderr)
    sys.stdout.flush()
except Infrastructure as error:
    print(error, file=file)
    code = 6
else:
    code = 7
print(sys.stdin.read() == "", file.fileno() > 2, file=file)
file.close()
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("| true", 7, ""), ("2>&1 | head -1", 7, ""), ("<&- >&- 2>&-", 7, ""),
        ("> /dev/full", 6, "cannot write to stdout: No space left on device\n"),
    ],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_command(
    shell: str, code: int, said: str, tmp_path: Path
) -> None:
    """Whoever reads: only a device that refuses is an error; no file takes a stream's place."""
    path = tmp_path / "file"
    (tmp_path / "prints.py").write_text(PRINTS.format(path=str(path)))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} prints.py {shell}"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    assert path.read_text() == f"{said}True True\n"


def test_an_error_that_nobody_can_be_told_keeps_its_exit_code() -> None:
    """Exit code 1 would be a verdict."""
    words = f"{sys.executable} -m harness list lost.yaml 2> /dev/full"
    environ = {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(["bash", "-c", words], env=environ, check=False).returncode == 4

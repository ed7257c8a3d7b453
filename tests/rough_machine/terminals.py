"""Live progress and tables on terminals of two widths, without colours, and where there is none."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

from rich.cells import cell_len

from tests.rough_machine.harness_process import run, scenario, start

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def seen(folder: Path, columns: int, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and all that a harness sends to a terminal that is so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    name = f"run-{columns}-{'-'.join(env) or 'plain'}"
    clean = {"COLUMNS": "", "LINES": "", "TERM": "xterm-256color"} | env
    process = start(
        "run", str(scenario(folder)), "--out", name, "--no-history",
        cwd=folder, env=clean, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    data = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                data += os.read(ours, 1 << 16)
            except OSError:
                break
    os.close(ours)
    return process.wait(), data.decode(errors="replace")


def widths(folder: Path) -> list[str]:
    """No line is wider than the terminal, but a path, which must stay one piece to be copied."""
    wrong = []
    for columns in (80, 120):
        for env in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
            code, text = seen(folder, columns, dict(env))
            if code:
                wrong.append(f"{columns} {env}: exit code {code}: {text[-300:]}")
            for line in re.split(r"[\r\n]+", ESCAPE.sub("", text)):
                if cell_len(line.rstrip()) > columns and "run-" not in line:
                    wrong.append(f"{columns} {env}: {cell_len(line)} columns: {line!r}")
            if "NO_COLOR" in env and any(
                re.search(r"(?:^|;)(?:3\d|9\d)", found[2:-1]) for found in COLOUR.findall(text)
            ):
                wrong.append(f"{columns} {env}: coloured")
            if "TERM" in env and "\x1b" in text:
                wrong.append(f"{columns} {env}: escapes on a dumb terminal")
    code, out, err = run("run", "rough.yaml", "--out", "piped", "--no-history", cwd=folder)
    if code or "\x1b" in out + err:
        wrong.append(f"pipe: exit code {code}, escapes: {chr(27) in out + err}")
    return wrong

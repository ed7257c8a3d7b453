"""A command in a terminal of its own, and what its screen has in the end."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping
from pathlib import Path

COLUMNS, ROWS = 100, 50
_CONTROL = re.compile(
    r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()].|\x1b."
)


def run_in_terminal(command: str, cwd: Path, environment: Mapping[str, str]) -> str:
    """Run a command line under bash; the screen after it, without what was drawn over."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    sized = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=cwd, env={**environment, **sized},
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    printed = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux's end of file, once nobody holds the other side
            break
        if not part:
            break
        printed += part
    os.close(ours)
    process.wait()
    return screen(printed.decode(errors="replace"))


def screen(printed: str) -> str:
    """What is on a screen that scrolls for ever, after all that was printed: text, no colours."""
    lines, row, column = [""], 0, 0
    place = 0
    while place < len(printed):
        if (control := _CONTROL.match(printed, place)) is not None:
            place = control.end()
            if control[2] == "A":
                row = max(0, row - int(control[1] or 1))
            elif control[2] == "K":
                lines[row] = "" if control[1] == "2" else lines[row][:column]
            continue
        sign = printed[place]
        place += 1
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif sign >= " ":
            line = lines[row].ljust(column)
            lines[row] = line[:column] + sign + line[column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)

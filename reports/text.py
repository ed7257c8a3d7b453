"""Text from scenarios, records and logs, made fit to be shown: hostile until it has been here."""

import re
from pathlib import Path

from harness.store.files import read_tail

MAX_CHARS, MAX_LINE_CHARS = 2000, 300
MAX_TAIL_LINES, TAIL_BYTES = 40, 16_384

# Bounded, so that a megabyte of unfinished escapes costs no more than a megabyte of anything else.
_TERMINAL = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef"
    "\ufeff\ufffe\uffff\ud800-\udfff]"
)
REPLACEMENT = "\ufffd"
DIGEST = re.compile(r"\b([0-9a-f]{4})[0-9a-f]{24}(?:[0-9a-f]{8})?([0-9a-f]{4})\b")
"""A digest of a tensor, or a row of taps: 32 or 40 digits."""


def short(text: str) -> str:
    """`text` with every digest cut to its first and last 4 digits."""
    return DIGEST.sub(r"\1…\2", text)


def well_formed(text: str) -> str:
    """`text` with lone surrogates replaced, everything else as it was."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def clean(text: str, limit: int = MAX_CHARS) -> str:
    """`text` without control characters, terminal escapes, direction overrides, lone surrogates.

    At most `limit` characters are kept; how many were cut is said at the end.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    kept = text if len(text) <= limit else text[:limit]
    shown = _UNFIT.sub(REPLACEMENT, _TERMINAL.sub("", kept))
    if len(kept) < len(text):
        shown += f"… ({len(text) - len(kept)} more characters)"
    return shown


def one_line(text: str, limit: int = MAX_CHARS) -> str:
    """`clean` with every run of white space as one space."""
    return " ".join(clean(text, limit).split())


def tail(path: Path) -> str:
    """The last lines of a file, cleaned and clipped; empty if there is no plain file."""
    text = read_tail(path, TAIL_BYTES).decode("utf-8", "replace")
    lines = clean(text, TAIL_BYTES).rstrip().splitlines()
    return "\n".join(clean(line, MAX_LINE_CHARS) for line in lines[-MAX_TAIL_LINES:])

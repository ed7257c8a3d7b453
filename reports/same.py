"""Whether two run folders came to the same results: `report.json`, without what may vary.

Every format shows one `Report`, and report.json holds it. Of it the keys in `VARYING` are left out:
times, attempts, and what is known of the run as a whole; the run folder's path is replaced. An
interrupted and resumed run is the same as an undisturbed one if the rest is equal.
"""

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from harness.store.files import make_folder, write_atomic

PLACE = "RUN-FOLDER"
VARYING = ("run", "times", "attempts", "wall_s")
MAX_SHOWN_CHARS = 300


def normalised(path: Path, folder: Path) -> str:
    """The text of a report.json without what varies.

    Args:
        path: the file.
        folder: the run folder that it is of.
    """
    place = json.dumps(str(folder.absolute()))[1:-1]
    # A path that had to be quoted for the shell is the same place as one that had not.
    quoted = re.compile(rf"'{PLACE}([A-Za-z0-9_+=,@./-]*)'")
    text = quoted.sub(rf"{PLACE}\1", path.read_text("utf-8").replace(place, PLACE))
    return json.dumps(_without_varying(json.loads(text)), indent=1, sort_keys=True) + "\n"


def keep(text: str, place: Path) -> None:
    """Write a normalised report into the folder `place` (`Infrastructure`: the disk refused)."""
    make_folder(place)
    write_atomic(place / "report.json", text)


def differences(mine: str, other: str) -> tuple[str, ...]:
    """Where two normalised reports differ first, with both sides of it; () if they are equal."""
    if mine == other:
        return ()
    lines = zip_longest(mine.split("\n"), other.split("\n"), fillvalue="(no line)")
    number, (left, right) = next(
        (number, pair) for number, pair in enumerate(lines, start=1) if pair[0] != pair[1]
    )
    return (f"report.json: line {number}: {_short(left)!r} is {_short(right)!r} there",)


def _short(line: str) -> str:
    return line.strip()[:MAX_SHOWN_CHARS]


def _without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_varying(v) for k, v in value.items() if k not in VARYING}
    return [_without_varying(entry) for entry in value] if isinstance(value, list) else value

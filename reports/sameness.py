"""Whether two run folders came to the same results: their reports, without what may vary.

    a report as it lies there -> `normalise` -> its bytes, to be kept, or held against another's

An interrupted and resumed run is the same as one that nobody disturbed if these are equal: what
varies is times, places, earlier attempts and the history (`normalise` has the list).
"""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

from harness.store.files import make_folder, write_atomic
from reports.normalise import normalise

MAX_SHOWN_CHARS = 300


def normalised(built: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """The contents of report files, normalised, by file name.

    Args:
        built: the files, by format, as `reports.build` names them.
        folder: the run folder that they are of.
    """
    texts = {path.name: path.read_text("utf-8") for path in built.values()}
    return {name: normalise(name, text, folder.absolute()) for name, text in texts.items()}


def keep(texts: Mapping[str, str], place: Path) -> None:
    """Write normalised reports into the folder `place` (`Infrastructure`: the disk refused)."""
    make_folder(place)
    for name, text in texts.items():
        write_atomic(place / name, text)


def differences(mine: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each file that is not the same: where it differs first, and both sides of that."""
    return tuple(
        f"{name}: {_first(mine.get(name, ''), other.get(name, ''))}"
        for name in {**mine, **other}
        if mine.get(name) != other.get(name)
    )


def _first(mine: str, other: str) -> str:
    lines = zip_longest(mine.split("\n"), other.split("\n"), fillvalue="(no line)")
    number, (left, right) = next(
        (number, pair) for number, pair in enumerate(lines, start=1) if pair[0] != pair[1]
    )
    return f"line {number}: {_short(left)!r} is {_short(right)!r} there"


def _short(line: str) -> str:
    return line.strip()[:MAX_SHOWN_CHARS]

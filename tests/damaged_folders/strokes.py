"""Damage drawn at random: to bytes, lines, values, files and folders of a run folder.

bytes    as a disk, a copy or a text editor leaves them; checksums are as they were
values   one value of a JSON file, as somebody who knows no checksum changes it
sealed   the same with checksums made to fit; only what the other legs contradict
files    deleted, swapped, linked, in the wrong place, not files at all
"""

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.damaged_folders.hands import sealed_again
from tests.damaged_folders.kinds import Damage
from tests.damaged_folders.rewrite import rewrite

Edit = Callable[[bytes, random.Random], bytes]
MAX_BYTES = 1 << 20
"""Larger files were made by a stroke: they are neither read nor copied again."""
NEST = json.loads('{"a":' * 700 + "0" + "}" * 700)
ODD: tuple[Any, ...] = (
    NEST, None, True, False, 0, -1, 3, 10**30, 1e308, -0.0, "", "x", "passed", "..", "../../etc",
    "\ud800", "\x00", "x" * 100_000, [], [[]], {}, {"a": 1}, [None] * 3, float("nan"), float("inf"),
)  # fmt: skip


def files(folder: Path) -> list[Path]:
    """Plain files, in a fixed order; what was damaged before is damaged again, if it is one."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in found if path.stat().st_size < MAX_BYTES]


def _some(folder: Path, rng: random.Random, suffix: str = "") -> Path:
    return rng.choice([path for path in files(folder) if path.name.endswith(suffix)])


def _write(path: Path, data: bytes, rng: random.Random) -> Path:
    """In place, so that links of the file change with it, or as a new file."""
    if rng.random() < 0.5:
        path.unlink()
    path.write_bytes(data)
    return path


# --- bytes ------------------------------------------------------------------------------------


def _flips(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _noise(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.randbytes(rng.choice((1, 16, 512))) + data[start:]


def _without_a_part(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 64)) :]


def _zero_tail(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + bytes(len(data) - start)


def _digit(data: bytes, rng: random.Random) -> bytes:
    """One digit is another: what stays well-formed is the hardest to see."""
    places = [i for i, byte in enumerate(data) if byte in b"0123456789"]
    if not places:
        return data + b"7"
    place = rng.choice(places)
    return data[:place] + bytes([rng.choice(b"0123456789")]) + data[place + 1 :]


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Edit:
    return lambda data, rng: b"".join(change(data.splitlines(keepends=True) or [b"\n"], rng))


def _swapped(lines: list[bytes], rng: random.Random) -> list[bytes]:
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return lines


def _twice(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return [*lines, rng.choice(lines)] if rng.random() < 0.5 else lines * 2


def _gone(lines: list[bytes], rng: random.Random) -> list[bytes]:
    del lines[rng.randrange(len(lines))]
    return lines


def _other_key_first(lines: list[bytes], rng: random.Random) -> list[bytes]:
    """A key twice: readers that take the last see nothing, those that take the first do."""
    place = rng.randrange(len(lines))
    key = rng.choice((b"what", b"outcome", b"step", b"sha256", b"key", b"kind"))
    lines[place] = lines[place].replace(b"{", b'{"' + key + b'":"crashed",', 1)
    return lines


def _rather_deep(data: bytes, rng: random.Random) -> bytes:
    """JSON that decodes, and that whoever walks it by recursion cannot."""
    depth = rng.choice((70, 500, 900))
    nest = b":" + b"[" * depth + b"0" + b"]" * depth + rng.choice((b",", b"}"))
    return data.replace(b":0" + nest[-1:], nest, rng.choice((1, 2, 5)))


BYTES: dict[str, Edit] = {
    "flips": _flips, "noise": _noise, "without a part": _without_a_part, "zero tail": _zero_tail,
    "digit": _digit,
    "cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "empty": lambda data, rng: b"",
    "doubled": lambda data, rng: data * 2,
    "carriage returns": lambda data, rng: data.replace(b"\n", b"\r\n"),
    "byte order mark": lambda data, rng: b"\xef\xbb\xbf" + data,
    "latin": lambda data, rng: data.replace(b"e", b"\xe9", 1),
    "nan": lambda data, rng: data.replace(b"0.5", b"NaN", 1).replace(b":0,", b":NaN,", 1),
    "huge int": lambda data, rng: data.replace(b":0,", b":" + b"9" * 5000 + b",", 1),
    "deep": lambda data, rng: data.replace(b":0,", b":" + b"[" * 50_000 + b",", 1),
    "rather deep": _rather_deep,
    "lines swapped": _lines(_swapped), "line twice": _lines(_twice), "line gone": _lines(_gone),
    "lines reversed": _lines(lambda lines, rng: lines[::-1]),
    "key twice": _lines(_other_key_first),
}  # fmt: skip


# --- values -----------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON value."""
    if not isinstance(value, dict | list):
        return [path]
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    inner = [place for key, entry in pairs for place in _places(entry, (*path, key))]
    return [path, *inner] if path else inner


def _set_odd(plain: Any, rng: random.Random) -> None:
    places = _places(plain)
    if not places:
        return
    *path, last = rng.choice(places)
    for key in path:
        plain = plain[key]
    match rng.randrange(4):
        case 0 if isinstance(plain, dict):
            del plain[last]
        case 1 if isinstance(plain, dict):
            plain[f"{last}x"] = plain.pop(last)
        case _:
            plain[last] = rng.choice(ODD)


def value(folder: Path, rng: random.Random) -> Path:
    """An odd value somewhere in a file of one object, or in a line of records."""
    path = _some(folder, rng, rng.choice((".json", ".jsonl")))
    try:
        if path.suffix == ".json":
            plain = json.loads(path.read_bytes())
            _set_odd(plain, rng)
            return _write(path, json.dumps(plain).encode(), rng)
        lines = path.read_bytes().splitlines(keepends=True)
        place = rng.randrange(len(lines))
        record = json.loads(lines[place])
        _set_odd(record, rng)
        lines[place] = json.dumps(record).encode() + b"\n"
        return _write(path, b"".join(lines), rng)
    except (ValueError, RecursionError):
        return path


# --- sealed -----------------------------------------------------------------------------------

OTHER_BITS = {"bits": "3f800000", "value": 1.0}
IN_STEP: tuple[dict[str, Any], ...] = (
    {"loss": OTHER_BITS}, {"grad_norm": {"bits": "3f800000", "value": 1.0}},
    {"microbatch_losses": [OTHER_BITS]}, {"microbatch_losses": []},
    {"digests": {}}, {"step": 2}, {"step": 99}, {"step": -1}, {"rank": 1}, {"rank": 5},
    {"nonfinite": {"grads": ["w"]}},
    {"digests": dict.fromkeys(("grads", "weights", "optim", "rng"), "0" * 32)},
)  # fmt: skip
IN_START: tuple[dict[str, Any], ...] = (
    {"run": "w2-attn-r0-000000000000"}, {"rank": 5}, {"world_size": 1}, {"schema": 0},
    {"tensors": {}}, {"tensors": {"grads": [], "weights": [], "optim": [], "rng": []}},
    {"environment": {"fingerprint": {"torch": "y"}}},
)  # fmt: skip
IN_END: tuple[dict[str, Any], ...] = ({"rank": 5}, {"steps": 3}, {"steps": 0}, {"replays": -1})
IN_OUTCOME: tuple[dict[str, Any], ...] = (
    {"what": "hang"}, {"what": "killed"}, {"what": "interrupted"}, {"key": "w2-x"}, {"ranks": []},
    {"ranks": [{"rank": 0, "code": 0}, {"rank": 1, "code": -9}]},
    {"ranks": [{"rank": 0, "code": 0}, {"rank": 1, "code": None}]},
)  # fmt: skip


def sealed(folder: Path, rng: random.Random) -> Path:
    """Something that contradicts the other legs, or the plan, with checksums that fit."""
    path = _some(folder, rng, rng.choice((".jsonl", "outcome.json")))
    try:
        if path.suffix == ".json":
            rewrite(path, rng.choice(IN_OUTCOME))
            return path

        def change(plain: list[dict[str, Any]]) -> None:
            place = rng.choice((0, 1, 2, 3, 4, -1))
            edits = {0: IN_START, -1: IN_END}.get(place, IN_STEP)
            plain[place].update(rng.choice(edits))

        return sealed_again(path, change)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError):
        return path  # damaged before: there is nothing left to seal


# --- files ------------------------------------------------------------------------------------


def _swap_files(folder: Path, rng: random.Random) -> Path:
    """Two files of one name change places: between runs, cases, or a run and a case."""
    path = _some(folder, rng)
    others = [each for each in files(folder) if each.name == path.name and each != path]
    other = rng.choice(others or [path])
    one, two = path.read_bytes(), other.read_bytes()
    path.unlink()
    path.write_bytes(two)
    if rng.random() < 0.5:
        other.unlink(missing_ok=True)
        other.write_bytes(one)
    return path


def _linked(folder: Path, rng: random.Random) -> Path:
    """One file is a hard link of another."""
    path, other = _some(folder, rng), _some(folder, rng)
    if path.samefile(other):
        return path
    path.unlink()
    os.link(other, path)
    return path


def _instead(make: Callable[[Path], Any]) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        path = _some(folder, rng)
        path.unlink()
        make(path)
        return path

    return damage


def _folder_gone(folder: Path, rng: random.Random) -> Path:
    inner = sorted(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())
    path = rng.choice(inner or [folder / "none"])
    shutil.rmtree(path, ignore_errors=True)
    match rng.randrange(4):
        case 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        case 1:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(path.name)
        case 2:
            path.mkdir(parents=True, exist_ok=True)
        case _:
            pass
    return path


def _copy_of_a_run(folder: Path, rng: random.Random) -> Path:
    """Another run, or another case, under this one's name, or as an attempt of it."""
    room = folder / rng.choice(("runs", "cases"))
    names = sorted(path for path in room.glob("*") if path.is_dir()) if room.is_dir() else []
    if not names:
        return room
    source, target = rng.choice(names), rng.choice(names)
    if rng.random() < 0.5:
        target = target.with_name(f"{target.name}.attempt{rng.randrange(2)}")
    if source != target:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=True, ignore=_odd_files)
    return target


def _odd_files(folder: str, names: list[str]) -> set[str]:
    paths = [(name, (Path(folder) / name).lstat()) for name in names]
    return {name for name, at in paths if stat.S_ISFIFO(at.st_mode) or at.st_size > MAX_BYTES}


def _from_another_run(folder: Path, rng: random.Random) -> Path:
    """A file of a run folder with as many steps, of another seed, in the place of its like."""
    path = _some(folder, rng)
    inside = path.relative_to(folder)
    other = folder.parent / "other" / "run"
    likes = [each for each in files(other) if each.name == path.name]
    same = [each for each in likes if each.relative_to(other).parts[0] == inside.parts[0]]
    if same:
        path.unlink()
        shutil.copy(rng.choice(same), path)
    return path


FILES: dict[str, Damage] = {
    "deleted": _instead(lambda path: None),
    "a folder": _instead(lambda path: path.mkdir()),
    "a pipe": _instead(lambda path: os.mkfifo(path)),
    "a loop": _instead(lambda path: path.symlink_to(path.name)),
    "a link to nowhere": _instead(lambda path: path.symlink_to("/nowhere/at/all")),
    "a link to a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to passwd": _instead(lambda path: path.symlink_to("/etc/passwd")),
    "endless": _instead(lambda path: _sparse(path, 1 << 40)),
    "swapped": _swap_files, "linked": _linked, "folder gone": _folder_gone,
    "copy of a run": _copy_of_a_run, "of another run": _from_another_run,
}  # fmt: skip


def _sparse(path: Path, size: int) -> None:
    path.write_bytes(b"")
    os.truncate(path, size)


def in_bytes(folder: Path, rng: random.Random) -> Path:
    """One of `BYTES`, to any file."""
    path = _some(folder, rng)
    return _write(path, BYTES[rng.choice(sorted(BYTES))](path.read_bytes(), rng), rng)


def in_files(folder: Path, rng: random.Random) -> Path:
    """One of `FILES`."""
    return FILES[rng.choice(sorted(FILES))](folder, rng)


STROKES: dict[str, Damage] = {
    "bytes": in_bytes, "value": value, "sealed": sealed, "files": in_files,
}  # fmt: skip

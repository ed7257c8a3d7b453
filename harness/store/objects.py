"""Files that hold one JSON object, read so that whatever is in them is an object or one error."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness.codec import strict_loads
from harness.records import RecordError
from harness.store.checksum import KEY, without_checksum
from harness.store.files import read_plain

MAX_FILE_BYTES = 1 << 30


def told(error: Exception) -> str:
    """What is wrong with a file, with its name."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error)


def read_object(path: Path, *, sealed: bool = True) -> dict[str, Any]:
    """The object in a file, its checksum tried and taken off.

    Args:
        path: of the file.
        sealed: whether it must have one; a specification has not: its key is its checksum.

    Raises:
        OSError: no plain file, or one that cannot be read.
        RecordError: not an object, or changed since it was written.
    """
    plain = parsed(read_plain(path, MAX_FILE_BYTES), path.name)
    return plain if not sealed and KEY not in plain else without_checksum(plain, path.name)


def has_checksum(path: Path) -> bool:
    """Whether a file of one object has a checksum at all (`OSError`, `RecordError`: not one)."""
    return KEY in parsed(read_plain(path, MAX_FILE_BYTES), path.name)


def read_listed(path: Path, checksums: object) -> bytes:
    """A file whose checksum is in `checksums`, by its name.

    Raises:
        OSError: no plain file, or one that cannot be read.
        RecordError: changed since it was written.
    """
    data = read_plain(path, MAX_FILE_BYTES)
    listed = checksums.get(path.name) if isinstance(checksums, Mapping) else None
    if listed is None:
        raise RecordError(f"{path.name}: its checksum is gone")
    if listed != sha256(data).hexdigest():
        raise RecordError(f"{path.name}: changed since it was written: its checksum does not fit")
    return data


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """The object in the contents of file `name` (`RecordError`: there is none)."""
    try:
        # Not by itself: it would take other encodings for this one.
        plain = strict_loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name}: not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise RecordError(f"{name}: expected an object, got {type(plain).__name__}")
    return plain

"""One file: written whole or not at all, read if it is a plain one, damage noticed by a checksum.

A file of one object carries its own checksum, `{..., "sha256": of all other keys}`, and where it
speaks for other files, theirs by name under `files`. They tell damage, not forgery. A file without
one is damaged. Whatever the disk refuses is an `Infrastructure` error with the path and the reason.
"""

import errno
import fcntl
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import Infrastructure, UsageError
from harness.values import Json, RecordError, dumps, strict_loads

KEY, FILES_KEY = "sha256", "files"
MAX_FILE_BYTES = 1 << 30
CHANGED, GONE = "changed since it was written: its checksum does not fit", "its checksum is gone"


@contextmanager
def refusals(verb: str, path: Path) -> Iterator[None]:
    """What the disk refuses inside is an `Infrastructure` error."""
    try:
        yield
    except OSError as error:
        raise Infrastructure(f"cannot {verb} {path}: {error.strerror or error}") from error


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all, so that it outlives a power cut (or `Infrastructure`)."""
    with _written(path, text) as made:
        made.replace(path)


def write_once(path: Path, text: str) -> bool:
    """As `write_atomic` unless it is there; False if it is. One of several writers wins."""
    with _written(path, text) as made:
        try:
            os.link(made, path)
        except FileExistsError:
            return False
    return True


@contextmanager
def _written(path: Path, text: str | bytes) -> Iterator[Path]:
    # Unique among all machines that share the folder.
    made = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.{os.getpid()}.tmp")
    try:
        with refusals("write", path):
            with made.open("wb") as file:
                file.write(text.encode() if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
            yield made
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)  # makes the new name last
            finally:
                os.close(fd)
    finally:
        with suppress(OSError):
            made.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if need be (`Infrastructure`: the disk refused)."""
    with refusals("make folder", path):
        path.mkdir(parents=True, exist_ok=True)


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where links do not work."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Fill `target`, which may exist, with links to all files of `source` (or `Infrastructure`)."""
    with refusals("write", target):
        shutil.copytree(source, target, symlinks=True, copy_function=link_or_copy,
                        dirs_exist_ok=True)  # fmt: skip


# --- reading ----------------------------------------------------------------------------------


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read it, if it is one (`OSError`: a link, a pipe or a device).

    A link would bring any file into a report, a pipe keep its reader for ever.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
    return os.fdopen(fd, "rb")


def read_plain(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The contents of a file of at most `max_bytes` (`OSError`: longer, or as `open_plain`)."""
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            why = f"expected at most {max_bytes} bytes, got {size}"
            raise OSError(errno.EFBIG, why, str(path))
        return file.read()


def read_tail(path: Path, size_bytes: int) -> bytes:
    """The end of a plain file; nothing if there is none, or something else in its place."""
    try:
        with open_plain(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - size_bytes, 0))
            return file.read(size_bytes)
    except OSError:
        return b""


def checksum_of(path: Path) -> str:
    """SHA-256 of a plain file (`OSError`: as `open_plain`)."""
    digest = sha256()
    with open_plain(path) as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def told(error: Exception) -> str:
    """What is wrong with a file, with its name."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error)


# --- files of one object ----------------------------------------------------------------------


def with_checksum(
    value: Json | Mapping[str, Any], files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a file of one object holds: the object, checksums of files by name, and its own."""
    plain = value.to_json() if isinstance(value, Json) else dict(value)
    plain |= {} if files is None else {FILES_KEY: dict(files)}
    return plain | {KEY: sha256(dumps(plain).encode()).hexdigest()}


def write_object(path: Path, value: Json, files: Mapping[str, str] | None = None) -> None:
    """Write a file of one object, as `with_checksum` (`Infrastructure`: the disk refused)."""
    write_atomic(path, dumps(with_checksum(value, files)) + "\n")


def read_object(path: Path, *, sealed: bool = True) -> dict[str, Any]:
    """The object in a file, its checksum tried and taken off; not `sealed`, it may have none.

    Raises:
        OSError: no plain file, or one that cannot be read.
        RecordError: not an object, or changed since it was written.
    """
    plain = parsed(read_plain(path), path.name)
    if not sealed and KEY not in plain:
        return plain
    if KEY not in plain:
        raise RecordError(f"{path.name}: {GONE}")
    said = plain.pop(KEY)
    try:
        fits = said == with_checksum(plain)[KEY]
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path.name}: {error}") from error
    if not fits:
        raise RecordError(f"{path.name}: {CHANGED}")
    return plain


def read_sealed(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """As `read_object`, with the checksums of the files that it speaks for, which it must have."""
    plain = read_object(path)
    files = plain.pop(FILES_KEY, None)
    if not isinstance(files, dict):
        raise RecordError(f"{path.name}: {FILES_KEY}: {GONE}")
    return plain, files


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """The object in the contents of file `name` (`RecordError`: there is none)."""
    try:
        plain = strict_loads(data)
    except ValueError as error:
        raise RecordError(f"{name}: not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise RecordError(f"{name}: expected an object, got {type(plain).__name__}")
    return plain


def lock(path: Path) -> int:
    """Open a file and lock it for this process alone, until it is closed or the process dies.

    A file on a read-only file system is opened for reading, and locked all the same.

    Raises:
        UsageError: another harness holds it (`Infrastructure`: the file system cannot lock).
    """
    with refusals("lock", path), ExitStack() as unless_locked:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES) or not path.exists():
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        unless_locked.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_tail(path, 200).decode(errors="replace").strip()
            raise UsageError(f"{path.parent} is in use by another harness ({holder})") from None
        # Only for the message of whoever comes second; a full disk must not matter here.
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        unless_locked.pop_all()
    return fd

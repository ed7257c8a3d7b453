"""One file: written whole or not at all, read if it is a plain one, damage noticed by a checksum.

A file of one object carries its own checksum, `{..., "sha256": of all other keys}`, and where it
speaks for other files, theirs by name under `files`. They tell damage, not forgery: whoever can
write a file can write its checksum. A file without one is damaged.

Whatever the disk refuses is one `Infrastructure` error that names the path and the reason.
"""

import errno
import fcntl
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from harness.codec import Json, RecordError, dumps, strict_loads
from harness.errors import Infrastructure, UsageError

KEY, FILES_KEY = "sha256", "files"
MAX_FILE_BYTES = 1 << 30
CHANGED, GONE = "changed since it was written: its checksum does not fit", "its checksum is gone"


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a file so that it is there whole or not at all, and still there after a power cut.

    Raises:
        Infrastructure: the disk is full, read-only, or gone.
    """
    data = text.encode() if isinstance(text, str) else text
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            # Nor through a link that lies there: what it points to is somebody else's.
            with open(beside, "wb", opener=_new_file) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)  # makes the rename last
        finally:
            os.close(fd)
    except OSError as error:
        raise refused("write", path, error) from error


def write_once(path: Path, text: str) -> bool:
    """Write a file whole unless it is there; False if it is. One of several writers wins.

    Raises:
        Infrastructure: the disk is full, read-only, or gone.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # of all machines that share it
    try:
        write_atomic(beside, text)
        os.link(beside, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise refused("write", path, error) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return True


def _new_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def refused(verb: str, path: Path, error: OSError) -> Infrastructure:
    """The error to raise when the disk said no."""
    return Infrastructure(f"cannot {verb} {path}: {error.strerror or error}")


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if need be.

    Raises:
        Infrastructure: the disk refused.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused("make folder", path, error) from error


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where links do not work."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Fill `target`, which may exist, with links to all files of `source`.

    Raises:
        Infrastructure: the disk refused.
    """
    try:
        shutil.copytree(source, target, symlinks=True, copy_function=link_or_copy,
                        dirs_exist_ok=True)  # fmt: skip
    except (OSError, shutil.Error) as error:
        text = error.strerror if isinstance(error, OSError) else None
        raise Infrastructure(f"cannot write {target}: {text or error}") from error


# --- reading ----------------------------------------------------------------------------------


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read it, if it is one: not a link to elsewhere, a pipe or a device.

    A link would bring any file of this machine into a report, a pipe keep its reader for ever.

    Raises:
        OSError: there is none, it is something else, or it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "expected a file, got a symbolic link", str(path)) from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "something else"
        raise OSError(errno.EINVAL, f"expected a file, got {kind}", str(path))
    return os.fdopen(fd, "rb")


def read_plain(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The contents of a file of at most `max_bytes` (`OSError`: longer, or as `open_plain`)."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
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


def with_checksum(value: Json | Mapping[str, Any]) -> dict[str, Any]:
    """What a file that holds one object holds: the object and its checksum."""
    plain = value.to_json() if isinstance(value, Json) else dict(value)
    return plain | {KEY: sha256(dumps(plain).encode()).hexdigest()}


def write_object(path: Path, value: Json, files: Mapping[str, str] | None = None) -> None:
    """Write a file of one object, with the checksums of the files that it speaks for.

    Raises:
        Infrastructure: the disk refused.
    """
    plain = value.to_json() | ({} if files is None else {FILES_KEY: dict(files)})
    write_atomic(path, dumps(with_checksum(plain)) + "\n")


def without_checksum(plain: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of a file, once its checksum has been found to fit.

    Raises:
        RecordError: it does not, or there is none.
    """
    if KEY not in plain:
        raise RecordError(f"{name}: {GONE}")
    rest = {key: value for key, value in plain.items() if key != KEY}
    try:
        found = with_checksum(rest)[KEY]
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name}: {error}") from error
    if plain[KEY] != found:
        raise RecordError(f"{name}: {CHANGED}")
    return rest


def read_object(path: Path, *, sealed: bool = True) -> dict[str, Any]:
    """The object in a file, its checksum tried and taken off.

    Args:
        path: of the file.
        sealed: whether it must have one; a specification has not: its key is its checksum.

    Raises:
        OSError: no plain file, or one that cannot be read.
        RecordError: not an object, or changed since it was written.
    """
    plain = parsed(read_plain(path), path.name)
    return plain if not sealed and KEY not in plain else without_checksum(plain, path.name)


def read_sealed(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """As `read_object`, with the checksums of the files that it speaks for.

    Raises:
        OSError: as `read_object`.
        RecordError: as `read_object`; or it has no such checksums.
    """
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


class FolderLock:
    """An exclusive lock on a file; the kernel frees it when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, until `release` or the death of this process; no-op if taken.

        Raises:
            UsageError: another harness holds it.
            Infrastructure: the file system cannot lock.
        """
        if self._fd is not None:
            return
        try:
            # Not through a link: the file is written to, whosever it is.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self._path, flags, 0o644)
        except OSError as error:
            raise refused("lock", self._path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Infrastructure(f"cannot lock {self._path}: expected a file")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace").strip()
            os.close(fd)
            folder = self._path.parent
            raise UsageError(f"{folder} is in use by another harness ({holder})") from None
        except OSError as error:
            os.close(fd)
            raise refused("lock", self._path, error) from error
        self._fd = fd
        # Only for the message of whoever comes second; a full disk must not matter here.
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

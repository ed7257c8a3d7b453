"""The database file: made whole or not at all, checked before it is used, migrated after a backup.

    make       built beside its place and linked there, so there is never half a database
    open       ours? of a version that we read? whole? else an error in one line
    migrate    in one transaction, after a copy to `NAME.schemaN.bak`
    set_aside  a damaged one is renamed, never written to and never overwritten

The journal is SQLite's rollback journal (`journal_mode = DELETE`), not a write-ahead log: a log
needs memory that processes share, which a network file system does not give, and it leaves two more
files to copy. Writers take turns; each waits up to `BUSY_S` for the others. On a network file
system this is as safe as its locks (NFS 4 has them; where it has none, SQLite says so).
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from harness.errors import Infrastructure, UsageError
from harness.history.tables import MIGRATIONS, SCHEMA_VERSION
from harness.store.files import FolderLock, make_folder

APPLICATION_ID = 0x44304A31
"""In the header of the file: what SQLite holds for others is not taken for a history."""
BUSY_S = 60.0


class Damaged(Infrastructure):
    """The database cannot be trusted. It stays as it is."""


class Gone(Infrastructure):
    """The file is not where it was: another process may be keeping it aside."""


def open_database(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """Open a history for reading and writing, of the newest schema.

    Args:
        path: the file.
        create: make one if there is none.

    Raises:
        UsageError: there is none, it is something else, or a newer harness made it.
        Damaged: it is not whole.
        Infrastructure: the disk refused, or others kept it locked.
    """
    if not path.exists():
        if not create:
            raise UsageError(
                f"{path}: expected a history, got nothing; `harness run` makes one, "
                f"`harness history --add RUN` too"
            )
        _make(path)
    with refusals("open", path):
        connection = _connect(path)
        try:
            version = _version(connection, path)
            if version < SCHEMA_VERSION:
                _migrate(connection, path, version)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def refusals(verb: str, path: Path) -> Iterator[None]:
    """Turn what SQLite and the disk refuse into one line.

    Raises:
        Damaged: the file is not whole.
        Infrastructure: anything else.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        damaged = code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        if damaged or "decode" in str(error):
            raise Damaged(f"the history {path} is damaged: {error}") from error
        gone = code & 0xFF == sqlite3.SQLITE_CANTOPEN or code == sqlite3.SQLITE_READONLY_DBMOVED
        kind = Gone if gone else Infrastructure
        busy = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        hint = ", or lies where files cannot be locked (--history FILE)" if busy else ""
        raise kind(f"cannot {verb} the history {path}: {error}{hint}") from error
    except UnicodeDecodeError as error:
        # Text that is no text, or SQLite's message that quotes it.
        raise Damaged(f"the history {path} is damaged: {error}") from error
    except OSError as error:
        kind = Gone if isinstance(error, FileNotFoundError) else Infrastructure
        why = error.strerror or error
        raise kind(f"cannot {verb} the history {path}: {why}") from error


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """All of it or nothing; waits for other writers first.

    Raises:
        Infrastructure: the disk refused; nothing was written.
    """
    with refusals("write", path):
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself after some errors, such as a full disk.
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise


def set_aside(path: Path) -> Path:
    """Keep a damaged database under another name, with its journal; that name.

    Raises:
        Damaged: another harness is about it, or it is whole by now.
        UsageError: it is gone by now, or something else.
        Infrastructure: the disk refused.
    """
    lock = FolderLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire()
    except UsageError as error:
        raise Damaged(f"the history {path} is damaged, and another harness sees to it") from error
    try:
        if _is_whole(path):
            raise Damaged(f"the history {path} was damaged a moment ago")
        kept = _free_name(path, "damaged")
        with refusals("set aside", path):
            # The journal first: beside a new database it would be played back into it.
            journal = path.with_name(f"{path.name}-journal")
            if journal.exists():
                journal.rename(kept.with_name(f"{kept.name}-journal"))
            path.rename(kept)
        return kept
    finally:
        lock.release()


def _is_whole(path: Path) -> bool:
    # Nobody else moves it while this process has the lock, and none is made where there is one: if
    # it is damaged now, it is what will be renamed.
    try:
        open_database(path).close()
    except Damaged:
        return False
    return True


def _connect(path: Path) -> sqlite3.Connection:
    # mode=rw: SQLite would make an empty database where there is none.
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode=rw", uri=True, timeout=BUSY_S,
        isolation_level=None,
    )  # fmt: skip
    connection.row_factory = sqlite3.Row
    return connection


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the schema, if the file is ours and whole."""
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    if path.stat().st_size == 0:
        raise Damaged(f"the history {path} is damaged: it is empty")
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise UsageError(f"{path}: expected a history, got another program's database")
    version = _pragma(connection, "user_version")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by a newer harness (schema {version}, this one reads up to "
            f"{SCHEMA_VERSION})"
        )
    if version < 1:
        raise Damaged(f"the history {path} is damaged: it says that its schema is {version}")
    # Not quick_check, which does not see rows that an index no longer finds.
    answer = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if answer is None or answer[0] != "ok":
        raise Damaged(f"the history {path} is damaged: {answer[0] if answer else 'no answer'}")
    return version


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _make(path: Path) -> None:
    """Make an empty history at `path`, unless another process is faster."""
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with refusals("make", path):
        try:
            beside.unlink(missing_ok=True)
            with closing(sqlite3.connect(beside, isolation_level=None)) as connection:
                connection.execute("BEGIN")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                _upgrade(connection, 0)
                connection.execute("COMMIT")
            _put(beside, path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def _put(beside: Path, path: Path) -> None:
    try:
        os.link(beside, path)
    except FileExistsError:
        return
    except OSError:
        # No hard links here: the name is taken first, so that nothing is overwritten.
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            beside.replace(path)


def _upgrade(connection: sqlite3.Connection, version: int) -> None:
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _migrate(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Bring a database of an older version up to date; the old one is kept beside it."""
    with transaction(connection, path):
        now = _pragma(connection, "user_version")
        if now >= SCHEMA_VERSION:
            return  # another process was faster
        _back_up(path, version)
        try:
            _upgrade(connection, now)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                # A column that is there already, a table that is not: the version is wrong.
                raise Damaged(f"the history {path} is damaged: {error}") from error
            raise


def _back_up(path: Path, version: int) -> None:
    """Copy the database as it is committed: the caller holds the write lock."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.bak.tmp")
    try:
        beside.unlink(missing_ok=True)
        with closing(_connect(path)) as source, closing(sqlite3.connect(beside)) as target:
            source.backup(target)
        with beside.open("rb") as copy:
            os.fsync(copy.fileno())
        beside.rename(_free_name(path, f"schema{version}.bak"))
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _free_name(path: Path, word: str) -> Path:
    number, name = 2, path.with_name(f"{path.name}.{word}")
    while name.exists():
        number, name = number + 1, path.with_name(f"{path.name}.{word}-{number}")
    return name

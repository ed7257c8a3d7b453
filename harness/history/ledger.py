"""The file of the history: SQLite, a row an entry, rows only ever added.

    open     the file is ours, of this schema and whole, else an error in one line
    record   the entry of a run folder, in one transaction; what is there already is kept
    rows     entries, each held against the digest of its row
    merge    everything of another history, in one transaction

The journal is SQLite's rollback journal, not a write-ahead log: a log needs memory that processes
share, which a network file system does not give. Writers take turns of up to `BUSY_S` seconds. A
damaged file is never written to, nor renamed.
"""

import dataclasses
import json
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

from harness.codec import strict_loads
from harness.errors import Infrastructure, UsageError
from harness.history.entries import CaseEntry, FolderEntry, RunEntry, name_of
from harness.records import Json
from harness.store.files import make_folder, open_plain

APPLICATION_ID = 0x44304A31
"""In the header of the file: another program's database is not taken for a history."""
SCHEMA_VERSION = 5
BUSY_S = 60.0

Entry = TypeVar("Entry", CaseEntry, RunEntry, FolderEntry)
_KEYS: dict[type[Json], tuple[str, ...]] = {
    FolderEntry: ("id",),
    CaseEntry: ("folder", "case_id", "attempt"),
    RunEntry: ("folder", "key", "attempt"),
}
_TABLES: dict[type[Json], str] = {FolderEntry: "folders", CaseEntry: "cases", RunEntry: "runs"}
_FIELDS: dict[type[Json], tuple[str, ...]] = {
    kind: tuple(f.name for f in dataclasses.fields(kind) if f.name not in ("cases", "runs"))
    for kind in _TABLES
}
_AS_JSON = ("labels", "causes", "retried", "difference", "environment", "fingerprints")


class Damaged(Infrastructure):
    """The database cannot be trusted. It is not written to."""


@dataclass(frozen=True, kw_only=True)
class Recorded(Json):
    """What recording added. `differing`: rows that the history holds with other contents."""

    folders: int = 0
    cases: int = 0
    runs: int = 0
    differing: int = 0

    def __add__(self, other: "Recorded") -> "Recorded":
        return Recorded(**(Counter(self.to_json()) + Counter(other.to_json())))


class History:
    """An open history.

    Attributes:
        path: of the database.
        connection: to it; `query` has errors in one line.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open a history, or make one with `create`.

        Raises:
            UsageError: there is none, it is something else, or of another schema.
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
            # mode=rw: SQLite would make an empty database where there is none.
            connection = sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode=rw", uri=True, timeout=BUSY_S,
                isolation_level=None,
            )  # fmt: skip
            try:
                _check(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def record(self, entry: FolderEntry) -> Recorded:
        """Add what is new of a run folder; what is there already stays as it is.

        Raises:
            Infrastructure: the disk refused, or others kept the history locked; nothing is added.
        """
        with self._transaction():
            return self._record(entry)

    def merge(self, other: "History") -> Recorded:
        """Record everything of another history.

        Raises:
            Damaged: a row of the other is not what was written; nothing is added.
            Infrastructure: as `record`.
        """
        with self._transaction():
            return sum(map(self._record, other.entries()), Recorded())

    def _record(self, entry: FolderEntry) -> Recorded:
        counts: Counter[str] = Counter()
        alone = dataclasses.replace(entry, cases=(), runs=())
        for row in (alone, *entry.cases, *entry.runs):
            kind = type(row)
            own = {"folder": entry.id} if kind is not FolderEntry else {}
            values = own | {name: _stored(name, getattr(row, name)) for name in _FIELDS[kind]}
            values["digest"] = name_of(list(values.values()))
            marks = ", ".join("?" * len(values))
            done = self.connection.execute(
                f"INSERT OR IGNORE INTO {_TABLES[kind]} VALUES ({marks})", tuple(values.values())
            )
            counts[_TABLES[kind]] += done.rowcount
            counts["differing"] += not done.rowcount and not self._holds(kind, values)
        return Recorded(**counts)

    def _holds(self, kind: type[Json], values: dict[str, Any]) -> bool:
        """Whether the row of this identity says the same."""
        same = " AND ".join(f'"{name}" = ?' for name in (*_KEYS[kind], "digest"))
        found = [values[name] for name in (*_KEYS[kind], "digest")]
        sql = f"SELECT 1 FROM {_TABLES[kind]} WHERE {same}"
        return self.connection.execute(sql, found).fetchone() is not None

    def query(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """All rows of a SELECT, as they are (`Infrastructure`: it cannot be read)."""
        with refusals("read", self.path):
            return self.connection.execute(sql, tuple(values)).fetchall()

    def rows(
        self, kind: type[Entry], where: str, values: Sequence[object] = ()
    ) -> Iterator[tuple[str, Entry]]:
        """Entries of one kind with the id of their run folder.

        Args:
            kind: of which table.
            where: what follows `SELECT ... FROM table`.
            values: for its question marks.

        Raises:
            Damaged: a row is not what was written.
        """
        table = _TABLES[kind]
        for row in self.query(f"SELECT {table}.* FROM {table} {where}", values):
            try:
                yield str(row[0]), _entry(kind, row)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                names = " ".join(str(row[name]) for name in _KEYS[kind])
                raise Damaged(
                    f"the history {self.path} is damaged: {table}: {names}: {error}"
                ) from error

    def entries(self, prefix: str = "", most: int = -1) -> Iterator[FolderEntry]:
        """Every run folder, oldest first; or at most so many whose id begins with `prefix`."""
        # One at a time: a reader that holds the whole history open would keep writers waiting.
        ids = self.query(
            "SELECT id FROM folders WHERE substr(id, 1, ?) = ? ORDER BY created, id LIMIT ?",
            (len(prefix), prefix, most),
        )
        for (folder,) in ids:
            for _, alone in self.rows(FolderEntry, "WHERE id = ?", [folder]):
                owned = "WHERE folder = ? ORDER BY rowid"
                yield dataclasses.replace(
                    alone,
                    cases=tuple(case for _, case in self.rows(CaseEntry, owned, [folder])),
                    runs=tuple(run for _, run in self.rows(RunEntry, owned, [folder])),
                )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing; waits for other writers first."""
        with refusals("write", self.path):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, such as a full disk.
                with suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                raise


def open_import(path: Path) -> History:
    """Open a history from elsewhere, to `merge` it.

    Raises:
        UsageError: it is not a plain file, or not a history.
        Damaged: it is not whole.
    """
    try:
        open_plain(path).close()  # a pipe would keep its reader for ever
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    return History.open(path)


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
        busy = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        hint = ", or lies where files cannot be locked (--history FILE)" if busy else ""
        raise Infrastructure(f"cannot {verb} the history {path}: {error}{hint}") from error
    except UnicodeDecodeError as error:
        raise Damaged(f"the history {path} is damaged: {error}") from error
    except OSError as error:
        raise Infrastructure(
            f"cannot {verb} the history {path}: {error.strerror or error}"
        ) from error


def _make(path: Path) -> None:
    """Make an empty history, whole from the beginning, unless another process has made one."""
    make_folder(path.parent)
    with refusals("make", path), closing(sqlite3.connect(":memory:")) as made:
        made.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        made.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for kind, table in _TABLES.items():
            own = () if kind is FolderEntry else ("folder",)
            # Columns without a type: values come back as they were written.
            names = ", ".join(f'"{name}"' for name in (*own, *_FIELDS[kind], "digest"))
            keys = ", ".join(f'"{name}"' for name in _KEYS[kind])
            made.execute(f"CREATE TABLE {table} ({names}, PRIMARY KEY ({keys}))")
        made.execute("CREATE INDEX folders_of_scenario ON folders (scenario, created)")
        made.commit()
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as file:
            file.write(made.serialize())
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """See that the file is ours, of this schema, and whole."""
    connection.row_factory = sqlite3.Row
    for setting in ("journal_mode = DELETE", "synchronous = FULL", "trusted_schema = OFF"):
        connection.execute(f"PRAGMA {setting}")
    found = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        # Not quick_check, which does not see rows that an index no longer finds.
        for name in ("application_id", "user_version", "integrity_check(1)")
    }
    if path.stat().st_size == 0:
        raise Damaged(f"the history {path} is damaged: it is empty")
    if found["application_id"] != APPLICATION_ID:
        raise UsageError(f"{path}: expected a history, got another program's database")
    if found["integrity_check(1)"] != "ok":
        raise Damaged(f"the history {path} is damaged: {found['integrity_check(1)']}")
    if found["user_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: expected a history of schema {SCHEMA_VERSION}, got {found['user_version']} "
            f"of another harness; --history FILE begins a new one"
        )


def _stored(name: str, value: object) -> object:
    if name not in _AS_JSON or value is None:
        return value
    plain = value.to_json() if isinstance(value, Json) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _entry(kind: type[Entry], row: sqlite3.Row) -> Entry:
    """The entry of a row (`ValueError`, `TypeError`, `LookupError`: not what was written)."""
    *values, digest = row
    if name_of(values) != digest:
        raise ValueError("its digest does not fit")
    named = {name: row[name] for name in _FIELDS[kind]}
    parsed = {name: strict_loads(named[name]) for name in _AS_JSON if named.get(name) is not None}
    return kind.from_json(named | parsed)

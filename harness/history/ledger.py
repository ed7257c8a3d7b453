"""The file of the history: SQLite, a row an entry, rows only ever added.

Entries are recorded in one transaction a run folder, and read against the digests of their rows.
The journal is SQLite's rollback journal, not a write-ahead log: a log needs memory that processes
share, which a network file system does not give. Writers take turns of up to `BUSY_S` seconds. A
damaged file is never written to, nor renamed.
"""

import dataclasses
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

from harness.codec import strict_loads
from harness.errors import Infrastructure, UsageError
from harness.history.entries import ENCODER, CaseEntry, FolderEntry, RunEntry, name_of
from harness.records import Json
from harness.store.files import make_folder

APPLICATION_ID, SCHEMA_VERSION = 0x44304A31, 6
"""In the header of the file: another program's database is not taken for a history."""
BUSY_S = 60.0

Entry = TypeVar("Entry", CaseEntry, RunEntry, FolderEntry)
# Of each kind of entry: its table, and the columns that identify a row.
_TABLES: dict[type[Json], tuple[str, tuple[str, ...]]] = {
    FolderEntry: ("folders", ("id",)),
    CaseEntry: ("cases", ("folder", "case_id", "attempt")),
    RunEntry: ("runs", ("folder", "key", "attempt")),
}
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
    """An open history; `query` of its `connection` has errors in one line."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open a history, or make one with `create`.

        `UsageError`: there is none, it is something else, or of another schema. `Damaged`: it is
        not whole. `Infrastructure`: the disk refused, or others kept it locked.
        """
        if not path.exists():
            if not create:
                how = "`harness run` makes one, `harness history --add RUN` too"
                raise UsageError(f"{path}: expected a history, got nothing; {how}")
            _make(path)
        with _refusals("open", path):
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

        `Infrastructure`: the disk refused, or others kept the history locked; nothing is added.
        """
        with _refusals("write", self.path), self.connection:  # all of it, or rolled back
            self.connection.execute("BEGIN IMMEDIATE")  # waits for other writers
            return self._record(entry)

    def _record(self, entry: FolderEntry) -> Recorded:
        counts: Counter[str] = Counter()
        alone = dataclasses.replace(entry, cases=(), runs=())
        for row in (alone, *entry.cases, *entry.runs):
            table, keys = _TABLES[type(row)]
            values = {name: _stored(name, getattr(row, name)) for name in _FIELDS[type(row)]}
            values = values if row is alone else {"folder": entry.id} | values
            values["digest"] = name_of(list(values.values()))
            marks = ", ".join("?" * len(values))
            sql = f"INSERT OR IGNORE INTO {table} VALUES ({marks})"
            added = self.connection.execute(sql, tuple(values.values())).rowcount
            counts[table] += added
            if not added:
                same = " AND ".join(f'"{name}" = ?' for name in (*keys, "digest"))
                sql = f"SELECT COUNT(*) FROM {table} WHERE {same}"
                found = [values[name] for name in (*keys, "digest")]
                counts["differing"] += not self.connection.execute(sql, found).fetchone()[0]
        return Recorded(**counts)

    def query(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """All rows of a SELECT, as they are (`Infrastructure`: it cannot be read)."""
        with _refusals("read", self.path):
            return self.connection.execute(sql, tuple(values)).fetchall()

    def rows(
        self, kind: type[Entry], where: str, values: Sequence[object] = ()
    ) -> Iterator[tuple[str, Entry]]:
        """Entries of one kind with the id of their run folder (`Damaged`: one was changed).

        `where` is what follows `SELECT ... FROM table`, `values` are for its question marks.
        """
        table, keys = _TABLES[kind]
        for row in self.query(f"SELECT {table}.* FROM {table} {where}", values):
            try:
                if name_of(list(row)[:-1]) != row["digest"]:
                    raise ValueError("its digest does not fit")
                plain = {name: row[name] for name in _FIELDS[kind]}
                parsed = {n: strict_loads(v) for n, v in plain.items() if n in _AS_JSON and v}
                entry = kind.from_json(plain | parsed)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                names = " ".join(str(row[name]) for name in keys)
                why = f"{table}: {names}: {error}"
                raise Damaged(f"the history {self.path} is damaged: {why}") from error
            yield str(row[0]), entry

    def entries(self, prefix: str = "", most: int = -1) -> Iterator[FolderEntry]:
        """Every run folder, oldest first; or at most so many whose id begins with `prefix`."""
        # One at a time: a reader that holds the whole history open would keep writers waiting.
        sql = "SELECT id FROM folders WHERE substr(id, 1, ?) = ? ORDER BY created, id LIMIT ?"
        owned = "WHERE folder = ? ORDER BY rowid"
        for (folder,) in self.query(sql, (len(prefix), prefix, most)):
            for _, alone in self.rows(FolderEntry, "WHERE id = ?", [folder]):
                cases = tuple(case for _, case in self.rows(CaseEntry, owned, [folder]))
                runs = tuple(run for _, run in self.rows(RunEntry, owned, [folder]))
                yield dataclasses.replace(alone, cases=cases, runs=runs)


@contextmanager
def _refusals(verb: str, path: Path) -> Iterator[None]:
    """What SQLite and the disk refuse in one line: `Damaged`, else `Infrastructure`."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # SQLite has no code for text that is not UTF-8.
        text = not isinstance(error, OSError) and "decode" in str(error)
        if text or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise Damaged(f"the history {path} is damaged: {error}") from error
        busy = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        hint = ", or lies where files cannot be locked (--history FILE)" if busy else ""
        why = getattr(error, "strerror", None) or error
        raise Infrastructure(f"cannot {verb} the history {path}: {why}{hint}") from error


def _make(path: Path) -> None:
    """Make an empty history, whole from the beginning, unless another process has made one."""
    make_folder(path.parent)
    with _refusals("make", path), closing(sqlite3.connect(":memory:")) as made:
        made.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        made.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for kind, (table, keys) in _TABLES.items():
            own = () if kind is FolderEntry else ("folder",)
            # Columns without a type: values come back as they were written.
            names = ", ".join(f'"{name}"' for name in (*own, *_FIELDS[kind], "digest"))
            key = ", ".join(f'"{name}"' for name in keys)
            made.execute(f"CREATE TABLE {table} ({names}, PRIMARY KEY ({key}))")
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
    # Not quick_check, which does not see rows that an index no longer finds.
    program, schema, whole = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "integrity_check(1)")
    )
    whole = whole if path.stat().st_size else "it is empty"
    if program != APPLICATION_ID and path.stat().st_size:
        raise UsageError(f"{path}: expected a history, got another program's database")
    if whole != "ok":
        raise Damaged(f"the history {path} is damaged: {whole}")
    if schema != SCHEMA_VERSION:
        expected = f"expected a history of schema {SCHEMA_VERSION}, got {schema} of another harness"
        raise UsageError(f"{path}: {expected}; --history FILE begins a new one")


def _stored(name: str, value: object) -> object:
    if name not in _AS_JSON or value is None:
        return value
    return ENCODER.encode(value.to_json() if isinstance(value, Json) else value)

"""The file of the history, SQLite: a row an entry, final once it is recorded, rows only ever added.

    FolderEntry      one `harness run`: scenario, commit, environment, shard, tier
      CaseEntry      one answer for one case: outcome, causes, first difference
      RunEntry       one attempt of one training run: how it ended, times, memory, bits

Fields are the columns of the tables; "", None or 0 where nothing was recorded. Entries are recorded
in one transaction a run folder, and read against the digests of their rows. The journal is SQLite's
rollback journal, not a write-ahead log: a log needs memory that processes share, which a network
file system does not give. Writers take turns of up to `BUSY_S` seconds. A damaged file is never
written to, nor renamed.
"""

import dataclasses
import hashlib
import json
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import quote

from msgspec import Meta

from harness.codec import strict_loads
from harness.errors import Infrastructure, UsageError
from harness.records import Difference, Json, Outcome, RunSpec, What
from harness.store.files import make_folder

APPLICATION_ID, SCHEMA_VERSION = 0x44304A31, 6
"""In the header of the file: another program's database is not taken for a history."""
BUSY_S = 60.0
ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
Attempt = Annotated[int, Meta(ge=0)]
"""0 for the first that the folder ever held."""


@dataclass(frozen=True, kw_only=True)
class CaseEntry(Json):
    """One answer for one case; `reference`, `control` and `candidate` are keys of its runs."""

    case_id: str
    attempt: Attempt
    outcome: Outcome
    what: What
    message: str
    labels: dict[str, str]
    commit: str = ""  # "" if it is the folder's
    causes: tuple[str, ...] = ()  # 'check: outcome what', 'confirmation: outcome'
    difference: Difference | None = None
    reference: str = ""
    control: str = ""
    candidate: str = ""
    wall_s: float = 0.0
    retried: tuple[str, ...] = ()  # attempts of its runs that the machine failed: 'role: failure'

    @property
    def verdict(self) -> str:
        """'failed diverged'."""
        return f"{self.outcome} {self.what}".strip()


@dataclass(frozen=True, kw_only=True)
class RunEntry(Json):
    """One attempt of one training run; times and memory are those of the worst rank."""

    key: str
    attempt: Attempt
    work: str  # see `work_of`
    what: What
    device: Literal["cpu", "cuda"]
    world_size: int
    preset: str
    steps: int
    started_unix_s: float
    wall_s: float
    commit: str = ""  # "" if it is the folder's
    fingerprint: str = ""  # names the environment of its ranks, in `FolderEntry.fingerprints`
    startup_s: float | None = None  # from process start to first step
    step_s: float | None = None  # median over the steps but the first fifth
    peak_bytes: int | None = None
    loss_bits: str = ""  # digest of every loss and gradient norm of every step and rank
    state_bits: str = ""  # digest of every tensor's digest of every step and rank


@dataclass(frozen=True, kw_only=True)
class FolderEntry(Json):
    """One run folder, wherever it is copied to."""

    id: str
    scenario: str
    created: str  # UTC, ISO 8601: the order of runs
    num_cases: int  # planned, answered or not
    commit: str = ""  # of the program under test, with a hash of uncommitted changes
    shard: str = ""
    tier: str = ""
    device: str = ""
    machine: str = ""  # see `machine_kind`
    slots: int = 0  # ranks that could run at a time, which times depend on
    environment: dict[str, Any] = field(default_factory=dict)  # what verdicts may depend on
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)  # of ranks, by name
    cases: tuple[CaseEntry, ...] = ()
    runs: tuple[RunEntry, ...] = ()

    @property
    def environment_id(self) -> str:
        """Names the environment; "" if it is unknown, which equals nothing."""
        return name_of(self.environment) if self.environment else ""


def name_of(value: object) -> str:
    """A short name for a JSON value: equal names mean equal values."""
    return hashlib.sha256(ENCODER.encode(value).encode()).hexdigest()[:16]


def work_of(spec: RunSpec) -> str:
    """Names the work that a run does: its key without time limit and replica."""
    plant = spec.plant.to_json() if spec.plant is not None else None
    return name_of([spec.config, spec.device, spec.world_size, plant, spec.rounding])


# --- the file ---------------------------------------------------------------------------------

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


class History:
    """An open history."""

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

    def record(self, entry: FolderEntry) -> Counter[str]:
        """Add what is new of a run folder; what is there already stays as it is.

        How many `folders`, `cases` and `runs` are new, and how many rows the history holds with
        other contents (`differing`). `Infrastructure`: the disk refused, or others kept the history
        locked; nothing is added.
        """
        counts: Counter[str] = Counter(folders=0, cases=0, runs=0, differing=0)
        alone = dataclasses.replace(entry, cases=(), runs=())
        with _refusals("write", self.path), self.connection:  # all of it, or rolled back
            self.connection.execute("BEGIN IMMEDIATE")  # waits for other writers
            for row in (alone, *entry.cases, *entry.runs):
                table, keys = _TABLES[type(row)]
                values = {name: _stored(name, getattr(row, name)) for name in _FIELDS[type(row)]}
                values = values if row is alone else {"folder": entry.id} | values
                values["digest"] = name_of(list(values.values()))
                sql = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(values))})"
                if self.connection.execute(sql, tuple(values.values())).rowcount:
                    counts[table] += 1
                    continue
                same = " AND ".join(f'"{name}" = ?' for name in (*keys, "digest"))
                sql = f"SELECT COUNT(*) FROM {table} WHERE {same}"
                held = self.connection.execute(sql, [values[name] for name in (*keys, "digest")])
                counts["differing"] += not held.fetchone()[0]
        return counts

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

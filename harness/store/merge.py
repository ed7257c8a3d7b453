"""Run folders of shards, or of several scenarios, put together into one.

Runs and cases are linked, or copied where links fail, never moved: the folders that are merged stay
as they are. The result is a run folder like any other: `report`, `show`, `rerun`, `history --add`
and `--resume` work on it. What is missing shows:

    a shard that was not given    its cases have the outcome `error`, `not_run`, and say which shard
    one that cannot be read       the same: one killed job must not cost the report of the others
    a case without a verdict      has none in the result either, which no report takes for a pass

Two folders that hold the same case or the same run are refused, and so are shards of different
cuts: their union could hold a case twice and another one never. Shards of different commits are
refused, too: one of an earlier night would answer for the code of this one.
"""

import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.records import CaseSpec, Json, RecordError, Verdict
from harness.store.files import link_tree, read_object, told, write_object
from harness.store.folder import SHARDS_FILE, RunFolder

_OF_ALL = (
    "scenario", "why", "commit", "device", "slots", "machine", "environment", "tier", "notes",
    "retries",
)  # fmt: skip
"""Keys of the manifest that hold for the whole if all folders say the same."""


@dataclass(frozen=True, kw_only=True)
class Shard(Json):
    """Shard `index` of `number`; the first is 1."""

    index: int
    number: int

    def __str__(self) -> str:
        return f"{self.index}/{self.number}"


@dataclass(frozen=True, kw_only=True)
class Whole(Json):
    """The matrix that a shard is of.

    Attributes:
        shard: which one it is.
        cut: names the cut; shards of one cut hold every case once.
        cases: of all shards, in their order.
        shards: ids of the cases of each.
    """

    shard: Shard
    cut: str
    cases: tuple[CaseSpec, ...]
    shards: tuple[tuple[str, ...], ...]


def keep_whole(folder: Path, whole: Whole) -> None:
    """Write what a shard's folder says of the others.

    Raises:
        Infrastructure: the disk refused.
    """
    write_object(folder / SHARDS_FILE, whole)


def load_whole(folder: Path) -> Whole | None:
    """What a run folder says of the matrix that it is a shard of; None if it is no shard.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        return Whole.from_json(read_object(folder / SHARDS_FILE))
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        raise UsageError(f"{folder} is a damaged run folder: {told(error)}") from error


def merge(paths: Sequence[Path], out: Path, argv: Sequence[str]) -> RunFolder:
    """Make the run folder `out` of others; it is locked.

    Args:
        paths: run folders; all shards of one cut and commit, or none a shard.
        out: where nothing is yet.
        argv: the command line, for the manifest.

    Raises:
        UsageError: they do not go together, one is damaged or in use, or `out` holds something.
        Infrastructure: the disk refused.
    """
    folders, wholes, unread = _opened(paths)
    cases, missing = _cases(folders, wholes)
    _check_commits(folders, wholes)
    held = _held(folders)
    for folder in folders:
        folder.acquire()  # nobody works there, and nobody begins to
    try:
        texts = dict.fromkeys(folder.scenario_text for folder in folders)
        text = next(iter(texts)) if len(texts) == 1 else _named(folders)
        notes = [_told_missing(shard, unread) for shard in dict.fromkeys(missing.values())]
        manifest = _manifest(folders, wholes, argv)
        manifest = {**manifest, "notes": [*manifest.get("notes", ()), *notes]}

        def fill(merged: RunFolder) -> None:
            _link_all(folders, merged)
            for case in cases:
                if case.id not in held:
                    why = _told_missing(missing[case.id], unread)
                    merged.save_verdict(_not_given(case, why), case)

        # Killed halfway, it is no run folder, and --resume does not make anew what is not linked.
        return RunFolder.create(out, manifest, text, cases, fill=fill)
    finally:
        for folder in folders:
            folder.release()


def _opened(
    paths: Sequence[Path],
) -> tuple[list[RunFolder], list[Whole | None], dict[Path, str]]:
    """The folders that can be read, the matrix of each, and why the others cannot be.

    Raises:
        UsageError: one that cannot be read, and nothing says that its cases will be missed.
    """
    places = [path.resolve() for path in paths]
    if twice := [
        path for path, place in zip(paths, places, strict=True) if places.count(place) > 1
    ]:
        raise UsageError(f"merge: expected each run folder once, got {', '.join(map(str, twice))}")
    folders: list[RunFolder] = []
    wholes: list[Whole | None] = []
    unread: dict[Path, UsageError] = {}
    for path in paths:
        try:
            folder = RunFolder.open(path)
            wholes.append(load_whole(folder.path))
            folders.append(folder)
        except UsageError as error:
            unread[path] = error
    for path, why in unread.items():
        # A name that was mistyped is a mistake; a folder that is there is what a killed job left.
        if not folders or None in wholes or not path.is_dir():
            raise why
    return folders, wholes, {path: str(why) for path, why in unread.items()}


def _check_commits(folders: Sequence[RunFolder], wholes: Sequence[Whole | None]) -> None:
    known: dict[str, RunFolder] = {}
    for folder, whole in zip(folders, wholes, strict=True):
        commit = str(folder.manifest.get("commit") or "")
        if whole is None or not commit:
            continue
        first = next(iter(known), commit)
        known.setdefault(commit, folder)
        if commit != first:
            raise UsageError(
                f"{folder.path} was made by commit {commit}, {known[first].path} by {first}: "
                f"expected shards of one night"
            )


def _cases(
    folders: Sequence[RunFolder], wholes: Sequence[Whole | None]
) -> tuple[tuple[CaseSpec, ...], dict[str, str]]:
    """All cases, and for those of shards that are not given, the shard."""
    first = wholes[0]
    if first is None:
        for folder, whole in zip(folders, wholes, strict=True):
            if whole is not None:
                raise UsageError(f"{folder.path} is shard {whole.shard}, {folders[0].path} is none")
        return tuple(case for folder in folders for case in folder.cases), {}
    given: dict[int, Path] = {}
    for folder, whole in zip(folders, wholes, strict=True):
        if whole is None:
            raise UsageError(f"{folder.path} is no shard, {folders[0].path} is {first.shard}")
        if (whole.cut, whole.shard.number) != (first.cut, first.shard.number):
            raise UsageError(
                f"{folder.path} is shard {whole.shard} of another cut than {folders[0].path}: "
                f"expected the same scenarios, and options for all shards"
            )
        if whole.shard.index in given:
            raise UsageError(
                f"{folder.path} is shard {whole.shard}, and so is {given[whole.shard.index]}"
            )
        given[whole.shard.index] = folder.path
    missing = {
        name: f"{index}/{first.shard.number}"
        for index, ids in enumerate(first.shards, start=1)
        if index not in given
        for name in ids
    }
    # As each shard planned them: only there is known what its machine had to skip.
    planned = {case.id: case for folder in folders for case in folder.cases}
    return tuple(planned.get(case.id, case) for case in first.cases), missing


def _held(folders: Sequence[RunFolder]) -> dict[str, Path]:
    """Which folder has a case.

    Raises:
        UsageError: two folders have the same case or run.
    """
    cases: dict[str, Path] = {}
    runs: dict[str, Path] = {}
    for folder in folders:
        for case in folder.cases:
            if (other := cases.setdefault(case.id, folder.path)) != folder.path:
                raise UsageError(
                    f"{folder.path} holds the case {case.id}, and so does {other}: expected "
                    f"shards of one matrix, or scenarios whose cases differ"
                )
        for run in (folder.path / "runs").glob("*"):
            if (other := runs.setdefault(run.name, folder.path)) != folder.path:
                raise UsageError(f"{folder.path} made the run {run.name}, and so did {other}")
    return cases


def _link_all(folders: Sequence[RunFolder], merged: RunFolder) -> None:
    """Links to all runs and cases.

    Raises:
        UsageError: something there is neither a file nor a folder.
        Infrastructure: the disk refused.
    """
    for folder in folders:
        for part in ("runs", "cases"):
            for path in (folder.path / part).rglob("*"):
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise UsageError(f"merge: {path}: expected files and folders, got another kind")
            if (folder.path / part).is_dir():
                link_tree(folder.path / part, merged.path / part)


def _told_missing(shard: str, unread: Mapping[Path, str]) -> str:
    why = "; ".join(unread.values())
    told = f"shard {shard} is missing: its run folder was not among those merged"
    return f"{told} ({why})" if why else told


def _not_given(case: CaseSpec, why: str) -> Verdict:
    return Verdict(
        case_id=case.id,
        outcome="error",
        what="not_run",
        message=why,
        checks=(),
        runs={},
        wall_s=0.0,
    )


def _manifest(
    folders: Sequence[RunFolder], wholes: Sequence[Whole | None], argv: Sequence[str]
) -> Mapping[str, Any]:
    manifests = [folder.manifest for folder in folders]
    agreed = {
        key: manifests[0][key]
        for key in _OF_ALL
        if key in manifests[0] and all(m.get(key) == manifests[0][key] for m in manifests)
    }
    names = dict.fromkeys(str(m.get("scenario", "")) for m in manifests)
    merged = [
        {
            "id": folder.manifest.get("id"),
            "shard": "" if whole is None else str(whole.shard),
            "created": folder.manifest.get("created"),
            "machine": folder.manifest.get("machine"),
        }
        for folder, whole in zip(folders, wholes, strict=True)
    ]
    return {"scenario": "+".join(names)} | agreed | {
        "id": uuid.uuid4().hex,
        "created": max(
            (str(m.get("created", "")) for m in manifests),
            default=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
        "command": list(argv),
        "python": sys.version.split()[0],
        "merged": merged,
    }  # fmt: skip


def _named(folders: Sequence[RunFolder]) -> str:
    names = "+".join(dict.fromkeys(str(f.manifest.get("scenario", "")) for f in folders))
    return f"name: {json.dumps(names)}\nwhy: {json.dumps('Several run folders, merged.')}\n"

"""Run folders of shards, or of several scenarios, put together into one.

Runs and cases are linked, or copied where links fail. A case of a shard that was not given, or that
cannot be read, has the outcome `error`, `not_run`, and says which shard. Refused are folders that
hold the same case or run, and shards of different cuts or commits: their union could hold a case
twice and another one never, or answer for other code.
"""

import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.records import CaseSpec, Json, RecordError, Verdict
from harness.store.files import link_tree, read_object, told, write_object
from harness.store.folder import SHARDS_FILE, RunFolder

_OF_ALL = (
    "scenario", "why", "commit", "code", "programs", "packages", "device", "devices", "slots",
    "slurm", "machine", "processor", "environment", "tier", "notes", "retries",
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
    """The matrix that a `shard` is of: all `cases` in order, and ids of those of each of `shards`.

    `cut` names the cut; shards of one cut hold every case once.
    """

    shard: Shard
    cut: str
    cases: tuple[CaseSpec, ...]
    shards: tuple[tuple[str, ...], ...]


Opened = list[tuple[RunFolder, Whole | None]]


def keep_whole(folder: Path, whole: Whole) -> None:
    """Write what a shard's folder says of the others (`Infrastructure`: the disk refused)."""
    write_object(folder / SHARDS_FILE, whole)


def _load_whole(folder: Path) -> Whole | None:
    try:
        return Whole.from_json(read_object(folder / SHARDS_FILE))
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        raise UsageError(f"{folder} is a damaged run folder: {told(error)}") from error


def merge(paths: Sequence[Path], out: Path, argv: Sequence[str]) -> RunFolder:
    """Make the run folder `out` of others; it is locked. `argv` is for the manifest.

    Raises:
        UsageError: they do not go together, one is damaged or in use, or `out` holds something.
        Infrastructure: the disk refused.
    """
    opened, unread = _opened(paths)
    cases, missing = _cases(opened)
    folders = [folder for folder, _ in opened]
    held = _held(folders)
    for folder in folders:
        folder.acquire()  # nobody works there, and nobody begins to
    try:
        lost = "".join(f" ({why})" for why in unread)
        whys = {
            shard: f"shard {shard} is missing: its run folder was not among those merged{lost}"
            for shard in missing.values()
        }
        manifest = _manifest(opened, argv, [*whys.values()])
        texts = {folder.scenario_text for folder in folders}
        text = "".join(f"{key}: {json.dumps(manifest[key])}\n" for key in ("scenario", "why"))
        text = texts.pop() if len(texts) == 1 else text.replace("scenario", "name", 1)

        def fill(merged: RunFolder) -> None:
            _link_all(folders, merged)
            for case in (case for case in cases if case.id not in held):
                why = whys[missing[case.id]]
                verdict = Verdict(case_id=case.id, outcome="error", what="not_run", message=why)
                merged.save_verdict(verdict, case)

        # Killed halfway, it is no run folder, and --resume does not make anew what is not linked.
        return RunFolder.create(out, manifest, text, cases, fill=fill)
    finally:
        for folder in folders:
            folder.release()


def _opened(paths: Sequence[Path]) -> tuple[Opened, list[str]]:
    """The folders that can be read, and why the others cannot be."""
    places = [path.resolve() for path in paths]
    if twice := [str(p) for p, place in zip(paths, places, strict=True) if places.count(place) > 1]:
        raise UsageError(f"merge: expected each run folder once, got {', '.join(twice)}")
    opened: Opened = []
    unread: dict[Path, UsageError] = {}
    for path in paths:
        try:
            opened.append((RunFolder.open(path), _load_whole(path)))
        except UsageError as error:
            unread[path] = error
    for path, why in unread.items():
        # A name that was mistyped is a mistake; a folder that is there is what a killed job left.
        if not opened or any(whole is None for _, whole in opened) or not path.is_dir():
            raise why
    return opened, [str(why) for why in unread.values()]


def _cases(opened: Opened) -> tuple[tuple[CaseSpec, ...], dict[str, str]]:
    """All cases, and for those of shards that are not given, the shard."""
    start, first = opened[0]
    given: dict[int, RunFolder] = {}
    for folder, whole in opened:
        if whole is None or first is None:
            if whole is not first:
                names = ["no shard" if w is None else f"shard {w.shard}" for w in (whole, first)]
                raise UsageError(f"{folder.path} is {names[0]}, {start.path} is {names[1]}")
            continue
        if (whole.cut, whole.shard.number) != (first.cut, first.shard.number):
            raise UsageError(f"{folder.path} is shard {whole.shard} of another cut than "
                             f"{start.path}: expected the same scenarios and options")  # fmt: skip
        if (other := given.setdefault(whole.shard.index, folder)) is not folder:
            raise UsageError(f"{folder.path} is shard {whole.shard}, and so is {other.path}")
        commits = [str(each.manifest.get("commit") or "") for each in (folder, start)]
        if all(commits) and commits[0] != commits[1]:
            raise UsageError(f"{folder.path} was made by commit {commits[0]}, {start.path} by "
                             f"{commits[1]}: expected shards of one commit")  # fmt: skip
    if first is None:
        return tuple(case for folder, _ in opened for case in folder.cases), {}
    # As each shard planned them: only there is known what its machine had to skip.
    planned = {case.id: case for folder, _ in opened for case in folder.cases}
    missing = {name: f"{index}/{first.shard.number}" for index, ids in enumerate(first.shards, 1)
               if index not in given for name in ids}  # fmt: skip
    return tuple(planned.get(case.id, case) for case in first.cases), missing


def _held(folders: Sequence[RunFolder]) -> set[str]:
    """Ids of the cases that some folder has (`UsageError`: two have the same case or run)."""
    owners: dict[tuple[str, str], Path] = {}
    for folder in folders:
        things = [("case", case.id) for case in folder.cases]
        things += [("run", run.name) for run in (folder.path / "runs").glob("*")]
        for thing in things:
            if (other := owners.setdefault(thing, folder.path)) != folder.path:
                raise UsageError(f"{folder.path} holds the {' '.join(thing)}, and so does {other}: "
                                 "expected cases that differ")  # fmt: skip
    return {name for kind, name in owners if kind == "case"}


def _link_all(folders: Sequence[RunFolder], merged: RunFolder) -> None:
    for source in (folder.path / part for folder in folders for part in ("runs", "cases")):
        for path in source.rglob("*"):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise UsageError(f"merge: {path}: expected files and folders, got another kind")
        if source.is_dir():
            link_tree(source, merged.path / source.name)


def _manifest(opened: Opened, argv: Sequence[str], notes: list[str]) -> Mapping[str, Any]:
    manifests = [folder.manifest for folder, _ in opened]
    first = manifests[0]
    agreed = {key: first[key] for key in _OF_ALL
              if key in first and all(m.get(key) == first[key] for m in manifests)}  # fmt: skip
    merged = [
        {"shard": "" if whole is None else str(whole.shard)}
        | {key: said.get(key) for key in ("id", "created", "machine")}
        for said, (_, whole) in zip(manifests, opened, strict=True)
    ]
    names = dict.fromkeys(str(said.get("scenario", "")) for said in manifests)
    return {
        "scenario": "+".join(names), "why": "Several run folders, merged.", **agreed,
        "notes": [*agreed.get("notes", ()), *notes], "id": uuid.uuid4().hex,
        "created": max(str(said.get("created", "")) for said in manifests),
        "command": list(argv), "python": sys.version.split()[0], "merged": merged,
    }  # fmt: skip

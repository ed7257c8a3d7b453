"""The run folder: atomic writes, the lock, resume, sealed cases, and reading whatever is there."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import Infrastructure, UsageError
from harness.records import FOLDER_VERSION, CaseSpec, RunSpec, dumps
from harness.store import RunFolder, begin_run, kept_folders, load_case, save_outcome, set_aside
from harness.store import folder as store
from harness.store.files import with_checksum, write_atomic
from tests.support.fake_engine import Patch
from tests.support.records import case_spec, end, outcome, run_spec, verdict


def sealed(plain: dict[str, Any]) -> str:
    """What a file of one object holds."""
    return dumps(with_checksum(plain))


def spec(graph: tuple[str, ...] = (), replica: int = 0) -> RunSpec:
    return run_spec(2, config={"graph": list(graph), "steps": 2}, replica=replica)


def case(case_id: str = "one") -> CaseSpec:
    runs = (spec(), spec(replica=1), spec(("attn",)))
    return case_spec(case_id, *runs, labels={"graph": "attn"}, checks={"loss": {}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "out", {"scenario": "s"}, "name: s\r\n", [case()])


def finish(folder: RunFolder, run: RunSpec) -> None:
    begin_run(folder.run_folder(run.key), run)
    for rank in range(run.world_size):
        (folder.run_folder(run.key) / f"rank{rank}.jsonl").write_text("")
    save_outcome(folder.run_folder(run.key), outcome(run.key))


def test_open_gives_back_what_create_was_given(tmp_path: Path) -> None:
    """The same scenario bytes and cases; both say the same manifest: a tuple is not a list."""
    said = {"scenario": "s", "machine": {"gpus": ({"id": "GPU-1"},), "cores": 2}}
    made = RunFolder.create(tmp_path / "out", said, "name: s\r\n", [case()])
    again = RunFolder.open(tmp_path / "out")
    assert again.scenario_text == "name: s\r\n"
    assert again.cases == (case(),)
    machine = {"gpus": [{"id": "GPU-1"}], "cores": 2}
    due = {"scenario": "s", "schema": FOLDER_VERSION, "machine": machine}
    assert made.manifest == again.manifest == due


@pytest.mark.parametrize("kind", ["file", "used", "run folder", "same ids"])
def test_create_refuses_a_place_that_is_taken(tmp_path: Path, kind: str) -> None:
    """Nothing of the user's is overwritten, and a run folder is only continued by --resume."""
    path = tmp_path / "out"
    if kind == "file":
        path.write_text("mine")
    elif kind == "used":
        path.mkdir()
        (path / "thesis.tex").write_text("mine")
    elif kind == "run folder":
        RunFolder.create(path, {}, "", []).release()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        RunFolder.create(path, {}, "", [case()] * (1 + (kind == "same ids")))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_folder_is_one_once_all_of_it_is_written(tmp_path: Path, monkeypatch: Patch) -> None:
    """The manifest comes last; the remains of a creation that was killed do not block the next."""
    written: list[str] = []

    def note(path: Path, text: str) -> None:
        written.append(path.name)
        write_atomic(path, text)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lock").touch()
    (tmp_path / "out" / ".cases.json.77.tmp").write_text("{")
    with pytest.raises(UsageError, match="not a run folder"):
        RunFolder.open(tmp_path / "out")
    monkeypatch.setattr(store, "write_atomic", note)
    assert RunFolder.create(tmp_path / "out", {}, "", [case()]).cases == (case(),)
    assert written[-1] == "manifest.json"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("manifest.json", None, "not a run folder"),
        ("manifest.json", "{", "damaged"),
        ("manifest.json", "[]", "damaged"),
        ("manifest.json", "{}", "its checksum is gone"),
        ("manifest.json", sealed({"schema": FOLDER_VERSION}), "files: its checksum is gone"),
        ("manifest.json", sealed({"files": {}}), "by another harness"),
        ("manifest.json", sealed({"schema": FOLDER_VERSION + 1, "files": {}}), "another harness"),
        ("manifest.json", sealed({"schema": FOLDER_VERSION, "files": {}}), "yaml: changed"),
        ("cases.json", None, "damaged"),
        ("cases.json", "\x00", "damaged"),
        ("cases.json", "[" * 100_000, "damaged"),
        ("cases.json", '{"cases": [{"id": 3}]}', "damaged"),
        ("cases.json", '{"cases": 3}', "its checksum does not fit"),
        ("scenario.yaml", None, "damaged"),
    ],
)
def test_open_refuses_in_one_line(
    folder: RunFolder, name: str, text: str | None, told: str
) -> None:
    """Whatever is wrong with a folder is a usage error of one line that says what."""
    if text is None:
        (folder.path / name).unlink()
    else:
        (folder.path / name).write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        RunFolder.open(folder.path)
    assert "\n" not in str(caught.value)


def test_a_second_harness_is_refused_and_readers_are_not(folder: RunFolder) -> None:
    """The lock keeps out a second writer, names the first, and lets readers read."""
    script = (
        "import sys; from pathlib import Path; from harness.store import RunFolder\n"
        "from harness.errors import UsageError\n"
        "other = RunFolder.open(Path(sys.argv[1])); print(other.cases[0].id)\n"
        "try:\n    other.acquire()\nexcept UsageError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(folder.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    refused = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert refused.stdout.splitlines()[0] == "one"
    assert f"in use by another harness (process {os.getpid()} on" in refused.stdout
    folder.release()
    granted = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert granted.stdout.splitlines() == ["one"]


def test_a_folder_that_may_only_be_read_is_locked_too(
    folder: RunFolder, monkeypatch: Patch
) -> None:
    """As results on a medium that is mounted so: for a merge, by one at a time."""
    folder.release()
    given = os.open

    def read_only(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return given(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    first, second = RunFolder.open(folder.path), RunFolder.open(folder.path)
    first.acquire()
    with pytest.raises(UsageError, match="in use by another harness"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A full disk is one clear error; the file that was there is whole, no debris is left."""
    path = tmp_path / "verdict.json"
    write_atomic(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Infrastructure, match=r"cannot write .*verdict.json: No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["verdict.json"]


def test_set_aside_keeps_every_attempt(folder: RunFolder) -> None:
    """Remains of unfinished attempts are renamed one after the other, never overwritten."""
    key = spec().key
    assert set_aside(folder.run_folder(key)) is None
    for number in range(3):
        begin_run(folder.run_folder(key), spec())
        (folder.run_folder(key) / "rank0.jsonl").write_text(f"attempt {number}")
        set_aside(folder.run_folder(key))
    texts = {p.name: (p / "rank0.jsonl").read_text() for p in folder.path.glob("runs/*")}
    assert texts == {f"{key}.attempt{n}": f"attempt {n}" for n in range(3)}
    assert len(kept_folders(folder.run_folder(key))) == 3


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (None, "not_run", "was not made"),
        ("no file", "interrupted", "did not finish"),
        ("{", "interrupted", "does not decode"),
        ("", "interrupted", "does not decode"),
        (dumps(outcome("another")), "interrupted", "its checksum is gone"),
        (sealed(outcome(spec().key).to_json()), "interrupted", "files: its checksum is gone"),
        (sealed(outcome("another").to_json() | {"files": {}}), "interrupted", "to run another"),
        ('{"key": 3}', "interrupted", "does not decode"),
        (dumps(outcome(spec().key).to_json() | {"sha256": ""}), "interrupted", "does not fit"),
    ],
)
def test_a_run_without_a_trustworthy_outcome_is_unfinished(
    folder: RunFolder, text: str | None, what: str, why: str
) -> None:
    """Such a run is not counted as finished, and loading it says why instead of raising."""
    run = spec()
    if text is not None:
        begin_run(folder.run_folder(run.key), run)
    if text not in (None, "no file"):
        (folder.run_folder(run.key) / "outcome.json").write_text(str(text))
    assert folder.finished(run.key) is None
    result = folder.load_run(run)
    assert result.outcome.what == what
    assert why in result.outcome.message
    assert [(r.rank, r.start, r.steps) for r in result.ranks] == [(0, None, ()), (1, None, ())]


@pytest.mark.parametrize("links", [True, False])
def test_a_sealed_case_stands_alone(
    folder: RunFolder, tmp_path: Path, monkeypatch: Patch, links: bool
) -> None:
    """A case folder moved elsewhere, its run folder deleted, still gives the case and its runs."""
    if not links:

        def no_links(source: object, target: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    for run in (case().reference, case().control, case().candidate):
        finish(folder, run)
    with pytest.raises(Infrastructure, match="finished run already"):
        begin_run(folder.run_folder(spec().key), spec())
    place = folder.seal_case(case())
    same_inode = (place / "candidate" / "outcome.json").samefile(
        folder.run_folder(case().candidate.key) / "outcome.json"
    )
    assert same_inode is links
    folder.save_verdict(verdict(), case())
    place.rename(tmp_path / "elsewhere")
    (folder.path).rename(tmp_path / "gone")
    loaded = load_case(tmp_path / "elsewhere")
    assert loaded.case == case()
    legs = (loaded.reference, loaded.control, loaded.candidate)
    wanted = (case().reference, case().control, case().candidate)
    assert [leg.outcome.key for leg in legs] == [run.key for run in wanted]
    assert (tmp_path / "elsewhere" / "verdict.json").is_file()


def test_sealing_again_keeps_the_earlier_verdict(folder: RunFolder) -> None:
    """A case that is judged anew does not lose what it said; a missing leg is `not_run`."""
    finish(folder, case().reference)
    loaded = load_case(folder.seal_case(case()))
    assert (loaded.reference.outcome.what, loaded.candidate.outcome.what) == ("", "not_run")
    folder.save_verdict(verdict(), case())
    folder.seal_case(case())
    assert folder.load_verdict("one") is None
    assert (folder.path / "cases" / "one.attempt0" / "verdict.json").is_file()


@pytest.mark.parametrize("text", [None, "{", "[]", '{"id": 7}', dumps(case())])
def test_load_case_refuses_what_is_no_case(tmp_path: Path, text: str | None) -> None:
    """Anything but a case folder is one usage error."""
    if text is not None:
        (tmp_path / "case.json").write_text(text)
    with pytest.raises(UsageError):
        load_case(tmp_path)


def test_a_verdict_that_cannot_be_trusted_is_none(folder: RunFolder) -> None:
    """Without its checksum, without those of what it was made from, or of another case."""
    folder.save_verdict(verdict(), case())
    assert folder.load_verdict("one") == verdict()
    path = folder.case_folder("one") / "verdict.json"
    other = verdict("b").to_json() | {"files": {}}
    for text in (dumps(verdict()), sealed(verdict().to_json()), sealed(other)):
        path.write_text(text)
        assert folder.load_verdict("one") is None

    folder.save_verdict(verdict(), case())
    kept = set_aside(folder.case_folder("one"))
    assert kept is not None
    assert (kept / "verdict.json").is_file()
    assert folder.load_verdict("one") is None


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "x" * 300, "a\nb", "a\0"])
def test_names_stay_inside_the_folder(folder: RunFolder, name: str) -> None:
    """A case id from a hostile file cannot point outside of the run folder."""
    with pytest.raises(UsageError):
        folder.case_folder(name)


@pytest.mark.parametrize("damage", ["", "changed", "added"])
def test_files_that_are_not_as_when_the_run_ended_are_a_problem(
    folder: RunFolder, damage: str
) -> None:
    """A digit that changed in a line that still decodes, and a file that came later."""
    run = spec()
    place = folder.run_folder(run.key)
    begin_run(place, run)
    (place / "rank0.jsonl").write_text(f"{dumps(end())}\n")
    save_outcome(place, outcome(run.key))
    if damage == "changed":
        (place / "rank0.jsonl").write_text(f"{dumps(end(steps=3))}\n")
    elif damage == "added":
        (place / "rank1.jsonl").write_text(f"{dumps(end(1))}\n")
    flawed = [records.rank for records in folder.load_run(run).ranks if records.problems]
    assert flawed == {"": [], "changed": [0], "added": [1]}[damage]

"""What `check`, `report`, `show` and `merge` say of run folders with files gone or changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import main
from harness.records import RunSpec
from harness.runner import launch
from harness.store.contents import KeptTensor, write_contents
from tests.support.fake_engine import FakeEngine, run_json, unequal


class KeepingEngine(FakeEngine):
    """Ranks that keep the one weight there is."""

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        super().start(spec, folder, attempt=attempt)
        if spec.keep is None:
            return
        for rank in range(spec.world_size):
            data = b"held" * (1 + bool(spec.config["graph"]))
            about = KeptTensor(
                name=spec.keep.names[0], part=0, dtype="float32", shape=(len(data) // 4,),
                as_digested=True,
            )  # fmt: skip
            write_contents(folder, spec.key, rank, spec.keep.step, [(about, data)])


@pytest.fixture
def search(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A finished search whose second question kept contents."""
    keeping = KeepingEngine()
    monkeypatch.setattr(launch, "LocalEngine", keeping)
    keeping.spoil = unequal
    command = ["bisect", "small.yaml", "-k", "dp2 and attn", "--out", "b", "--until", "place"]
    assert run_json(capsys, *command)[0] == 1
    code, found = run_json(capsys, "check", "b")
    assert (code, found["damage"]) == (1, [])
    return Path("b")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damaged_contents_are_named(
    search: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    """Changed, cut, emptied or gone: the file is named, with what is wrong."""
    path = next(path for path in search.glob("runs/*attn*/rank1.contents"))
    damage(path)
    code, found = run_json(capsys, "check", str(search))
    (line,) = (line for line in found["damage"] if str(path.relative_to(search)) in line)
    assert ("missing" if damage is Path.unlink else "changed since it was written") in line
    assert code == 1


def test_a_copy_of_contents_is_that_of_its_run(
    search: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies in a case's folder is what its run has written."""
    path = next(iter(search.glob("cases/*/candidate/rank0.contents")))
    path.unlink()
    path.write_bytes(b"another")
    found = run_json(capsys, "check", str(search))[1]
    (line,) = found["damage"]
    assert line.startswith(f"{path.relative_to(search)}: changed since it was written")


def test_questions_are_checked(search: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their records, verdicts and cases, which are in no plan."""
    place = next(iter(search.glob("cases/*/candidate/rank0.contents"))).parents[1]
    flip(search / "runs" / run_json(capsys, "show", str(place))[1]["verdict"]["runs"]["candidate"] /
         "rank0.jsonl")  # fmt: skip
    flip(place / "verdict.json")
    found = run_json(capsys, "check", str(search))[1]
    names = {Path(line.partition(":")[0]).name for line in found["damage"]}
    assert names == {"rank0.jsonl", "verdict.json"}
    flip(place / "case.json")
    found = run_json(capsys, "check", str(search))[1]
    assert f"cases/{place.name}/case.json" in {line.partition(":")[0] for line in found["damage"]}


CASE = "dp2-attn"


def harness(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main(args)
    return (code, *capsys.readouterr())


@pytest.fixture
def run(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run folder of which every case passed."""
    assert harness(capsys, "run", "small.yaml", "--out", "r", "--no-history")[0] == 0
    return Path("r")


def test_a_case_whose_folder_is_gone_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its verdict is gone with it: check and report say whose, and neither ends with 0."""
    shutil.rmtree(run / "cases" / CASE)
    code, found = run_json(capsys, "check", "r")
    assert (code, found["unjudged"], found["exit_code"]) == (6, [CASE], 6)
    for command in ("check", "report"):
        code, out, err = harness(capsys, command, "r")
        assert (code, err) == (6, f"harness: no verdict: {CASE}\n")
        assert "as they were written" not in out


def test_a_run_that_is_gone_is_no_pass_anywhere(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check and show read a case's runs from the same place, so they say the same of it."""
    _, before = run_json(capsys, "show", CASE, "r")
    shutil.rmtree(run / "runs" / before["verdict"]["runs"]["candidate"])
    _, shown = run_json(capsys, "show", CASE, "r")
    assert (shown["verdict"]["outcome"], shown["verdict"]["what"]) == ("error", "not_run")
    code, found = run_json(capsys, "check", "r")
    (checked,) = (each for each in found["verdicts"] if each["case_id"] == CASE)
    assert (code, checked) == (6, shown["verdict"])


def test_cases_kept_without_any_run_are_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder from which `runs` was left out as a whole is judged by what lies with its cases."""
    shutil.rmtree(run / "runs")
    assert run_json(capsys, "show", CASE, "r")[1]["verdict"]["outcome"] == "passed"
    assert run_json(capsys, "check", "r")[0] == 0


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("unlinked", "verdict.json: missing"),
        ("cut", "verdict.json: "),
        ("other", "verdict.json is that of case dp1-attn"),
        ("no folder", "the case was not judged"),
    ],
)
def test_show_says_why_there_is_no_verdict(
    run: Path, capsys: pytest.CaptureFixture[str], damage: str, why: str
) -> None:
    """A verdict that cannot be read is no answer: its reason, and exit code 6."""
    path = run / "cases" / CASE / "verdict.json"
    match damage:
        case "unlinked":
            path.unlink()
        case "cut":
            path.write_text(path.read_text()[:40])
        case "other":
            shutil.copy(run / "cases" / "dp1-attn" / "verdict.json", path)
        case _:
            shutil.rmtree(path.parent)
    code, shown = run_json(capsys, "show", CASE, "r")
    assert (code, shown["verdict"]) == (6, None)
    assert shown["why"].startswith(why)
    code, out, _ = harness(capsys, "show", CASE, "r")
    assert code == 6
    assert f"no verdict: {why}" in out


def test_a_folder_is_not_merged_with_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever spelling it is given in."""
    code, _, err = harness(capsys, "merge", "r", "./r", "--out", "m")
    assert (code, err) == (4, "harness: merge: expected each run folder once, got r, r\n")

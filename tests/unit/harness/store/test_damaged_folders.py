"""Run folders that are damaged, forged or somebody else's: no pass, no secret, one line."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.masking import MASK
from harness.records import RunSpec, Verdict
from harness.runner import launch
from harness.runner.run import View, execute
from harness.store import RunFolder, set_aside
from harness.store.contents import write_contents
from harness.store.files import read_plain
from reports.text import tail
from tests.chaos import damage, good
from tests.chaos.damage import CASE, copy, examine, specimens
from tests.chaos.good import rewrite
from tests.support import records
from tests.support.fake_engine import SCENARIO, Cli, FakeEngine, Patch, unequal

SAMPLE = (
    "flip:manifest#0", "flip:cases#1", "flip:candidate#3", "flip:verdict#5", "truncate:reference",
    "a_link:candidate", "a_pipe:outcome", "huge:outcome", "denied:cases",
    "places:control_is_reference", "hands:other_run", "hands:world_of_a_billion",
    "forged over a crash:both_forged", "harmless:lock_left",
)  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good folders by kind."""
    root = tmp_path_factory.mktemp("good")
    return {kind: good.make(root / kind, kind) for kind in good.GOOD}


def test_the_corpus_is_large() -> None:
    """At least 200 kinds of damage, no name twice."""
    names = [specimen.name for specimen in specimens()]
    assert len(set(names)) == len(names) >= 200


@pytest.mark.parametrize("name", SAMPLE)
def test_a_damaged_folder_does_not_pass(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Check, report and resume: no pass, no traceback, the damaged file is named."""
    (specimen,) = (each for each in specimens() if each.name == name)
    assert examine(specimen, bases[specimen.base], tmp_path / "run") == []


def test_whole_folders_are_taken_as_they_are(bases: dict[str, Path]) -> None:
    """Nothing is damaged in a folder that is as it was written, whatever its verdicts."""
    for kind, expected in (("passed", 0), ("diverged", 1), ("nan", 1), ("crashed", 1)):
        code, out, err = good.harness("check", str(bases[kind]))
        assert (code, err) == (expected, "")
        assert "all files as they were written" in out


class KeepingEngine(FakeEngine):
    """Ranks that keep the one weight there is."""

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        super().start(spec, folder, attempt=attempt)
        if spec.keep is None:
            return
        for rank in range(spec.world_size):
            data = b"held" * (1 + bool(spec.config["graph"]))
            about = records.kept_tensor(spec.keep.names[0], (len(data) // 4,))
            write_contents(folder, spec.key, rank, spec.keep.step, [(about, data)])


@pytest.fixture
def search(cli: Cli, monkeypatch: Patch) -> Path:
    """A finished search whose second question kept contents."""
    keeping = KeepingEngine()
    monkeypatch.setattr(launch, "LocalEngine", keeping)
    keeping.spoil = unequal
    place = ("-k", "dp2 and attn", "--out", "b", "--until", "place")
    cli("bisect", "small.yaml", *place, code=1)
    assert cli.json("check", "b", code=1)["damage"] == []
    return Path("b")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damaged_contents_are_named(
    search: Path, cli: Cli, damage: Callable[[Path], object]
) -> None:
    """Changed, emptied or gone: the file is named, with what is wrong."""
    path = next(path for path in search.glob("runs/*attn*/rank1.contents"))
    damage(path)
    found = cli.json("check", "b", code=1)["damage"]
    (line,) = (line for line in found if str(path.relative_to(search)) in line)
    assert ("missing" if damage is Path.unlink else "changed since it was written") in line


def test_questions_are_checked(search: Path, cli: Cli) -> None:
    """Their records, verdicts and cases, which are in no plan."""
    place = next(iter(search.glob("cases/*/candidate/rank0.contents"))).parents[1]
    key = cli.json("show", str(place), code=None)["verdict"]["runs"]["candidate"]
    flip(search / "runs" / key / "rank0.jsonl")
    flip(place / "verdict.json")
    found = cli.json("check", "b", code=None)["damage"]
    assert {Path(line.partition(":")[0]).name for line in found} == {"rank0.jsonl", "verdict.json"}
    flip(place / "case.json")
    found = cli.json("check", "b", code=None)["damage"]
    assert f"cases/{place.name}/case.json" in {line.partition(":")[0] for line in found}


@pytest.fixture
def run(cli: Cli) -> Path:
    """A run folder of which every case passed."""
    cli("run", "small.yaml", "--out", "r", "--no-history")
    return Path("r")


def test_a_case_whose_folder_is_gone_is_named(run: Path, cli: Cli) -> None:
    """Its verdict is gone with it: check and report say whose, and neither ends with 0."""
    shutil.rmtree(run / "cases" / CASE)
    found = cli.json("check", "r", code=6)
    assert (found["unjudged"], found["exit_code"]) == ([CASE], 6)
    for command in ("check", "report"):
        out, err = cli(command, "r", code=6)
        assert err == f"harness: no verdict: {CASE}\n"
        assert "as they were written" not in out


def test_a_run_that_is_gone_is_no_pass_anywhere(run: Path, cli: Cli) -> None:
    """Check and show read a case's runs from the same place, so they say the same of it.

    A folder from which `runs` was left out as a whole is judged by what lies with its cases.
    """
    before = cli.json("show", CASE, "r", code=None)["verdict"]
    shutil.rmtree(run / "runs" / before["runs"]["candidate"])
    shown = cli.json("show", CASE, "r", code=None)["verdict"]
    assert (shown["outcome"], shown["what"]) == ("error", "not_run")
    verdicts = cli.json("check", "r", code=6)["verdicts"]
    assert [each for each in verdicts if each["case_id"] == CASE] == [shown]
    shutil.rmtree(run / "runs")
    assert cli.json("show", CASE, "r", code=None)["verdict"]["outcome"] == "passed"
    cli("check", "r")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (Path.unlink, "verdict.json: missing"),
        (lambda path: path.write_text(path.read_text()[:40]), "verdict.json: "),
        (lambda path: shutil.copy(path.parents[1] / "dp1-attn" / path.name, path),
         "verdict.json is that of case dp1-attn"),
        (lambda path: shutil.rmtree(path.parent), "the case was not judged"),
    ],
)  # fmt: skip
def test_show_says_why_there_is_no_verdict(
    run: Path, cli: Cli, damage: Callable[[Path], object], why: str
) -> None:
    """A verdict that cannot be read is no answer: its reason, and exit code 6."""
    damage(run / "cases" / CASE / "verdict.json")
    shown = cli.json("show", CASE, "r", code=6)
    assert (shown["verdict"], shown["why"][: len(why)]) == (None, why)
    assert f"no verdict: {why}" in cli("show", CASE, "r", code=6).out


@pytest.mark.usefixtures("run")
def test_a_folder_is_not_merged_with_itself(cli: Cli) -> None:
    """Whatever spelling it is given in."""
    said = cli.refused("merge", "r", "./r", "--out", "m")
    assert said == "harness: merge: expected each run folder once, got r, r\n"


SECRET = "correct-horse-battery-7"
ONE = SCENARIO.replace("[{dp: 1}, {dp: 2}]", "[{dp: 2}]").replace(", [full_iteration]", "")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of one case, which passed."""
    root = tmp_path_factory.mktemp("base")
    (root / "one.yaml").write_text(ONE)
    out = str(root / "r")
    assert good.harness("run", str(root / "one.yaml"), "--out", out, engine=FakeEngine())[0] == 0
    return root / "r"


@pytest.fixture
def made(engine: FakeEngine, base: Path) -> Path:
    """A copy of it, `r` in the working folder, beside its scenario."""
    Path("one.yaml").write_text(ONE)
    return copy(base, Path("r").absolute())


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    """A link shows nothing of what it points to; a pipe, that nobody writes to, keeps nobody."""
    kept, place = tmp_path / "kept", tmp_path / "rank0.stderr"
    kept.write_text("root:x:0:0")
    assert tail(kept)
    if kind == "link":
        place.symlink_to(kept)
    else:
        os.mkfifo(place)
    assert not tail(place)
    with pytest.raises(OSError, match=r"rank0\.stderr"):
        read_plain(place)


def without_layers(config: dict[str, Any]) -> None:
    del config["model"]["layers"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(without_layers, "lacks settings of model"),
     (lambda config: config["parallel"].update(dp=0), "dp: expected an integer >= 1"),
     (lambda config: config.update(model="dense_tiny"), "is of another version or damaged")],
)  # fmt: skip
@pytest.mark.parametrize("command", [("run", "--resume", "r"), ("rerun", CASE, "r")])
def test_a_plan_of_another_version_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, command: tuple[str, ...], made: Path,
    engine: FakeEngine, cli: Cli,
) -> None:  # fmt: skip
    """One line and exit 4, before anything runs, though all checksums fit."""
    edited = damage.in_plan(lambda case: change(case["candidate"]["config"]))
    edited(made, random.Random(0))
    path = made / "cases" / CASE / "case.json"
    plain = json.loads(path.read_bytes())
    change(plain["candidate"]["config"])
    rewrite(path, plain)
    assert said in cli.refused(*command)
    assert engine.made == []


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("command", [("check", "d"), ("merge", "d", "--out", "m")])
def test_a_pass_from_elsewhere_is_judged_again(
    command: tuple[str, ...], engine: FakeEngine, cli: Cli, monkeypatch: Patch
) -> None:
    """All checksums fit and records say otherwise: `check` and `merge` say so, and do not pass."""
    engine.spoil = unequal
    cli("run", "one.yaml", "--out", "d", code=1)
    rewrite(Path("d") / "cases" / CASE / "verdict.json", damage.FORGED)
    said = f"cases/{CASE}/verdict.json: says passed, but: w (weights)"
    assert said in cli(*command, code=1).err

    def no_layers(*args: Any, **more: Any) -> Verdict:
        raise KeyError("layers")

    monkeypatch.setattr("harness.cli.run.judge", no_layers)
    assert "its plan cannot be judged: KeyError" in cli("check", "r", code=6).err


@pytest.mark.parametrize("leg", ["reference", "control", "candidate"])
@pytest.mark.parametrize("of", ["run", "case", "copied case"])
def test_show_believes_no_damaged_record(of: str, leg: str, made: Path, cli: Cli) -> None:
    """Those of the run and those kept with the case, also of a case that was copied elsewhere."""
    case = RunFolder.open(made).cases[0]
    kept = made / "cases" / CASE / leg
    path = (made / "runs" / getattr(case, leg).key if of == "run" else kept) / "rank0.jsonl"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b'"step":3', b'"step":2', 1))
    args = [CASE, "r"]
    if of == "copied case":
        args = [str((made / "cases" / CASE).rename("elsewhere"))]
    verdict = cli.json("show", *args, code=None)["verdict"]
    assert (verdict["outcome"], verdict["what"]) == ("error", "corrupt_record")
    assert "rank0.jsonl: " in verdict["message"]


def broken(*args: Any, **more: Any) -> Any:
    """A mistake of our own that quotes a secret."""
    raise KeyError(SECRET)


def test_tracebacks_are_masked(
    made: Path, engine: FakeEngine, monkeypatch: Patch, cli: Cli
) -> None:
    """Our own mistakes quote values: no secret in their files, lines and verdicts."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET)
    folder = RunFolder.open(made)
    set_aside(folder.case_folder(CASE))
    (verdict,) = execute(folder, folder.cases, engine(slots=2), View(), judge=broken)
    folder.release()
    assert verdict.outcome == "error"
    engine.on_start = broken
    first = cli("run", "small.yaml", "--out", "engine", code=3).err
    monkeypatch.setattr(launch, "load_suite", broken)
    err = cli("run", "small.yaml", code=3).err
    elsewhere = Path(err.split("traceback: ")[1].rstrip().rstrip(")"))
    written = [
        verdict.message, (folder.case_folder(CASE) / "judge_error.txt").read_text(), first, err,
        Path("engine/internal_error.txt").read_text(), elsewhere.read_text(),
    ]  # fmt: skip
    elsewhere.unlink()
    assert [(SECRET in text, MASK in text) for text in written] == [(False, True)] * len(written)


def test_a_scenario_is_stored_without_secrets(cli: Cli, monkeypatch: Patch) -> None:
    """Its text is masked in every file; a resumed run knows it again."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET)
    told = SCENARIO.replace("A sentence", f"Needs {SECRET}") + f"# ghp_{'a1B2' * 9}\n"
    Path("small.yaml").write_text(told)
    cli("run", "small.yaml", "--out", "r", "-k", "dp1")
    files = [path for path in Path().rglob("*") if path.is_file() and path.name != "small.yaml"]
    data = b"".join(path.read_bytes() for path in files)
    assert (SECRET.encode() in data, b"ghp_" in data, b"Needs ***" in data) == (False, False, True)
    cli("run", "--resume", "r")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("data={kind: text, path: https://me:s3cr3tpass@host/x}", "data.path"),
        (f"taps=[layers.{SECRET.replace('-', '_')}]", "taps"),
    ],
)
def test_a_secret_that_runs_are_made_from_is_refused(
    setting: str, key: str, cli: Cli, monkeypatch: Patch
) -> None:
    """A setting cannot be masked and still make the same run: exit 4, and it is not quoted."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET.replace("-", "_"))
    err = cli("run", "small.yaml", "--out", "r", "--set", setting, code=4).err
    assert f"{key}: expected no secret" in err
    assert [word for word in ("battery", "s3cr3t") if word in err] == []
    assert not Path("r").exists()


@pytest.mark.parametrize("name", ["runs", "cases", "report"])
def test_nothing_is_written_through_links(name: str, made: Path, cli: Cli) -> None:
    """Folders that a run folder links to are somebody else's, and stay as they are."""
    other = Path("other").absolute()
    if (made / name).exists():
        (made / name).rename(other)
    else:
        other.mkdir()
    (made / name).symlink_to(other)
    before = sorted(other.rglob("*"))
    cli("report", "r", code=4)
    cli("run", "--resume", "r", "--no-history", code=4)
    assert sorted(other.rglob("*")) == before

"""Run folders that are damaged, forged or somebody else's: no pass, no secret, one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.cli import main
from harness.cli.output import stderr_tail
from harness.engine.collective_log import read_place
from harness.engine.evidence import tail_of
from harness.masking import MASK
from harness.records import RunSpec, Verdict
from harness.runner import launch
from harness.runner.run import Silent, execute
from harness.store import RunFolder
from harness.store.contents import KeptTensor, write_contents
from reports.reading import history_note
from reports.text import tail
from tests.damaged_folders import good, hands
from tests.damaged_folders.corpus import copy, examine, specimens
from tests.damaged_folders.kinds import CASE
from tests.damaged_folders.rewrite import rewrite
from tests.support.fake_engine import SCENARIO, Capsys, FakeEngine, Patch, run_json, unequal

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
            about = KeptTensor(
                name=spec.keep.names[0], part=0, dtype="float32", shape=(len(data) // 4,),
                as_digested=True,
            )  # fmt: skip
            write_contents(folder, spec.key, rank, spec.keep.step, [(about, data)])


@pytest.fixture
def search(engine: FakeEngine, capsys: Capsys, monkeypatch: Patch) -> Path:
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
    search: Path, capsys: Capsys, damage: Callable[[Path], object]
) -> None:
    """Changed, cut, emptied or gone: the file is named, with what is wrong."""
    path = next(path for path in search.glob("runs/*attn*/rank1.contents"))
    damage(path)
    code, found = run_json(capsys, "check", str(search))
    (line,) = (line for line in found["damage"] if str(path.relative_to(search)) in line)
    assert ("missing" if damage is Path.unlink else "changed since it was written") in line
    assert code == 1


def test_questions_are_checked(search: Path, capsys: Capsys) -> None:
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


def harness(capsys: Capsys, *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main(args)
    return (code, *capsys.readouterr())


@pytest.fixture
def run(engine: FakeEngine, capsys: Capsys) -> Path:
    """A run folder of which every case passed."""
    assert harness(capsys, "run", "small.yaml", "--out", "r", "--no-history")[0] == 0
    return Path("r")


def test_a_case_whose_folder_is_gone_is_named(run: Path, capsys: Capsys) -> None:
    """Its verdict is gone with it: check and report say whose, and neither ends with 0."""
    shutil.rmtree(run / "cases" / CASE)
    code, found = run_json(capsys, "check", "r")
    assert (code, found["unjudged"], found["exit_code"]) == (6, [CASE], 6)
    for command in ("check", "report"):
        code, out, err = harness(capsys, command, "r")
        assert (code, err) == (6, f"harness: no verdict: {CASE}\n")
        assert "as they were written" not in out


def test_a_run_that_is_gone_is_no_pass_anywhere(run: Path, capsys: Capsys) -> None:
    """Check and show read a case's runs from the same place, so they say the same of it."""
    _, before = run_json(capsys, "show", CASE, "r")
    shutil.rmtree(run / "runs" / before["verdict"]["runs"]["candidate"])
    _, shown = run_json(capsys, "show", CASE, "r")
    assert (shown["verdict"]["outcome"], shown["verdict"]["what"]) == ("error", "not_run")
    code, found = run_json(capsys, "check", "r")
    (checked,) = (each for each in found["verdicts"] if each["case_id"] == CASE)
    assert (code, checked) == (6, shown["verdict"])


def test_cases_kept_without_any_run_are_whole(run: Path, capsys: Capsys) -> None:
    """A folder from which `runs` was left out as a whole is judged by what lies with its cases."""
    shutil.rmtree(run / "runs")
    assert run_json(capsys, "show", CASE, "r")[1]["verdict"]["outcome"] == "passed"
    assert run_json(capsys, "check", "r")[0] == 0


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
    run: Path, capsys: Capsys, damage: Callable[[Path], object], why: str
) -> None:
    """A verdict that cannot be read is no answer: its reason, and exit code 6."""
    damage(run / "cases" / CASE / "verdict.json")
    code, shown = run_json(capsys, "show", CASE, "r")
    assert (code, shown["verdict"], shown["why"][: len(why)]) == (6, None, why)
    code, out, _ = harness(capsys, "show", CASE, "r")
    assert (code, f"no verdict: {why}" in out) == (6, True)


def test_a_folder_is_not_merged_with_itself(run: Path, capsys: Capsys) -> None:
    """Whatever spelling it is given in."""
    code, _, err = harness(capsys, "merge", "r", "./r", "--out", "m")
    assert (code, err) == (4, "harness: merge: expected each run folder once, got r, r\n")


SECRET = "correct-horse-battery-7"
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "report": ("rank0.stderr", tail),
    "leader": ("rank0.stderr", tail_of),
    "show": ("rank0.stderr", stderr_tail),
    "note": ("history_not_written.txt", lambda path: history_note(path.parent)),
    "place": ("rank0.place", read_place),
}


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


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_not_read(reader: str, kind: str, tmp_path: Path) -> None:
    """A link shows nothing of what it points to; a pipe, that nobody writes to, keeps nobody."""
    name, read = READERS[reader]
    kept = tmp_path / "kept"
    content = {
        "place": {"step": 1, "operator": "o", "label": "", "group": [0], "is_inside": True},
    }.get(reader, "root:x:0:0")
    kept.write_text(json.dumps(content))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_bytes(kept.read_bytes())
    assert read(tmp_path / "plain" / name)
    if kind == "link":
        (tmp_path / name).symlink_to(kept)
    else:
        os.mkfifo(tmp_path / name)
    assert not read(tmp_path / name)


def without_layers(config: dict[str, Any]) -> None:
    del config["model"]["layers"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(without_layers, "lacks settings of model"),
     (lambda config: config["parallel"].update(dp=0), "dp: expected an integer >= 1"),
     (lambda config: config.update(model="dense_tiny"), "is of another version or damaged")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["resume", "rerun"])
def test_a_plan_of_another_version_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, command: str,
    made: Path, engine: FakeEngine, capsys: Capsys,
) -> None:  # fmt: skip
    """One line and exit 4, before anything runs, though all checksums fit."""
    hands._plan(made, lambda case: change(case["candidate"]["config"]))
    path = made / "cases" / CASE / "case.json"
    plain = json.loads(path.read_bytes())
    change(plain["candidate"]["config"])
    rewrite(path, plain)
    ran = len(engine.made)
    capsys.readouterr()
    args = ["run", "--resume", "r"] if command == "resume" else ["rerun", CASE, "r"]
    assert cli.main(args) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert len(engine.made) == ran


@pytest.mark.parametrize("command", ["check", "merge"])
def test_a_pass_from_elsewhere_is_judged_again(
    command: str, engine: FakeEngine, made: Path, capsys: Capsys,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    """All checksums fit and records say otherwise: `check` and `merge` say so, and do not pass."""
    engine.spoil = unequal
    assert cli.main(["run", "one.yaml", "--out", "d"]) == 1
    rewrite(Path("d") / "cases" / CASE / "verdict.json", hands.FORGED)
    capsys.readouterr()
    assert cli.main(["check", "d"] if command == "check" else ["merge", "d", "--out", "m"]) == 1
    assert f"cases/{CASE}/verdict.json: says passed, but: w (weights)" in capsys.readouterr().err

    def no_layers(*args: Any, **more: Any) -> Verdict:
        raise KeyError("layers")

    monkeypatch.setattr("harness.cli.check.judge", no_layers)
    assert cli.main(["check", "r"]) == 6
    assert "its plan cannot be judged: KeyError" in capsys.readouterr().err


@pytest.mark.parametrize("leg", ["reference", "control", "candidate"])
@pytest.mark.parametrize("of", ["run", "case", "copied case"])
def test_show_believes_no_damaged_record(of: str, leg: str, made: Path, capsys: Capsys) -> None:
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
    verdict = run_json(capsys, "show", *args)[1]["verdict"]
    assert (verdict["outcome"], verdict["what"]) == ("error", "corrupt_record")
    assert "rank0.jsonl: " in verdict["message"]


def broken(*args: Any, **more: Any) -> Any:
    """A mistake of our own that quotes a secret."""
    raise KeyError(SECRET)


def test_tracebacks_are_masked(
    made: Path, engine: FakeEngine, monkeypatch: Patch,
    capsys: Capsys,
) -> None:  # fmt: skip
    """Our own mistakes quote values: no secret in their files, lines and verdicts."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET)
    folder = RunFolder.open(made)
    folder.set_case_aside(CASE)
    (verdict,) = execute(folder, folder.cases, engine(slots=2), Silent(), judge=broken)
    folder.release()
    assert verdict.outcome == "error"
    engine.on_start = broken
    assert cli.main(["run", "small.yaml", "--out", "engine"]) == 3
    monkeypatch.setattr(launch, "load_suite", broken)
    assert cli.main(["run", "small.yaml"]) == 3
    err = capsys.readouterr().err
    elsewhere = Path(err.split("traceback: ")[2].rstrip().rstrip(")"))
    written = [
        verdict.message, (folder.case_folder(CASE) / "judge_error.txt").read_text(), err,
        Path("engine/internal_error.txt").read_text(), elsewhere.read_text(),
    ]  # fmt: skip
    elsewhere.unlink()
    for text in written:
        assert SECRET not in text
        assert MASK in text


def test_a_scenario_is_stored_without_secrets(engine: FakeEngine, monkeypatch: Patch) -> None:
    """Its text is masked in every file; a resumed run knows it again."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET)
    told = SCENARIO.replace("A sentence", f"Needs {SECRET}") + f"# ghp_{'a1B2' * 9}\n"
    Path("small.yaml").write_text(told)
    assert cli.main(["run", "small.yaml", "--out", "r", "-k", "dp1"]) == 0
    data = b"".join(path.read_bytes() for path in Path().rglob("*") if path.is_file() and
                    path.name != "small.yaml")  # fmt: skip
    assert SECRET.encode() not in data
    assert b"ghp_" not in data
    assert b"Needs ***" in data
    assert cli.main(["run", "--resume", "r"]) == 0


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("data={kind: text, path: https://me:s3cr3tpass@host/x}", "data.path"),
        (f"taps=[layers.{SECRET.replace('-', '_')}]", "taps"),
    ],
)
def test_a_secret_that_runs_are_made_from_is_refused(
    setting: str, key: str, engine: FakeEngine, monkeypatch: Patch,
    capsys: Capsys,
) -> None:  # fmt: skip
    """A setting cannot be masked and still make the same run: exit 4, and it is not quoted."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET.replace("-", "_"))
    assert cli.main(["run", "small.yaml", "--out", "r", "--set", setting]) == 4
    err = capsys.readouterr().err
    assert f"{key}: expected no secret" in err
    assert "battery" not in err
    assert "s3cr3t" not in err
    assert not Path("r").exists()


@pytest.mark.parametrize("name", ["runs", "cases", "report"])
def test_nothing_is_written_through_links(name: str, made: Path, tmp_path: Path) -> None:
    """Folders that a run folder links to are somebody else's, and stay as they are."""
    other = tmp_path / "other"
    if (made / name).exists():
        (made / name).rename(other)
    else:
        other.mkdir()
    (made / name).symlink_to(other)
    before = sorted(other.rglob("*"))
    for command in (["report", "r"], ["run", "--resume", "r", "--no-history"]):
        assert cli.main(command) == 4
    assert sorted(other.rglob("*")) == before


def test_an_export_that_is_a_pipe_keeps_nobody(tmp_path: Path, capsys: Capsys) -> None:
    """What is imported is a plain file."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        history = str(tmp_path / "h.sqlite")
        assert cli.main(["history", "--import", str(path), "--history", history]) == 4
        assert "cannot be read" in capsys.readouterr().err

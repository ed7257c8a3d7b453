"""What lies in a run folder may come from anywhere: links, pipes, forged plans, told secrets."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.cli.output import stderr_tail
from harness.engine.collective_log import read_place
from harness.engine.evidence import tail_of
from harness.masking import MASK
from harness.records import Verdict
from harness.runner import launch
from harness.runner.run import Silent, execute
from harness.store import RunFolder
from reports.reading import history_note
from reports.text import tail
from tests.damaged_folders import good, hands
from tests.damaged_folders.corpus import copy
from tests.damaged_folders.kinds import CASE
from tests.damaged_folders.rewrite import rewrite
from tests.support.fake_engine import SCENARIO, FakeEngine, run_json, unequal

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
    made: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str],
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
    command: str, engine: FakeEngine, made: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
def test_show_believes_no_damaged_record(
    of: str, leg: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    made: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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


def test_a_scenario_is_stored_without_secrets(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    setting: str, key: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A setting cannot be masked and still make the same run: exit 4, and it is not quoted."""
    monkeypatch.setenv("DEPLOY_TOKEN", SECRET.replace("-", "_"))
    assert cli.main(["run", "small.yaml", "--out", "r", "--set", setting]) == 4
    err = capsys.readouterr().err
    assert f"{key}: expected no secret" in err
    assert "battery" not in err
    assert "s3cr3t" not in err
    assert not Path("r").exists()


@pytest.mark.parametrize(
    "file",
    ["manifest.json", "cases/*/case.json", "cases/*/verdict.json", "runs/*attn*/outcome.json"],
)
def test_a_checksum_that_is_gone_is_damage(
    file: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody took it away: such a file could say anything; a plan is believed by nobody."""
    (path,) = made.glob(file)
    plain = json.loads(path.read_bytes())
    for key in ("sha256", *(["files"] if file == "manifest.json" else [])):
        del plain[key]
    path.write_text(json.dumps(plain))
    plan = file == "manifest.json"
    for command in (["check", "r"], *([["run", "--resume", "r"], ["report", "r"]] if plan else [])):
        capsys.readouterr()
        assert cli.main(command) == (4 if plan else 6)
        assert f"{path.name}: its checksum is gone" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["rank0.jsonl", "files", "sha256"])
def test_forged_records_without_a_checksum_do_not_pass_on_resume(gone: str, made: Path) -> None:
    """Records changed, their checksum taken out of the outcome or with it: no pass, no history."""
    (path,) = made.glob("runs/*attn*/rank0.jsonl")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b'"step_s":0.01', b'"step_s":0.02'))
    outcome = path.with_name("outcome.json")
    plain = json.loads(outcome.read_bytes())
    if gone == "rank0.jsonl":
        del plain["files"][gone]
        rewrite(outcome, plain)
    else:
        del plain[gone]
        outcome.write_text(json.dumps(plain))
    for case in made.glob("cases/*"):
        shutil.rmtree(case)
    code = cli.main(["run", "--resume", "r"])
    # Without a trustworthy outcome the run is made again, and passes; its remains are kept.
    assert (code, len(list(made.glob("runs/*attn*.attempt0")))) == (
        (1, 0) if gone == "rank0.jsonl" else (0, 1)
    )


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


def test_an_export_that_is_a_pipe_keeps_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is imported is a plain file."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        history = str(tmp_path / "h.sqlite")
        assert cli.main(["history", "--import", str(path), "--history", history]) == 4
        assert "cannot be read" in capsys.readouterr().err

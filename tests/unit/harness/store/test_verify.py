"""Contracts of `harness check` over a folder of a search: questions and kept contents count."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import launch
from harness.records import RunSpec
from harness.store import save_outcome
from harness.store.contents import KeptTensor, write_contents
from tests.unit.harness.fake_engine import FakeEngine, run_json, unequal


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
        save_outcome(folder, self.ended[-1])  # of all files


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


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, "changed since it was written"),
        (cut, "changed since it was written"),
        (Path.unlink, "missing"),
        (lambda path: path.write_bytes(b""), "changed since it was written"),
    ],
)
def test_damaged_contents_are_named(
    search: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], told: str
) -> None:
    """Changed, cut, emptied or gone: the file is named, with what is wrong."""
    path = next(path for path in search.glob("runs/*attn*/rank1.contents"))
    damage(path)
    code, found = run_json(capsys, "check", str(search))
    lines = [line for line in found["damage"] if line.startswith(str(path.relative_to(search)))]
    assert len(lines) == 1
    assert told in lines[0]
    assert code == 1


def test_a_copy_of_contents_is_that_of_its_run(
    search: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies in a case's folder is what its run has written."""
    path = next(iter(search.glob("cases/*/candidate/rank0.contents")))
    path.unlink()
    path.write_bytes(b"another")
    found = run_json(capsys, "check", str(search))[1]
    assert found["damage"] == [f"{path.relative_to(search)}: not the file of the run"]


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

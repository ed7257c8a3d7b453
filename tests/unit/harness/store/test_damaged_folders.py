"""A sample of the damaged run folders; `python -m tests.damaged_folders` has all of them."""

import random
from pathlib import Path

import pytest

from tests.damaged_folders import good, strokes
from tests.damaged_folders.corpus import copy, examine, specimens
from tests.damaged_folders.evidence import evidence
from tests.damaged_folders.rewrite import rewrite

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


@pytest.mark.parametrize("name", sorted(strokes.STROKES))
def test_strokes_of_chance_damage_something(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Each kind changes a folder, the same way for the same seed, also one that is damaged."""
    (tmp_path / "other").symlink_to(bases["diverged"].parent)
    before = contents(bases["diverged"])
    changed = set()
    for seed in range(4):
        found = []
        for again in range(2):
            folder = copy(bases["diverged"], tmp_path / f"{seed}-{again}")
            rng = random.Random(seed)
            for _ in range(2):
                strokes.STROKES[name](folder, rng)
            found.append(contents(folder))
        assert found[0] == found[1]
        changed.add(found[0] != before)
    assert True in changed


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file that strokes look at."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in strokes.files(folder)}


def test_what_was_not_damaged_may_pass(bases: dict[str, Path], tmp_path: Path) -> None:
    """The oracle of random damage: evidence byte by byte, outcomes but for the attempt."""
    run = next((bases["passed"] / "runs").iterdir())
    folder = copy(run, tmp_path / "run")
    assert evidence(folder) == evidence(run)
    rewrite(folder / "outcome.json", {"attempt": 7})
    assert evidence(folder) == evidence(run)
    rewrite(folder / "outcome.json", {"what": "hang"})
    assert evidence(folder) != evidence(run)
    (folder / "rank7.jsonl").write_text("")
    assert evidence(folder)["rank7.jsonl"] == b""

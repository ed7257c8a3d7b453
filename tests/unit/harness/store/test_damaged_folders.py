"""A sample of the damaged run folders; `python -m tests.damaged_folders` has all of them."""

from pathlib import Path

import pytest

from tests.damaged_folders import good
from tests.damaged_folders.corpus import examine, specimens

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

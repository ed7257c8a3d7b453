"""An entry program whose step is captured, without a GPU: what passes, and what each fault is."""

import pytest

from harness.records import Verdict
from tests.support.entry_graph import verdicts_of_modes


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """The scenario over all modes of its program, by mode."""
    out = tmp_path_factory.mktemp("entry_graph") / "run"
    return verdicts_of_modes(out, ranks=2, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def test_replays_agree_with_eager_steps(verdicts: dict[str, Verdict]) -> None:
    """Under stressors; and all four replays of both ranks are counted."""
    verdict = verdicts["graph"]
    assert verdict.outcome == "passed", verdict.message
    (of_graphs,) = [check for check in verdict.checks if check.check == "graphs"]
    assert of_graphs.figures["replays"] == 8


def test_an_input_that_is_not_copied(verdicts: dict[str, Verdict]) -> None:
    """The loss names the rank, the state what it came to: gradients are summed over ranks."""
    verdict = verdicts["stale_input"]
    assert (verdict.outcome, verdict.what) == ("failed", "diverged")
    found = {check.check: check.difference for check in verdict.checks if check.difference}
    assert (found["loss"].step, found["loss"].rank) == (3, 1)
    assert (found["state"].step, found["state"].quantity) == (3, "grads")
    assert found["state"].tensor == "layers.0.weight"


def test_a_buffer_that_is_replaced(verdicts: dict[str, Verdict]) -> None:
    """The replay is refused, and the buffer has its name."""
    verdict = verdicts["replaced_buffer"]
    assert (verdict.outcome, verdict.what) == ("failed", "stale_address")
    assert ": scale: captured at " in verdict.message


def test_a_program_that_captures_nothing(verdicts: dict[str, Verdict]) -> None:
    """Its bits are eager's, and that proves nothing."""
    verdict = verdicts["nothing"]
    assert (verdict.outcome, verdict.what) == ("failed", "not_replayed")
    failing = [check.check for check in verdict.checks if check.outcome != "passed"]
    assert failing == ["graphs"]

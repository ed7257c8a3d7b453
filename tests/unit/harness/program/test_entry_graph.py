"""An entry program whose step is captured, without a GPU: what passes, and what each fault is."""

from pathlib import Path

from tests.support.entry_graph import verdicts_of_modes


def test_a_graphed_entry_and_its_faults(tmp_path: Path) -> None:
    """Under stressors replays agree with eager steps, and all four of both ranks are counted."""
    verdicts = verdicts_of_modes(
        tmp_path / "run", ranks=2, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )
    right = verdicts["graph"]
    assert right.outcome == "passed", right.message
    (of_graphs,) = [check for check in right.checks if check.check == "graphs"]
    assert of_graphs.figures["replays"] == 8
    # An input that is not copied: the loss names the rank, the state what it came to.
    stale = verdicts["stale_input"]
    assert (stale.outcome, stale.what) == ("failed", "diverged")
    found = {check.check: check.difference for check in stale.checks if check.difference}
    assert (found["loss"].step, found["loss"].rank) == (3, 1)
    of_state = found["state"]
    assert (of_state.step, of_state.quantity, of_state.tensor) == (3, "grads", "layers.0.weight")
    # A buffer that is replaced: the replay is refused, and the buffer has its name.
    replaced = verdicts["replaced_buffer"]
    assert (replaced.outcome, replaced.what) == ("failed", "stale_address")
    assert ": scale: captured at " in replaced.message
    # A program that captures nothing: its bits are eager's, and that proves nothing.
    nothing = verdicts["nothing"]
    assert (nothing.outcome, nothing.what) == ("failed", "not_replayed")
    assert [check.check for check in nothing.checks if check.outcome != "passed"] == ["graphs"]

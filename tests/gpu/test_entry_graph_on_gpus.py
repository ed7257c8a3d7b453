"""The captured entry program over CUDA graphs: the answers that it has on the CPU."""

from pathlib import Path

import pytest

from tests.support.entry_graph import verdicts_of_modes


@pytest.mark.gpu(1)
def test_a_captured_step_on_a_gpu(tmp_path: Path) -> None:
    """Eager's bits under stressors, and each fault by its name."""
    found = verdicts_of_modes(tmp_path / "run", ranks=1)
    assert {mode: verdict.what for mode, verdict in found.items()} == {
        "graph": "", "stale_input": "diverged",
        "replaced_buffer": "stale_address", "nothing": "not_replayed",
    }, {mode: verdict.message for mode, verdict in found.items()}  # fmt: skip
    replays = {check.check: check.figures.get("replays") for check in found["graph"].checks}
    assert replays["graphs"] == 4
    stale = {check.check: check.difference for check in found["stale_input"].checks}
    assert stale["loss"] is not None
    assert stale["loss"].step == 3

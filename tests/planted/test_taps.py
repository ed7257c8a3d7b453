"""Taps through the real engine: a changed weight is found in the first module that uses it."""

from pathlib import Path

from tests.planted.conftest import RunScenario

SCENARIO = """
name: taps
why: What went through modules says where a fault entered.
base:
  model: dense_tiny
  parallel: {pp: 2}
  steps: 5
  dtype: fp32
  microbatches: 1
  flush_every: 2
  taps: ["layers.*.attn.**:output", "layers.*:gradient"]
axes:
  plant:
    - none
    - {fault: positive_zero, step: 3, rank: last, tensor: layers.1.attn.attention.wk.weight}
  graph: [eager, [attn]]
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {state: {}, taps: {}}
"""


def test_the_module_that_used_a_changed_weight_first_is_named(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    """One weight set to zero: its linear's output, in the step after, on its stage's rank.

    Without the fault every call of every module is equal, replayed or not.
    """
    path = tmp_path / "taps.yaml"
    path.write_text(SCENARIO)
    judged = run_scenario(path)
    verdicts = {"zero" if "zero" in case.id else "none": verdict for case, verdict in judged}
    clean = {check.check: check for check in verdicts["none"].checks}
    assert verdicts["none"].outcome == "passed", verdicts["none"].message
    assert clean["taps"].figures["unseen"] == 0
    assert clean["taps"].figures["calls"] >= 5 * 2 * 7
    found = {check.check: check.difference for check in verdicts["zero"].checks}
    state, taps = found["state"], found["taps"]
    assert state is not None
    assert state.step == 3
    assert taps is not None
    assert (taps.step, taps.rank) == (4, 1)
    assert taps.tensor == "layers.1.attn.attention.wk:output[0]"

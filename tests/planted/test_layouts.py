"""The shipped layouts, cut to a pipeline of two ranks: the clean case passes, faults are named."""

from pathlib import Path

from tests.planted.conftest import RunScenario

LAYOUTS = Path(__file__).parents[2] / "scenarios/smoke/layouts.yaml"
PLANTS = """plant=[none, {fault: ulp, step: 3, rank: last},
                   {fault: stale_parameter, step: 3, rank: last}]"""


def test_a_pipeline_passes_and_faults_on_its_last_stage_are_named(
    run_scenario: RunScenario,
) -> None:
    """A layer of the last stage has its number in the whole model, in records and in ledgers."""
    judged = run_scenario(
        LAYOUTS, axes=("parallel=[{pp: 2}]", PLANTS), sets=("steps=4",), keyword="pp2"
    )
    verdicts = {case.id.split("-")[2]: verdict for case, verdict in judged}
    assert verdicts["unplanted"].outcome == "passed", verdicts["unplanted"].message
    changed = verdicts["ulp_s3_rlast"]
    assert (changed.outcome, changed.what) == ("failed", "diverged")
    difference = changed.difference
    assert difference is not None
    assert (difference.step, difference.rank, difference.tensor) == (3, 1, "norm.weight")
    stale = verdicts["stale_parameter_s3_rlast"]
    assert (stale.outcome, stale.what) == ("failed", "stale_address")
    assert "layers.1.attn.attention.wq.weight" in stale.message

"""The axis `engine` in scenarios: what is compared, planted and predicted, and where it can run."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ScenarioError
from harness.runner import plan as planning
from harness.runner.plan import make_plan
from tests.unit.harness.scenario.small_scenario import cases

AXIS: dict[str, Any] = {
    "base": {"steps": 4, "parallel": {"dp": 2}, "taps": ["norm"]},
    "axes": {"engine": ["fsdp2", "ours", "ddp", "megatron_fsdp"]},
    "compare": {"axis": "engine", "reference": "fsdp2", "expect": "bitwise"},
    "checks": {"loss": {}, "taps": {}, "finite": {}},
}


def test_engines_are_compared_by_what_ranks_share(tmp_path: Path) -> None:
    """Legs differ in the engine alone; the state, of which ranks hold other parts, is refused."""
    found = cases(tmp_path, **AXIS)
    assert [case.id for case in found] == ["ours", "ddp", "megatron_fsdp"]
    for case in found:
        assert case.candidate.config | {"engine": "fsdp2"} == case.reference.config
    with pytest.raises(ScenarioError, match=r"checks\.state: expected no state, as ranks of two"):
        cases(tmp_path, **(AXIS | {"checks": {"loss": {}, "state": {}}}))
    dtypes = {"axes": {"dtype": ["fp32", "bf16"]}, "checks": {"state": {}},
              "base": AXIS["base"] | {"engine": "ddp"},
              "compare": {"axis": "dtype", "reference": "fp32", "expect": "bitwise"}}  # fmt: skip
    assert len(cases(tmp_path, **dtypes)) == 1


def test_a_fault_in_our_engine_is_not_planted_in_another(tmp_path: Path) -> None:
    """Faults of data, weights, processes and records are."""
    for fault in ("zeroed_token", "ulp", "raise", "drop_step"):
        (case, *_) = cases(tmp_path, **_planted(fault))
        assert case.candidate.plant is not None
    for fault in ("stale_parameter", "moments_replaced", "step_count", "learning_rate"):
        with pytest.raises(ScenarioError, match=f"engine: expected ours, for {fault} to be"):
            cases(tmp_path, **_planted(fault))


def _planted(fault: str) -> dict[str, Any]:
    plant = {"fault": fault, "step": 1, "rank": 1}
    compare = {"axis": "plant", "reference": "none", "expect": "bitwise"}
    base = AXIS["base"] | {"engine": "fsdp2"}
    return AXIS | {"base": base, "axes": {"plant": ["none", plant]}, "compare": compare}


@pytest.mark.parametrize(
    ("device", "version", "reason"),
    [
        ("cpu", "0.6.1", "engine megatron_fsdp needs a GPU, this run is on cpu"),
        ("cuda", "", "engine megatron_fsdp needs megatron-fsdp, which is not installed"),
        ("cuda", "0.6.1", ""),
    ],
)
def test_megatron_fsdp_is_skipped_where_it_is_missing(
    device: str, version: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason; other engines run."""
    monkeypatch.setattr(planning, "package_version", lambda name: version)
    found = cases(tmp_path, **AXIS)
    for case in found:
        for spec in (case.reference, case.control, case.candidate):
            object.__setattr__(spec, "device", device)
    assert [case.skip_reason for case in make_plan(found, slots=4).cases] == ["", "", reason]

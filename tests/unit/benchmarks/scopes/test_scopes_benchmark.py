"""The benchmark of graph scopes: a scope with other bits than eager is never only fast."""

from dataclasses import replace

import pytest

from benchmarks.scopes import __main__ as scopes
from benchmarks.scopes.__main__ import EAGER, config_of, jobs, parser, table, wrong
from benchmarks.scopes.measure import Job, Result
from fsdp_core.config import ConfigError

LOSSES = ["40490fdb", "40490fda", "40490fd9"]


def result(scope: str, ms: float, losses: list[str], gib: float = 1.0) -> Result:
    """A measurement of two steps."""
    return Result(
        "launch", scope, 0, device="G", times_ms=[ms, ms], allocated_gib=gib, reserved_gib=2 * gib,
        losses=losses, graphs=1,
    )  # fmt: skip


def test_ratios_are_against_eager_of_the_same_workload() -> None:
    """Speed is eager's time over the scope's, memory the scope's over eager's."""
    eager, attn = result(EAGER, 10.0, LOSSES), result("attn", 4.0, LOSSES, gib=1.1)
    other = replace(eager, workload="compute", times_ms=[99.0])
    line = next(line for line in table([eager, attn, other]) if "| attn |" in line)
    assert [cell.strip() for cell in line.split("|")[3:-1]] == [
        "1", "4.00", "2.50", "1.100", "1.10", "2.200", "1.10", "",
    ]  # fmt: skip


def test_other_bits_than_eager_are_said_with_their_step() -> None:
    """One bit of one loss is enough, and minus zero is not zero."""
    eager = [result(EAGER, 10.0, ["00000000", *LOSSES])]
    assert wrong([result("attn", 4.0, ["00000000", *LOSSES])], eager) == ""
    assert "from step 0" in wrong([result("attn", 4.0, ["80000000", *LOSSES])], eager)
    changed = ["00000000", LOSSES[0], "40490fdb", LOSSES[2]]
    assert "from step 2" in wrong([result("attn", 4.0, changed)], eager)


def test_a_scope_that_failed_is_in_the_table() -> None:
    """Its error stands where its figures would."""
    lines = table([result(EAGER, 10.0, LOSSES), Result("launch", "moe", 0, "rank 1 hung")])
    assert "| launch | moe |" in lines[-1]
    assert "rank 1 hung" in lines[-1]


def test_scopes_that_a_model_cannot_have_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of experts alone has no dense branch; the reason is printed once."""
    chosen = parser().parse_args(["--workload", "launch", "--only", EAGER, "mlp"])
    chosen.ranks = 4
    assert {job.scope for _, job in jobs(chosen)} == {EAGER}
    assert capsys.readouterr().out.count("launch mlp: not measured: ") == 1
    with pytest.raises(ConfigError, match="no scope mlp"):
        config_of("launch", "mlp", chosen)


def test_a_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 where a scope failed or has other bits, 0 where all is well."""

    def run(losses: list[str]) -> int:
        def measure(job: Job, number: int) -> Result:
            kept = LOSSES if job.scope == EAGER else losses
            return replace(result(job.scope, 1.0, kept), number=number)

        monkeypatch.setattr(scopes, "measure", measure)
        arguments = ["--device", "cpu", "--tiny", "--workload", "launch", "--only", EAGER, "attn"]
        return scopes.main(arguments)

    assert run(LOSSES) == 0
    assert run([*LOSSES[:2], "40490fdb"]) == 1

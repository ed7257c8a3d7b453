"""The benchmark of graph scopes: a scope with other bits than eager is never only fast."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.room import MEANINGLESS
from benchmarks.scopes import __main__ as scopes
from benchmarks.scopes.__main__ import EAGER, WORKLOADS, config_of, parser, table, wrong
from benchmarks.scopes.layouts import usual_layout
from benchmarks.scopes.measure import Job, Result, measure

LOSSES = ["40490fdb", "40490fda", "40490fd9"]


def result(scope: str, ms: float, losses: list[str], gib: float = 1.0) -> Result:
    """A measurement of two steps."""
    return Result(
        "launch", "dp8", scope, 0, device="G", times_ms=[ms, ms],
        allocated_gib=gib, reserved_gib=2 * gib, losses=losses, graphs=1,
    )  # fmt: skip


def test_ratios_are_against_eager_of_the_same_workload() -> None:
    """Speed is eager's time over the scope's, memory the scope's over eager's."""
    eager, attn = result(EAGER, 10.0, LOSSES), result("attn", 4.0, LOSSES, gib=1.1)
    other = replace(eager, workload="compute", times_ms=[99.0])
    line = next(line for line in table([eager, attn, other]) if "| attn |" in line)
    assert [cell.strip() for cell in line.split("|")[4:-1]] == [
        "1", "4.00", "2.50", "1.100", "1.10", "2.200", "1.10", "",
    ]  # fmt: skip


def test_other_bits_than_eager_are_said_with_their_step() -> None:
    """One bit of one loss is enough, and minus zero is not zero."""
    eager = [result(EAGER, 10.0, ["00000000", *LOSSES])]
    assert wrong([result("attn", 4.0, ["00000000", *LOSSES])], eager) == ""
    assert "from step 0" in wrong([result("attn", 4.0, ["80000000", *LOSSES])], eager)
    changed = ["00000000", LOSSES[0], "40490fdb", LOSSES[2]]
    assert "from step 2" in wrong([result("attn", 4.0, changed)], eager)


def test_a_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 where a scope failed or has other bits, 0 where all is well."""

    def run(losses: list[str]) -> int:
        def measure(job: Job, number: int) -> Result:
            kept = LOSSES if job.scope == EAGER else losses
            return replace(result(job.scope, 1.0, kept), layout=job.layout, number=number)

        monkeypatch.setattr(scopes, "measure", measure)
        arguments = ["--device", "cpu", "--tiny", "--workload", "launch", "--only", EAGER, "attn"]
        return scopes.main(arguments)

    assert run(LOSSES) == 0
    assert run([*LOSSES[:2], "40490fdb"]) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("tiny", [True, False])
def test_every_workload_runs_on_up_to_eight_ranks(workload: str, ranks: int, tiny: bool) -> None:
    """Experts, heads and widths divide over the ranks of the usual layout, small or not."""
    chosen = parser().parse_args(["--tiny"] if tiny else [])
    layout = usual_layout(ranks, has_experts="experts" in WORKLOADS[workload])
    assert config_of(workload, layout, EAGER, chosen).parallel.world_size == ranks


def test_losses_of_every_rank_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another bit on the last rank alone is another loss."""
    job = Job("launch", "dp2", EAGER, {}, 2, 1, (), 9.0)
    figures = {"device": "G", "times_ms": [1.0], "allocated_gib": 1, "reserved_gib": 1, "graphs": 0}

    def ranks_write(last: str) -> Result:
        def run_ranks(target: Any, given: tuple[Job], *_: Any, **__: Any) -> tuple[None, str]:
            for rank, loss in enumerate((LOSSES[0], last)):
                text = json.dumps(figures | {"losses": [loss]})
                Path(given[0].folder, f"rank{rank}.json").write_text(text)
            return None, ""

        monkeypatch.setattr("benchmarks.scopes.measure.run_ranks", run_ranks)
        return measure(job, 0)

    assert wrong([ranks_write(LOSSES[0])], [ranks_write(LOSSES[0])]) == ""
    assert "from step 0" in wrong([ranks_write(LOSSES[1])], [ranks_write(LOSSES[0])])


def test_times_of_shared_gpus_are_called_meaningless() -> None:
    """The head of the table says so, and no ratio of times is in it."""
    found = [result(EAGER, 10.0, LOSSES), result("attn", 4.0, LOSSES)]
    head, _, *lines = table(found, shares_gpus=True)
    assert MEANINGLESS in head
    assert "2.50" not in lines[1]

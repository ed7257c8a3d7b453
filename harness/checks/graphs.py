"""CUDA graphs of a program that the harness did not write: were they replayed, and safely?

A program whose candidate is meant to be graphed and captures nothing would agree by testing
nothing, so a scenario can ask for replays. What the recorder finds is a failure whether it asks or
not: a gradient or an activation in a graph's static memory that a replay overwrites while it is in
use.
"""

from collections.abc import Mapping

from harness.checks.answer import error, failed, passed
from harness.checks.evidence import count, rank_table
from harness.records import CheckResult, Difference, RankRecords, RunResult

NAME = "graphs"
SUMMARY_EVENT = "cuda_graphs"
FINDINGS = ("static_gradient", "static_activation")


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Look at the candidate's replays and at what was found on them, rank by rank."""
    least = parameters.get("min_replays", 0)
    assert isinstance(least, int)
    table = rank_table(candidate)
    if not table:
        return error(NAME, "not_run", "the candidate recorded nothing: nothing to look at")
    for rank, records in table.items():
        for event in records.events:
            if event.name in FINDINGS:
                return _found(rank, event.step, event.name, event.detail)
    replays = {rank: records.end.replays if records.end else 0 for rank, records in table.items()}
    lacking = [rank for rank, number in replays.items() if number < least]
    if lacking:
        rank = lacking[0]
        return failed(
            NAME,
            "not_replayed",
            f"rank {rank} replayed CUDA graphs {replays[rank]} times, expected at least {least}: "
            f"{_told(table[rank])}",
            Difference(step=0, rank=rank, quantity="replays", reference=str(least),
                       candidate=str(replays[rank])),
        )  # fmt: skip
    total = sum(replays.values())
    return passed(NAME, f"{count(total, 'replay')} of CUDA graphs on {len(table)} ranks",
                  replays=total)  # fmt: skip


def _found(rank: int, step: int, name: str, detail: Mapping[str, object]) -> CheckResult:
    graph = f"graph {detail.get('graph')} of {detail.get('maker')}, {detail.get('place')}"
    tensor = str(detail.get("parameter", ""))
    if name == "static_gradient":
        told = (
            f"the gradient of {tensor} lies in the static memory of {graph}: replay "
            f"{detail.get('replay')} overwrites it while microbatches are accumulated in it"
        )
    else:
        told = (
            f"{graph}, is a backward pass whose forward graph was replayed again before it: it "
            f"reads the activations of the later replay"
        )
    difference = Difference(step=step, rank=rank, quantity=name, tensor=tensor)
    return failed(NAME, "static_buffer", f"rank {rank}, step {step}: {told}", difference)


def _told(records: RankRecords) -> str:
    for event in records.events:
        if event.name == SUMMARY_EVENT:
            graphs = event.detail.get("graphs")
            return f"it captured {len(graphs)} graphs" if isinstance(graphs, list) else ""
    return "it captured none"

"""The shipped planted scenarios through the real engine and worker: every fault gets its name."""

import errno
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from harness.bisect.render import make_search_view
from harness.bisect.session import Search, bisect
from harness.checks import exit_code, judge
from harness.engine.local import LocalEngine
from harness.faults.catalogue import CATALOGUE
from harness.records import CaseSpec, ExitCode, RunSpec
from harness.runner import launch
from harness.runner.run import View, earlier_attempts, execute
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
from harness.scenario.suite import find_scenarios
from harness.store import RunFolder
from harness.terminal import make_console
from reports.reading import summarise
from tests.chaos.kills import Matrix, torment
from tests.planted import stub_ranks
from tests.planted.conftest import RunScenario
from tests.support import records

ROOT = Path(__file__).parents[2]
SCENARIOS = find_scenarios([ROOT / "scenarios/planted.yaml"])
LAYER = "model.layers=1"
CHEAPER = {
    "wrong_values": (LAYER, "parallel.dp=2", "microbatches=1", "steps=8"),
    "stale_address": (LAYER, "steps=6"),
    "lost_records": (LAYER, "steps=6"),
    "dead_ranks": (LAYER, "steps=5"),
    "rounding": (),  # a fault of its second layer
}
"""What a scenario can do without to name the same faults: ranks, layers, microbatches, steps."""
FEWER = {
    "wrong_values": ("graph=[eager, [full_iteration]]",), "missed_work": ("graph=[eager, [attn]]",),
    "rounding": ("compile=[none, [mlp]]",),
}  # fmt: skip
"""One candidate sees each fault."""


def name_of(path: Path) -> str:
    """Of a planted scenario."""
    return path.name.partition("::planted_")[2]


def planted_fault(case: CaseSpec) -> str:
    """The fault in a case's candidate, "" if there is none."""
    return case.candidate.plant.fault if case.candidate.plant else ""


@pytest.mark.parametrize("path", SCENARIOS, ids=name_of)
def test_every_fault_is_named_and_the_clean_cases_pass(
    path: Path, run_scenario: RunScenario
) -> None:
    """Each verdict names what the catalogue expects; what cannot be planted here is skipped."""
    sets, axes = CHEAPER.get(name_of(path), (LAYER,)), FEWER.get(name_of(path), ())
    judged = run_scenario(path, sets=sets, axes=axes)
    for case, verdict in judged:
        fault = planted_fault(case)
        if not fault:
            assert verdict.outcome == "passed", verdict.message
        elif "cpu" not in CATALOGUE[fault].devices:
            assert verdict.outcome == "skipped", verdict.message
        else:
            assert verdict.outcome == "failed", (fault, verdict.message)
            assert verdict.what in CATALOGUE[fault].expects, (fault, verdict.message)
    assert "" in {planted_fault(case) for case, _ in judged}
    assert exit_code([verdict for _, verdict in judged]) == ExitCode.FAILED


# --- `harness bisect` through the real engine: the first wrong operator of somebody's program -----


MIX = """
import torch

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None

class Mix(torch.nn.Linear):
    def forward(self, x):
        return self.mixed(super().forward(x)) + x

    def mixed(self, y):
        return Scale.apply(torch.softmax(y, self.dim), self.factor)

def main(dim=1, factor=1.0):
    torch.manual_seed(0)
    mix = Mix(4, 4)
    mix.dim, mix.factor = dim, factor
    torch.nn.init.zeros_(mix.weight)
    torch.nn.init.zeros_(mix.bias)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), mix)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
"""
SCENARIO = {
    "name": "mix", "why": "An operator.", "program": {"entry": "mix:main", "ranks": 1, "steps": 1},
    "axes": {"args": [{}, {"dim": 0}, {"factor": 0.5}]},
    "compare": {"axis": "args", "reference": {}, "expect": "bitwise"},
    "checks": {"loss": {}, "state": {}, "finite": {}},
}  # fmt: skip
WHERE = [("forward", "aten._softmax.default", ["29 main", "16 Mix.forward", "19 Mix.mixed"], 2.0),
         ("backward", "aten.mul.Tensor", ["29 main", "12 Scale.backward"], 0.5)]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_wrong_operator_has_its_stack_and_its_values(
    tmp_path: Path, warm_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Frames of the program alone; what it took is equal, and the bits of what it gave are exact:
    a softmax of zeros over 2 rows in place of 4 columns, a gradient of half."""
    monkeypatch.setattr(launch, "make_engine", lambda _: warm_engine)
    monkeypatch.setattr(warm_engine, "close", lambda: None)
    (tmp_path / "mix.py").write_text(MIX)
    path = tmp_path / "mix.yaml"
    path.write_text(json.dumps(SCENARIO))
    case = expand(load_scenario(path), "cpu")[number]
    search = Search(case=case, place=None, out=tmp_path / "out", until="place")
    findings, _ = bisect(search, make_search_view(make_console(stderr=True)))
    place, (phase, operator, stack, ratio) = findings.place, WHERE[number]
    assert place is not None
    assert (place.module, place.phase) == ("1", phase)
    found = place.operator
    assert found is not None
    for call in (found.reference, found.candidate):
        assert call is not None
        frames = [each for each in call.stack if not each.startswith("hasty_worker.py")]
        assert (call.operator, frames) == (operator, [f"mix.py:{each}" for each in stack])
    took, gave = found.values
    assert (took.name, took.element, gave.name) == ("input 0", None, "output 0")
    assert took.reference == took.candidate is not None
    assert gave.element is not None
    e = gave.element
    ours, theirs = (
        struct.unpack(">f", bytes.fromhex(bits))[0] for bits in (e.reference_bits, e.candidate_bits)
    )
    assert theirs == ratio * ours != 0


# --- a port that is taken at the first attempt only: made again by the real engine, and told so ---


ENTRY = "tests.planted.test_scenarios:rank_main"
CANDIDATE = 1
"""Its seed."""


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """As a stub rank, but in the candidate's first attempt, where rank 1 finds its port taken."""
    first = not folder.with_name(f"{folder.name}.attempt0").exists()
    if not (spec.config["seed"] == CANDIDATE and first):
        return stub_ranks.rank_main(spec, folder, rank, store_port)
    stream = stub_ranks.Stream(folder, rank)
    stream.write(stub_ranks.start_record(spec, rank))
    told = "The server socket has failed to listen on any local network address. port: 29500, "
    told += f"code: -98, name: {errno.errorcode[errno.EADDRINUSE]}, message: address already in use"
    about: dict[str, Any] = {"message": told} if rank == 1 else {"message": "refused", "blames": 1}
    stream.write(records.error(rank, step=-1, type="DistNetworkError", **about))
    return 1


def run(seed: int, replica: int = 0) -> RunSpec:
    config = {"steps": 1, "microbatches": 1, "seed": seed, "parallel": {"dp": 2}}
    return RunSpec(config=config, device="cpu", world_size=2, timeout_s=60.0, replica=replica)


def test_a_plant_of_the_first_attempt_is_passed_on_attempt_two(tmp_path: Path) -> None:
    """Real ranks fail once for the machine's sake; the case passes, and every attempt is kept."""
    case = records.case_spec("case", run(0), run(0, 1), run(CANDIDATE), checks={"loss": {}})
    folder = RunFolder.create(tmp_path / "out", {}, "", [case])
    with LocalEngine(2, entry=ENTRY) as engine:
        (verdict,) = execute(folder, [case], engine, View(), retries=1, judge=judge)
    folder.release()
    assert verdict.outcome == "passed", verdict.message
    (attempt,) = earlier_attempts(folder, case.candidate)
    assert (attempt.what, attempt.signature) == ("crashed", "port_in_use")
    final = folder.finished(case.candidate.key)
    assert final is not None
    assert (final.what, final.attempt) == ("", 1)
    (told,) = summarise(folder.path).cases
    assert told.attempt_words == "passed on attempt 2 (candidate: port_in_use)"


# --- taps through the real engine: a changed weight is found in the first module that uses it -----


TAPPED = """
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
    path.write_text(TAPPED)
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


# --- kill -9 of the harness in mid-matrix, then --resume: nothing is repeated and nothing is lost -


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    """Harness, forkserver, leader or rank: what is finished stays, the reports end up the same."""
    whole = Matrix(tmp_path / "whole", seeds=2)
    assert whole.to_the_end() == ""
    killed = Matrix(tmp_path / "killed", seeds=2)
    found = torment(killed, 2, random.Random(3), longest_s=0.5, expected=whole.report())
    assert found.problems == []
    assert found.kills.total() == 2

"""`harness bisect` through the real engine: the first wrong operator of somebody's program."""

import json
import struct
from pathlib import Path

import pytest

from harness.bisect.render import make_search_view
from harness.bisect.session import Search, bisect
from harness.engine.local import LocalEngine
from harness.runner import launch
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
from harness.terminal import make_console

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

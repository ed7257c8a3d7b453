"""`expect: rounding` of a training script of two ranks: what is within, what is beyond."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.store import RunFolder

TRAIN = """
import argparse, torch, torch.distributed as dist
from torch import nn
parser = argparse.ArgumentParser()
for name in ("reversed", "wide", "twice", "scaled"):
    parser.add_argument("--" + name, action="store_true")
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=not options.reversed)
for step in range(5):
    for part in range(2):
        seed = 100 * step + 10 * (part and not options.twice) + dist.get_rank()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        squares = (model(x) - x.mean(1, keepdim=True)).square()
        if options.wide:
            squares = squares.double()
        if options.reversed:
            loss = sum(squares.flip(0).unbind()).sum() / 32
        else:
            loss = squares.mean()
        (loss.float() / 2).backward()
    if options.scaled:
        for parameter in model.parameters():
            parameter.grad *= 1 + 2**-7
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def outcomes(folder: Path, expect: str, variants: list[dict[str, bool]]) -> list[dict[str, Any]]:
    """Verdicts of variants of `TRAIN` against itself, in their order."""
    (folder / "train.py").write_text(TRAIN)
    plain = {
        "name": "toy", "why": "A toy.", "program": {"script": "train.py", "ranks": 2, "steps": 5},
        "axes": {"args": [{}, *variants]},
        "compare": {"axis": "args", "reference": {}, "expect": expect},
        "checks": {"loss": {}, "state": {}, "finite": {}},
        "launch": {"device": "cpu", "timeout_s": 240},
    }  # fmt: skip
    (folder / "toy.yaml").write_text(json.dumps(plain))
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", "toy.yaml", "--out", expect, "--no-history"],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    with RunFolder.open(folder / expect) as made:
        found = [made.load_verdict(case.id) for case in made.cases]
    return [each.to_json() for each in found if each is not None]


def test_another_order_is_within_rounding_and_faults_are_not(tmp_path: Path) -> None:
    """Bits differ of a sum in another order and in float64; both are within, two faults beyond.

    One microbatch that is counted twice shows in the losses of step 0, gradients that are 2^-7 too
    large in their norm. All cases share six samples.
    """
    right: list[dict[str, bool]] = [{"reversed": True}, {"wide": True}]
    bits = outcomes(tmp_path, "bitwise", right[:1])
    assert [each["outcome"] for each in bits] == ["failed"]
    wrong = [{"reversed": True, "twice": True}, {"wide": True, "scaled": True}]
    verdicts = outcomes(tmp_path, "rounding", right + wrong)
    assert [each["outcome"] for each in verdicts] == ["passed", "passed", "failed", "failed"]
    assert len(list((tmp_path / "rounding" / "runs").iterdir())) == 2 + 4 + 6
    for verdict, quantity in zip(verdicts[2:], ("loss", "grad_norm"), strict=True):
        assert verdict["what"] == "diverged"
        assert verdict["difference"]["step"] == 0
        assert verdict["difference"]["quantity"] == quantity
    for verdict in verdicts[:2]:
        loss = next(each for each in verdict["checks"] if each["check"] == "loss")
        assert 0 < loss["figures"]["largest_gap"] < 1

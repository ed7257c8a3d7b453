"""Programs of users through `harness run`: two ranks of a script, and a function."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.records import Verdict
from harness.store import read_verdict
from harness.store.streams import read_rank

PROGRAM = """
import argparse, os
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(mode="plain"):
    torch.manual_seed(0)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=mode != "loop")
    mark = Path(__file__).with_name("rare.mark")
    if mode == "rare" and rank == 1 and mark.exists():
        mark.unlink()  # whoever comes first
        mode = "planted"
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.full((2, 4), 1.0 + step + rank)
        if mode == "planted" and (step, rank) == (2, 1):
            batch[0, 0] += 2**-18
        model(batch).square().mean().backward()
        optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    main(parser.parse_args().mode)
"""
SCENARIO = """
name: {name}
why: A program of a user, end to end.
program: {{{kind}, ranks: {ranks}, steps: 4, taps: ["*:input"]}}
axes: {{args.mode: {modes}}}
compare: {{axis: args.mode, reference: plain, expect: bitwise}}
checks: {{loss: {{}}, state: {{}}, taps: {{}}, finite: {{}}}}
launch: {{device: cpu, timeout_s: 120, confirm: true}}
"""


def run(folder: Path, **keys: Any) -> tuple[int, dict[str, Verdict], Path]:
    """Exit code, verdicts by the candidate's mode, and the folder of a scenario's run."""
    (folder / "train.py").write_text(PROGRAM)
    scenario = folder / f"{keys['name']}.yaml"
    scenario.write_text(SCENARIO.format(**keys))
    out = folder / keys["name"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DELTA")}
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(scenario), "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=240,
        env=environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    verdicts = {}
    for path in out.glob("**/verdict.json"):
        verdict = read_verdict(path.parent, json.loads(path.read_text())["case_id"])
        assert verdict is not None
        verdicts[verdict.case_id] = verdict
    assert verdicts, done.stdout + done.stderr
    return done.returncode, verdicts, out


def test_two_ranks_of_a_script(tmp_path: Path) -> None:
    """A neutral change passes; step, rank and tensor of a planted difference are fields.

    A rare difference fails as well, and the confirmation tells it from one that always is.
    """
    (tmp_path / "rare.mark").touch()
    code, verdicts, _ = run(tmp_path, name="of_script", kind="script: train.py", ranks=2,
                            modes="[plain, loop, planted, rare]")  # fmt: skip
    loop, planted, rare = (
        next(verdict for case, verdict in verdicts.items() if mode in case)
        for mode in ("loop", "planted", "rare")
    )
    assert code == 1
    assert (loop.outcome, loop.confirmation) == ("passed", None), loop.message
    found = planted.difference
    assert found is not None
    assert (found.step, found.rank, found.quantity) == (2, 1, "taps.input")
    (of_state,) = [each.difference for each in planted.checks if each.check == "state"]
    assert of_state is not None
    assert (of_state.step, of_state.quantity, of_state.tensor) == (2, "grads", "0.weight")
    for verdict, came in ((planted, "came_again"), (rare, "did_not_come_again")):
        assert (verdict.outcome, verdict.what) == ("failed", "diverged")
        again = verdict.confirmation
        assert again is not None
        assert again.outcome == came
        assert (again.reference_repeats, again.candidate_repeats) == (True, verdict is planted)


def test_a_function_in_the_warm_server_passes(tmp_path: Path) -> None:
    """An entry program is recorded as a script is, its time to start included."""
    code, verdicts, out = run(tmp_path, name="of_entry", kind='entry: "train:main"', ranks=1,
                              modes="[plain, loop]")  # fmt: skip
    assert code == 0, [verdict.message for verdict in verdicts.values()]
    files = list(out.glob("runs/*/rank0.jsonl"))
    assert len(files) == 3
    for path in files:
        end = read_rank(path, 0).end
        assert end is not None
        assert end.steps == 4
        assert 0 < end.startup_s <= end.wall_s

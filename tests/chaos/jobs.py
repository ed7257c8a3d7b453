"""A job that records itself is killed -9 at random moments: what is left is a prefix of the whole.

    an undisturbed job -> another of the same, killed -> read -> `harness diff`: what both have is
    equal, nothing is damaged, and all but the last steps before the kill are there

Every second job goes on from its first step in a second process, which is killed, too. Rings are
small, so that segments go while the kill comes. Jobs are forks of one process with torch in it.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo

from harness.recorder import LEAST_BYTES, record
from harness.runner.recorded import Comparison, compare
from harness.store.streams import read_parts

STEPS, STEP_S = 400, 0.002
RING = 4 * LEAST_BYTES
MOST_LOST = 25
"""Steps that a job has ended and not written: the last one, and those that its thread holds."""


def kill_jobs(root: Path, seed: int, kills: int) -> Iterator[str]:
    """Kill as often as asked; what does not hold."""
    rng, most, number = random.Random(seed), 0, 0
    _end(*_start(root / "whole", 1 << 30))
    while number < kills:
        folder = root / f"killed{number:03}"
        for _ in range(min(1 + number % 2, kills - number)):
            pid, steps = _start(folder, RING)
            time.sleep(rng.uniform(0.0, 1.2 * STEPS * STEP_S))
            os.kill(pid, signal.SIGKILL)
            lost, why = _look(root / "whole", folder, _end(pid, steps))
            number, most = number + 1, max(most, lost)
            yield from (f"{folder.name}: {each}" for each in why)
    print(f"  {number} jobs killed, at most {most} ended steps lost", flush=True)  # noqa: T201


def _look(whole: Path, folder: Path, trained: int) -> tuple[int, list[str]]:
    """How many steps that were trained are lost, and what is wrong with the rest."""
    parts = read_parts(folder, 0)
    if not parts:
        return 0, [f"{trained} steps were trained and nothing is recorded"] if trained else []
    held = parts[-1].records
    lost = trained - (held.steps[-1].step + 1 if held.steps else 0)
    why = list(held.problems)
    if lost > MOST_LOST:
        why.append(f"{lost} of {trained} steps are lost")
    done: Comparison = compare(whole, folder)
    nothing = not held.steps and held.initial is None
    if done.exit_code != 0 and not (nothing and done.exit_code == 5):
        why.append(f"diff ends with {done.exit_code}: {done.findings or done.problems}")
    if done.compared["digest"] < 4 * len(held.steps):
        why.append(f"only {done.compared['digest']} digests of {len(held.steps)} steps compared")
    return max(lost, 0), why


def _start(folder: Path, ring: int) -> tuple[int, int]:
    """A job in a process of its own: its id, and a pipe with a byte for each step that it ends."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _train(folder, ring, write)
        os._exit(0)
    os.close(write)
    return pid, read


def _end(pid: int, steps: int) -> int:
    """How many steps a job has ended, once it has gone."""
    number = 0
    while data := os.read(steps, 1 << 16):
        number += len(data)
    os.waitpid(pid, 0)
    os.close(steps)
    return number


def _train(folder: Path, ring: int, told: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = record(model, optimizer, folder=folder, every=1, ring=ring, taps="*")
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with recorder.step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(STEP_S)
        os.write(told, b".")
    recorder.session.end()  # type: ignore[attr-defined]
    recorder.session._file.close()  # type: ignore[attr-defined]

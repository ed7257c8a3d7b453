"""A training of a second in plain torch that misbehaves as `--how` says; it knows of no harness.

`--mode bad` is what it does wrong, mostly on rank 1 alone; `--tag` is an axis that changes nothing.
Two linear layers and AdamW; data are drawn by step and rank. Without `--ddp` each rank trains by
itself. What a harness must answer is in `tests/misbehaving.py`.
"""

import argparse
import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


class Training:
    """What all ways have in common: process group, model, optimizer, data."""

    def __init__(self, *, mode: str, ddp: bool) -> None:
        self.mode, self.ddp = mode, ddp
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.is_bad = mode == "bad" and self.rank == 1
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.model = nn.Sequential(self.first, nn.Tanh(), self.last)
        self.rebuild()

    def rebuild(self) -> None:
        """A new optimizer, and a new wrapper, for the parameters that the model has now."""
        self.net: nn.Module = DistributedDataParallel(self.model) if self.ddp else self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def loss(self, step: int) -> Tensor:
        """The loss of a step; float32 []."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        output: Tensor = self.net(torch.randn(4, 8, generator=generator))
        return output.square().mean()

    def backward(self, step: int) -> None:
        """New gradients."""
        self.optimizer.zero_grad()
        self.loss(step).backward()

    def step(self, step: int) -> None:
        """One step of training."""
        self.backward(step)
        self.optimizer.step()

    def steps(self, act: Callable[[], object] | None = None, number: int = STEPS) -> None:
        """All steps; `act` comes before step 3."""
        for step in range(number):
            if step == 3 and act is not None:
                act()
            self.step(step)


HOW: dict[str, Callable[[Training], object]] = {}
"""Each trains, and leaves the process group to `main`; its docstring says what is odd."""


def way(act: Callable[[Training], object]) -> Callable[[Training], object]:
    """Enter a way to misbehave."""
    HOW[act.__name__] = act
    return act


@way
def exits_early(t: Training) -> None:
    """Rank 1 leaves with exit code 0 after three of six steps."""
    t.steps(lambda: sys.exit(0) if t.is_bad else None)


@way
def leaves_at_once(t: Training) -> None:
    """Rank 1 leaves by `os._exit(0)` in the middle of step 3: no clean-up, no traceback."""
    for step in range(STEPS):
        t.backward(step)
        if t.is_bad and step == 3:
            os._exit(0)
        t.optimizer.step()


@way
def takes_unequal_steps(t: Training) -> None:
    """Rank 1 takes a step less (bad) or a step more (more) than rank 0."""
    t.steps(number=STEPS + {"bad": -1, "more": 1}.get(t.mode, 0) * t.rank)


@way
def exits_with_3(t: Training) -> None:
    """Rank 1 ends with exit code 3 after all of its steps."""
    t.steps()
    if t.is_bad:
        dist.destroy_process_group()
        sys.exit(3)


@way
def raises_at_exit(t: Training) -> None:
    """A function that is called at exit fails: Python prints it, and the exit code stays 0."""

    def fail() -> None:
        raise RuntimeError("in atexit")

    if t.is_bad:
        atexit.register(fail)
    t.steps()


@way
def ignores_sigterm(t: Training) -> None:
    """Rank 1 hangs after three steps and ignores whoever asks it to end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    t.steps(lambda: threading.Event().wait() if t.is_bad else None)


@way
def leaves_out_a_collective(t: Training) -> None:
    """Rank 1 leaves out the last step's sum of the loss, and waits for rank 0."""
    others = dist.new_group([0, 1])
    for step in range(STEPS):
        t.step(step)
        if not (t.is_bad and step == STEPS - 2):
            dist.all_reduce(torch.ones(4))
    dist.barrier(others)


@way
def disagrees_about_a_collective(t: Training) -> None:
    """In step 3 rank 0 calls all_reduce and rank 1 broadcast."""
    for step in range(STEPS):
        t.backward(step)
        for param in t.model.parameters():
            assert param.grad is not None
            if t.is_bad and step == 3:
                dist.broadcast(param.grad, src=1)
            else:
                dist.all_reduce(param.grad)
        t.optimizer.step()


@way
def prints_a_gigabyte(t: Training) -> None:
    """Rank 1 prints 1 GB before it trains, as a warning in a loop would."""
    line = b"train.py:212: UserWarning: loss=2.3456 lr: 3.0e-04 tokens/s 123456, layers.3.attn\n"
    block = (line * (1 + (1 << 20) // len(line)))[: 1 << 20]
    for _ in range(1000 if t.is_bad else 0):
        view = memoryview(block)
        while view:
            view = view[os.write(2, view) :]
    t.steps()


@way
def leaves_a_child(t: Training) -> None:
    """Rank 1 leaves a process in a session of its own, which holds its stdout for ten minutes."""
    if t.is_bad and os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    t.steps()


@way
def changes_folder(t: Training) -> None:
    """Both ranks go to a new folder after three steps, and delete it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        t.steps(lambda: os.chdir(folder) if t.mode == "bad" else None)


@way
def deletes_the_model(t: Training) -> None:
    """After the last step model and optimizer are deleted, and the program goes on."""
    t.steps()
    if t.mode == "bad":
        del t.net, t.model, t.optimizer
        gc.collect()
        scratch = torch.ones(100_000, requires_grad=True)
        sys.stdout.write(f"{scratch.square().mean().item()}\n")


@way
def makes_a_new_process_group(t: Training) -> None:
    """After three steps the process group is destroyed and made again."""
    t.ddp = True
    t.rebuild()

    def anew() -> None:
        store = dist.PrefixStore("second", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=t.rank, world_size=2)
        t.net = DistributedDataParallel(t.model)

    t.steps(anew if t.mode == "bad" else None)


def helper(index: int) -> None:
    """Train something else."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.ones(3)).sum().backward()
        optimizer.step()


@way
def spawns_a_trainer(t: Training) -> None:
    """Each rank starts a process, with the same variables, that trains another model meanwhile."""
    bad = t.mode == "bad"
    context = torch.multiprocessing.spawn(helper, nprocs=1, join=False) if bad else None
    t.steps()
    while context is not None and not context.join():
        pass


@way
def trains_in_a_thread(t: Training) -> None:
    """The backward pass of every step is in a new thread."""
    for step in range(STEPS):
        if t.mode == "bad":
            thread = threading.Thread(target=t.backward, args=(step,))
            thread.start()
            thread.join()
        else:
            t.backward(step)
        t.optimizer.step()


@way
def has_two_optimizers(t: Training) -> None:
    """A layer has SGD, the other AdamW; bad: the second one has a decay of weights."""
    decay = 0.1 if t.mode == "bad" else 0.0
    optimizers = (
        torch.optim.SGD(t.first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(t.last.parameters(), lr=0.01, weight_decay=decay),
    )
    for step in range(STEPS):
        t.backward(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@way
def keeps_an_optimizer(t: Training) -> None:
    """From step 3 on another one trains; the first is kept. Bad: the last gradient is changed."""
    kept = t.optimizer
    for step in range(STEPS):
        if step == 3:
            t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)
        t.backward(step)
        if t.is_bad and step == STEPS - 1:
            assert t.first.weight.grad is not None
            t.first.weight.grad *= 1.5
        t.optimizer.step()
    del kept


@way
def steps_twice(t: Training) -> None:
    """Each gradient is used for two optimizer steps."""
    for step in range(STEPS):
        t.step(step)
        if t.mode == "bad":
            t.optimizer.step()


@way
def never_steps(t: Training) -> None:
    """No optimizer ever steps: losses and gradients come, weights stay."""
    for step in range(STEPS):
        (t.backward if t.mode == "bad" else t.step)(step)


@way
def swallows_errors(t: Training) -> None:
    """Rank 1 fails in step 3 and goes on: before its optimizer (bad), or after it (late)."""
    for step in range(STEPS):
        with contextlib.suppress(Exception):
            t.backward(step)
            if t.is_bad and step == 3:
                raise ValueError("in the step")
            t.optimizer.step()
            if t.mode == "late" and step == 3:
                raise ValueError("in what is logged")


@way
def has_a_parameter_on_one_rank(t: Training) -> None:
    """Rank 1 has a parameter that rank 0 lacks; bad: it begins with another value."""
    extra = nn.Parameter(torch.tensor(1.0 + 2.0**-20 if t.mode == "bad" else 1.0))
    if t.rank == 1:
        t.model.register_parameter("extra", extra)
    t.rebuild()
    for step in range(STEPS):
        t.backward(step)
        if t.rank == 1:
            (t.first.weight.detach().sum() * extra).backward()
        t.optimizer.step()


@way
def replaces_parameters(t: Training) -> None:
    """After three steps a layer gets a new parameter object; bad: of slightly other values."""

    def replace() -> None:
        factor = 1.0 + 2.0**-20 if t.mode == "bad" else 1.0
        t.last.weight = nn.Parameter(t.last.weight.detach() * factor)
        t.rebuild()

    t.steps(replace)


@way
def loads_a_checkpoint(t: Training) -> None:
    """After three steps: saves and loads everything (whole), or the weights alone (bad)."""

    def load() -> None:
        file = io.BytesIO()
        torch.save((t.model.state_dict(), t.optimizer.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file)
        t.model.load_state_dict(weights)
        t.rebuild()
        if t.mode == "whole":
            t.optimizer.load_state_dict(state)

    t.steps(load if t.mode != "good" else None)


@way
def has_a_nan_buffer(t: Training) -> None:
    """A buffer that nothing reads holds a NaN: on both ranks (always), or on rank 1 (bad)."""
    number = float("nan") if t.mode == "always" or t.is_bad else 2.0
    t.model.register_buffer("unused", torch.tensor([1.0, number]))
    t.steps()


@way
def seeds_from_the_clock(t: Training) -> None:
    """Data are right; the first weights are drawn with a seed from the clock."""
    if t.mode == "bad":
        torch.manual_seed(time.time_ns() % 2**31)
        with torch.no_grad():
            t.first.weight.uniform_(-0.1, 0.1)
    t.steps()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=HOW, required=True)
    parser.add_argument("--mode", default="good")
    parser.add_argument("--tag", choices=("a", "b"), default="a")
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    HOW[options.how](Training(mode=options.mode, ddp=options.ddp))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

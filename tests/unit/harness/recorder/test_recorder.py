"""What is a step, and what its record says: losses, norms, skipped steps, the end of a program."""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from harness.recorder import record
from harness.recorder import session as recording
from harness.store.streams import rank_path, read_rank
from tests.unit.harness.recorder.recorded import (
    all_digests,
    digests,
    losses,
    names,
    record_folder,
    recorded,
)


def model_of(size: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, size), nn.Linear(size, 1))


def train(
    model: nn.Module, optimizers: Iterable[Optimizer], steps: int = 2, microbatches: int = 1
) -> None:
    """A plain loop: all optimizers step together."""
    held = list(optimizers)
    for step in range(steps):
        for optimizer in held:
            optimizer.zero_grad()
        for micro in range(microbatches):
            model(torch.full((2, 3), 1.0 + step + micro / 8)).square().mean().backward()
        for optimizer in held:
            optimizer.step()


def plain() -> None:
    model = model_of()
    train(model, [Adam(model.parameters())])


def bits(value: float) -> str:
    return struct.pack(">f", value).hex()


def test_a_step_holds_gradients_state_and_losses_in_order(tmp_path: Path) -> None:
    """Accumulated microbatches are one step; their losses keep their order; loss is their mean."""
    expected: list[float] = []

    def program() -> None:
        model = model_of()
        train(model, [Adam(model.parameters())], steps=2, microbatches=3)

    model = None
    records = recorded(program, tmp_path)
    torch.manual_seed(0)
    model = model_of()
    for micro in range(3):
        expected.append(model(torch.full((2, 3), 1.0 + micro / 8)).square().mean().item())
    assert losses(records.steps[0]) == expected
    assert records.steps[0].loss is not None
    mean = float(torch.tensor(expected, dtype=torch.float32).double().mean())
    assert records.steps[0].loss.bits == bits(mean)
    assert [step.step for step in records.steps] == [0, 1]
    assert not records.problems
    assert records.error is None
    assert records.end is not None
    assert (records.end.steps, records.end.startup_s > 0) == (2, True)
    params = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert names(records, "grads") == names(records, "weights") == params
    assert digests(records, "grads", -1) == {}
    assert digests(records, "weights", -1).keys() == set(params)
    changed = digests(records, "weights", 0).items() - digests(records, "weights", -1).items()
    assert len(changed) == len(params)


def test_optimizers_that_step_together_make_one_step(tmp_path: Path) -> None:
    """Two optimizers after one backward pass are one step, with the gradients of both."""

    def program() -> None:
        model = model_of()
        train(model, [SGD(part.parameters(), 0.1) for part in model])

    records = recorded(program, tmp_path)
    assert len(records.steps) == 2
    assert digests(records, "grads", 1).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_backward_and_step_in_turn_make_steps_of_their_own(tmp_path: Path) -> None:
    """A generator and a discriminator that step in turn make two steps of each round."""

    def program() -> None:
        first, second = nn.Linear(3, 1), nn.Linear(3, 1)
        optimizers = [SGD(each.parameters(), 0.1) for each in (first, second)]
        for _ in range(2):
            for module, optimizer in zip((first, second), optimizers, strict=True):
                module(torch.ones(3)).sum().backward()
                optimizer.step()

    records = recorded(program, tmp_path)
    assert [len(step.microbatch_losses) for step in records.steps] == [1, 1, 1, 1]
    ours = digests(records, "weights", 0).items() ^ digests(records, "weights", 2).items()
    assert {name.split(".")[0] for name, _ in ours} == {"Linear0"}


def test_the_same_optimizer_stepping_twice_makes_two_steps(tmp_path: Path) -> None:
    """A second step without a backward pass is a step, with the gradients that it used."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.step()

    records = recorded(program, tmp_path)
    assert [len(step.microbatch_losses) for step in records.steps] == [1, 0]
    assert digests(records, "grads", 0) == digests(records, "grads", 1)


def test_a_step_before_the_first_backward_pass_is_initial_state(tmp_path: Path) -> None:
    """What makes optimizer state before training is no step, but shows before step 0."""

    def program(warm: bool) -> None:
        model = model_of()
        optimizer = Adam(model.parameters())
        if warm:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
        train(model, [optimizer])

    cold = recorded(lambda: program(False), tmp_path / "cold")
    warm = recorded(lambda: program(True), tmp_path / "warm")
    assert len(cold.steps) == len(warm.steps) == 2
    assert "0.weight.exp_avg" not in digests(cold, "optim", -1)
    assert "0.weight.exp_avg" in digests(warm, "optim", -1)
    assert "0.weight.exp_avg" in digests(cold, "optim", 0)


def test_a_closure_makes_one_step_with_the_gradients_that_it_left(tmp_path: Path) -> None:
    """An optimizer that calls backward inside of its step records that step's own gradients."""

    def program(with_closure: bool) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    inside = recorded(lambda: program(True), tmp_path / "inside")
    outside = recorded(lambda: program(False), tmp_path / "outside")
    assert len(inside.steps) == 3
    assert all_digests(inside) == all_digests(outside)
    assert [losses(step) for step in inside.steps] == [losses(step) for step in outside.steps]


def test_lbfgs_makes_one_step_of_many_evaluations(tmp_path: Path) -> None:
    """Each evaluation's loss is on record, in one step, and the optimizer's vectors are state."""

    def program() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss.item()

        for _ in range(2):
            optimizer.step(closure)

    records = recorded(program, tmp_path)
    assert [len(step.microbatch_losses) for step in records.steps] == [3, 3]
    assert digests(records, "grads", 0).keys() == {"weight", "bias"}
    assert {"weight.d", "weight.old_dirs.0"} <= digests(records, "optim", 0).keys()


def test_what_the_scripts_own_lines_say(tmp_path: Path) -> None:
    """A step in lines holds the losses, the norm and the groups that they give, and no others."""

    def program() -> None:
        model, ema = model_of(), {"average": torch.zeros(2)}
        optimizers: list[Optimizer] = [SGD(part.parameters(), 0.1) for part in model]
        recorder = record(model, optimizers)
        recorder.state("ema", ema)
        for step in range(2):
            with recorder.step():
                for micro in range(2):
                    model(torch.ones(3)).sum().backward()
                    recorder.microbatch(torch.tensor(float(micro)))
                recorder.grad_norm(5.0)
                for optimizer in optimizers:
                    optimizer.step()
                ema["average"] += 1
                if step:
                    recorder.skipped("by hand")

    records = recorded(program, tmp_path)
    assert [losses(step) for step in records.steps] == [[0.0, 1.0], [0.0, 1.0]]
    assert [step.grad_norm.value for step in records.steps if step.grad_norm] == [5.0, 5.0]
    assert [step.skipped for step in records.steps] == ["", "by hand"]
    seen = [digests(records, "ema", step)["average"] for step in (-1, 0, 1)]
    assert len(set(seen)) == 3
    assert digests(records, "grads", 1).keys() == set(names(records, "weights"))


def test_losses_that_a_script_gives_replace_those_of_backward(tmp_path: Path) -> None:
    """Also without `step()`, and in every step: no loss is counted twice."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        recorder = record()
        for step in range(2):
            for micro in range(2):
                model(torch.ones(3)).sum().backward()
                recorder.microbatch(torch.tensor(10.0 * step + micro))
            optimizer.step()

    records = recorded(program, tmp_path)
    assert [losses(step) for step in records.steps] == [[0.0, 1.0], [10.0, 11.0]]


def test_a_group_of_the_recorders_own_is_refused(tmp_path: Path) -> None:
    """A script's group may not take the place of weights."""

    def program() -> None:
        record().state("weights", {})

    records = recorded(program, tmp_path, code=1)
    assert records.error is not None
    assert records.error.type == "ValueError"
    assert "'weights'" in records.error.message


def test_lines_only_means_that_nothing_else_is_a_step(tmp_path: Path) -> None:
    """With `record: lines` an optimizer's step outside of `step()` is none."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        train(model, [optimizer], steps=3)
        with recorder.step():
            train(model, [optimizer], steps=1)
        train(model, [optimizer], steps=2)

    records = recorded(program, tmp_path, record="lines")
    assert len(records.steps) == 1
    assert len(records.steps[0].microbatch_losses) == 1


def test_every_leaves_out_the_digests_of_other_steps(tmp_path: Path) -> None:
    """With `every: 3` steps 0 and 3 have digests; all have losses."""

    def program() -> None:
        model = model_of()
        train(model, [Adam(model.parameters())], steps=5)

    records = recorded(program, tmp_path, every=3)
    held = [bool(digests(records, "weights", step)) for step in range(5)]
    assert held == [True, False, False, True, False]
    assert all(step.loss is not None for step in records.steps)


def uses_python() -> None:
    random.random()


def uses_numpy() -> None:
    np.random.rand()


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_state_that_is_put_back_is_no_seed(name: str, tmp_path: Path) -> None:
    """As torch.compile does where it compiles; one from elsewhere, a checkpoint's, is one."""

    get: Callable[[], Any] = random.getstate if name == "python" else np.random.get_state

    def program(state: Any) -> Callable[[], None]:
        def run() -> None:
            put: Callable[[Any], None]
            put = random.setstate if name == "python" else np.random.set_state
            before: Any = random.getstate() if name == "python" else np.random.get_state()
            model = model_of()
            optimizer = SGD(model.parameters(), 0.1)
            uses_python()
            uses_numpy()
            put(before if state is None else state)
            model(torch.ones(3)).sum().backward()
            optimizer.step()

        return run

    held = get()
    uses_python()
    uses_numpy()
    found = []
    for number, state in enumerate((None, None, held)):
        uses_numpy()  # a fork has its parent's numbers
        found.append(all_digests(recorded(program(state), tmp_path / str(number))))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("draw", [uses_python, uses_numpy])
@pytest.mark.parametrize("seeds", [False, True])
def test_a_generator_counts_once_the_program_seeds_it(
    draw: Callable[[], None], tmp_path: Path, *, seeds: bool
) -> None:
    """Generators that a program leaves to the clock make no two runs differ; its own seeds do."""

    def program(seed: int) -> Callable[[], None]:
        def run() -> None:
            if seeds:
                random.seed(seed)
                np.random.seed(seed)
            model = model_of()
            optimizer = SGD(model.parameters(), 0.1)
            for _ in range(2):
                draw()
                model(torch.ones(3)).sum().backward()
                optimizer.step()

        return run

    first = recorded(program(1), tmp_path / "a")
    second = recorded(program(2), tmp_path / "b")
    assert (all_digests(first) == all_digests(second)) == (not seeds)


def test_a_seed_is_seen_before_step_0(tmp_path: Path) -> None:
    """Two seeds of Python's generator differ in the initial state, although nothing is drawn."""

    def program(seed: int) -> Callable[[], None]:
        def run() -> None:
            random.seed(seed)
            plain()

        return run

    first, second = (recorded(program(seed), tmp_path / f"{seed}") for seed in (1, 2))
    assert digests(first, "rng", -1)["python"] != digests(second, "rng", -1)["python"]
    assert digests(first, "weights", 1) == digests(second, "weights", 1)


def test_enforced_determinism_seeds_every_generator(tmp_path: Path) -> None:
    """Two processes with other generators begin with the same weights and random states."""

    def program() -> None:
        random.random()
        np.random.rand()
        plain()

    runs = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        runs.append(recorded(program, tmp_path / f"{seed}", seed=seed, determinism="enforce"))
    assert all_digests(runs[0]) == all_digests(runs[1])
    (event,) = [each for each in runs[0].events if each.name == "environment"]
    assert event.detail["deterministic"] is True


class Broken(nn.Module):
    """Fails in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("lost")
        return x


def test_an_exception_is_recorded_with_step_and_module(tmp_path: Path) -> None:
    """The error record has type, message, the step under way and the innermost module at work."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Broken()))
        train(model, [SGD(model.parameters(), 0.1)])

    records = recorded(program, tmp_path, code=1)
    assert records.error is not None
    assert records.end is None
    found = records.error
    assert (found.type, found.step, found.module, found.what) == ("KeyError", 1, "1.0", "crashed")
    assert "lost" in found.message
    assert "forward" in found.traceback
    assert len(records.steps) == 1


def test_a_program_that_exits_by_itself_is_no_error(tmp_path: Path) -> None:
    """`sys.exit(3)` leaves whole records; the exit code is the engine's to judge."""

    def program() -> None:
        plain()
        sys.exit(3)

    records = recorded(program, tmp_path, code=3)
    assert records.error is None
    assert records.end is not None


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """What a child trains is not in its parent's records, and its end is not the parent's."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        train(model, [optimizer], steps=1)
        pid = os.fork()
        if pid == 0:
            train(model, [optimizer], steps=3)
            session = recording.begin()
            os._exit(5 if session is None else 6)  # the same rank has a process that records
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        train(model, [optimizer], steps=1)

    records = recorded(program, tmp_path)
    assert [step.step for step in records.steps] == [0, 1]
    assert not records.problems


class Foreign:
    """Trains without torch.optim."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def zero_grad(self) -> None:
        self.model.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            param.sub_(param.grad)


def test_an_optimizer_that_is_not_torchs_records_no_step(tmp_path: Path) -> None:
    """A run without a step of torch's optimizers has neither steps nor an end record."""

    def program() -> None:
        model = model_of()
        train(model, [Foreign(model)])  # type: ignore[list-item]

    records = recorded(program, tmp_path)
    assert records.start is not None
    assert records.initial is None or digests(records, "weights", -1) == {}
    assert (records.steps, records.end, records.error) == ((), None, None)


def test_a_rank_file_is_as_the_readers_want_it(tmp_path: Path) -> None:
    """Read back, the file has no problem; a line that is not whole is one."""
    recorded(plain, tmp_path)
    path = rank_path(tmp_path, 0)
    assert read_rank(path, 0).problems == ()
    path.write_bytes(path.read_bytes().replace(b'"step":1,', b"", 1))
    (problem,) = read_rank(path, 0).problems
    assert "missing required field `step`" in problem


IMPORTS = """
import sys
before = set(sys.modules)
import harness.recorder.session
assert "torch" not in sys.modules
print(*sorted(m for m in set(sys.modules) - before if m.split(".")[0] == "harness"))
names = sorted(m.split(".")[0] for m in set(sys.modules) - before)
foreign = set(names) - sys.stdlib_module_names - {"harness"}
assert not foreign, foreign
import harness.recorder.hooks
print(*sorted(m for m in sys.modules if m.split(".")[0] in ("harness", "fsdp_core")))
"""


def test_recording_needs_only_its_own_files(tmp_path: Path) -> None:
    """A program's environment needs none of the harness' dependencies, but torch."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    light, whole = (line.split() for line in run.stdout.splitlines())
    facts = {"harness", "harness.commit", "harness.masking", "harness.provenance"}
    recorder = {"harness.recorder", "harness.recorder.session"}
    assert set(light) == facts | recorder
    parts = ("capture", "collectives", "graphs", "hooks", "observer", "session", "state")
    digest = ("digest", "digest_torch", "digest_words")
    expected = facts | {"harness.recorder", "fsdp_core", "fsdp_core.graph"}
    expected |= {f"harness.recorder.{part}" for part in parts}
    expected |= {f"fsdp_core.graph.{part}" for part in digest}
    assert set(whole) == expected


OUTSIDE = """
import sys
from harness.recorder import record
recorder = record(object(), object(), taps="*")
for _ in range(2):
    with recorder.step():
        recorder.microbatch(1); recorder.grad_norm(1.0); recorder.skipped("x")
    recorder.state("ema", {})
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def test_outside_of_the_harness_the_lines_do_nothing(tmp_path: Path) -> None:
    """Without the harness' variables a script's lines write nothing and import nothing."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DELTAZERO")}
    subprocess.run(
        [sys.executable, "-c", OUTSIDE],
        env=environ | {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path, check=True, timeout=60,
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_rank_without_its_number_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without RANK and WORLD_SIZE there is no rank to record."""
    monkeypatch.setenv("DELTAZERO_RECORD", str(record_folder(tmp_path)))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert recording.begin() is None
    assert not list(tmp_path.glob("rank*"))


def test_the_initial_state_is_that_before_the_first_forward_pass(tmp_path: Path) -> None:
    """Data of step 0 in running means, and its random draws, are no difference before step 0."""

    def program(value: float) -> Callable[[], None]:
        def run() -> None:
            model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
            optimizer = SGD(model.parameters(), 0.1)
            model(value * torch.arange(9.0).view(3, 3)).sum().backward()
            optimizer.step()

        return run

    first, second = (recorded(program(value), tmp_path / f"{value}") for value in (1.0, 2.0))
    assert first.initial == second.initial
    assert digests(first, "buffers", 0) != digests(second, "buffers", 0)
    assert digests(first, "rng", -1) != digests(first, "rng", 0)


def test_a_step_between_forward_and_backward_is_initial_state(tmp_path: Path) -> None:
    """A forward pass and a step that make state before training do not count as training."""

    def program() -> None:
        model = model_of()
        optimizer = Adam(model.parameters())
        model(torch.ones(3))
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        train(model, [optimizer])

    records = recorded(program, tmp_path)
    assert len(records.steps) == 2
    assert not records.problems
    assert "0.weight.exp_avg" in digests(records, "optim", -1)

"""What a step is, and its losses and norms: with hooks alone, and with a script's own lines."""

import copy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, Adam

from harness.recorder import record
from harness.records import DIGEST_HEX_CHARS, TAP_HEX_CHARS
from tests.unit.harness.recorder.recorded import (
    PARAMS,
    digests,
    error_of,
    losses,
    model_of,
    names,
    pair,
    recorded,
    step_of,
    train,
)


def together() -> None:
    model = model_of()
    train(model, *(SGD(part.parameters(), 0.1) for part in model), steps=2)


def in_turn() -> None:
    parts = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [SGD(part.parameters(), 0.1) for part in parts]
    for _ in range(2):
        for part, optimizer in zip(parts, optimizers, strict=True):
            train(part, optimizer)


def twice() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    train(model, optimizer)
    optimizer.step()


def accumulated() -> None:
    model = model_of()
    train(model, Adam(model.parameters()), steps=2, microbatches=3)


def lbfgs() -> None:
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss.item()

    for _ in range(2):
        optimizer.step(closure)


def roots_of_one_pass() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    torch.autograd.backward(tuple(model(torch.ones(2, 3)).flatten()))
    optimizer.step()


def initial_state() -> None:
    """Optimizer state is made before training; a warm-up does not count as training."""
    model = model_of()
    optimizer = Adam(model.parameters())
    torch.autograd.grad(model(torch.ones(3)).sum(), [*model.parameters()])
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    train(model, optimizer, steps=2)


def checkpointed() -> None:
    """A reentrant checkpoint calls backward from inside of one."""
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    x = torch.ones(2, 3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum().backward()
    optimizer.step()


def without_backward(gradients: Callable[[nn.Module], Any]) -> None:
    """Steps by gradients that are set by hand."""
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(2):
        for param, found in zip(model.parameters(), gradients(model), strict=True):
            param.grad = found
        optimizer.step()


def by_autograd_grad() -> None:
    without_backward(lambda m: torch.autograd.grad(m(torch.ones(3)).sum(), [*m.parameters()]))


def by_torch_func() -> None:
    def gradients(model: nn.Module) -> Any:
        def loss(params: Any) -> Any:
            return torch.func.functional_call(model, params, torch.ones(3)).sum()

        return torch.func.grad(loss)(dict(model.named_parameters())).values()

    without_backward(gradients)


@pytest.mark.parametrize(
    ("program", "microbatches"),
    [
        (together, [1, 1]), (in_turn, [1, 1, 1, 1]), (twice, [1, 0]), (accumulated, [3, 3]),
        (lbfgs, [3, 3]), (roots_of_one_pass, [2]), (initial_state, [1, 1]), (checkpointed, [1]),
        (by_autograd_grad, [0, 0]), (by_torch_func, [0, 0]),
    ],
)  # fmt: skip
def test_steps_and_their_losses(
    program: Callable[[], None], microbatches: list[int], tmp_path: Path
) -> None:
    """A step ends at the backward pass after it, or as the same optimizer steps again."""
    records = recorded(program, tmp_path)
    assert not records.problems
    assert [step.step for step in records.steps] == list(range(len(microbatches)))
    assert [len(step.microbatch_losses) for step in records.steps] == microbatches
    for number in range(len(microbatches)):
        assert digests(records, "grads", number).keys() <= set(names(records, "weights"))
        assert len(digests(records, "grads", number)) in (2, 4)
    assert ("0.weight.exp_avg" in digests(records, "optim", -1)) == (program is initial_state)


def test_a_step_holds_losses_in_order_and_their_mean(tmp_path: Path) -> None:
    """In float32, as the program has them."""
    (first, _) = recorded(accumulated, tmp_path / "accumulated").steps
    torch.manual_seed(0)
    model = model_of()
    expected = [model(torch.full((2, 3), 1 + i / 8)).square().mean().item() for i in range(3)]
    assert losses(first) == expected
    assert first.loss is not None
    mean = float(torch.tensor(expected, dtype=torch.float32).double().mean())
    assert first.loss.bits == struct.pack(">f", mean).hex()
    # A second step has the gradients that it used, though no backward pass made them anew.
    records = recorded(twice, tmp_path / "twice")
    assert digests(records, "grads", 0) == digests(records, "grads", 1)


def test_what_the_scripts_own_lines_say(tmp_path: Path) -> None:
    """A step in lines holds the losses, the norm and the groups that they give, and no others."""

    def program() -> None:
        model, ema, told = model_of(), {"average": torch.zeros(2)}, torch.zeros(())
        optimizers = [SGD(part.parameters(), 0.1) for part in model]
        recorder = record(model, optimizers)
        recorder.state("ema", ema)
        for step in range(2):
            with recorder.step():
                for micro in range(2):
                    model(torch.ones(3)).sum().backward()
                    recorder.microbatch(told.fill_(micro))  # which is written again
                recorder.grad_norm(5.0)
                for optimizer in optimizers:
                    optimizer.step()
                ema["average"] += 1
                if step:
                    recorder.skipped("by hand")

    records = recorded(program, tmp_path)
    assert list(map(losses, records.steps)) == [[0.0, 1.0], [0.0, 1.0]]
    assert [step.grad_norm.value for step in records.steps if step.grad_norm] == [5.0, 5.0]
    assert [step.skipped for step in records.steps] == ["", "by hand"]
    assert len({digests(records, "ema", step)["average"] for step in (-1, 0, 1)}) == 3
    assert digests(records, "grads", 1).keys() == set(PARAMS)


@pytest.mark.parametrize("has_class", [False, True])
def test_a_program_that_updates_its_weights_itself(tmp_path: Path, *, has_class: bool) -> None:
    """Without a torch optimizer lines say what is a step; parameters of the model are trained."""

    class Mine:
        pass

    def program() -> None:
        model = model_of()
        model[0].bias.requires_grad_(False)
        recorder = record([model, model[0]], Mine() if has_class else None)
        record()  # as another file of the program may, which knows of no model
        for _ in range(2):
            with recorder.step():
                for param in model.parameters():
                    param.grad = None
                model(torch.ones(3)).sum().backward()
                with torch.no_grad():
                    for param in model.parameters():
                        if param.grad is not None:
                            param.sub_(param.grad, alpha=0.1)

    records = recorded(program, tmp_path)
    trained = set(PARAMS) - {"0.bias"}
    for step in range(2):
        assert digests(records, "grads", step).keys() == trained
        assert digests(records, "weights", step).keys() == trained
        assert records.start is not None
        assert len(records.start.tensors["weights"]) == len(trained)
        assert digests(records, "frozen", step).keys() == {"0.bias"}
    weights = [digests(records, "weights", step)["0.weight"] for step in (-1, 0, 1)]
    assert len(set(weights)) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [(lambda: record().state("weights", {}), "'weights'")]
    + [(lambda it=it: record(taps=it), repr(it)) for it in ("a:inputs", "a:", "", "a b", ".a")],
)  # fmt: skip
def test_a_line_that_is_wrong_is_refused(
    line: Callable[[], Any], words: str, tmp_path: Path
) -> None:
    error = error_of(line, tmp_path)
    assert error.type == "ValueError"
    assert words in error.message


def test_what_is_no_step_and_whose_losses_count(tmp_path: Path) -> None:
    """With `record: lines` steps outside of `step()` are none; told losses replace roots."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        train(model, optimizer, steps=3)
        with recorder.step():
            train(model, optimizer)
        for step in range(2):
            for micro in range(2):
                model(torch.ones(3)).sum().backward()
                recorder.microbatch(torch.tensor(10.0 * step + micro))
            optimizer.step()

    (step,) = recorded(program, tmp_path / "lines", record="lines").steps
    assert len(step.microbatch_losses) == 1
    steps = recorded(program, tmp_path / "auto").steps
    assert len(steps) == 6
    assert list(map(losses, steps[4:])) == [[0.0, 1.0], [10.0, 11.0]]


def test_every_leaves_out_the_digests_of_other_steps(tmp_path: Path) -> None:
    """With `every: 3` steps 0 and 3 have digests, and the initial state; all have losses."""

    def program() -> None:
        train(model := model_of(), Adam(model.parameters()), steps=5)

    records = recorded(program, tmp_path, every=3)
    held = [bool(digests(records, "weights", step)) for step in range(-1, 5)]
    assert held == [True, True, False, False, True, False]
    assert all(step.loss is not None for step in records.steps)


FORMS: list[tuple[Callable[[float], Any], str]] = [
    (lambda value: torch.tensor(value, dtype=torch.float64), ">d"), (float, ">d"),
    (np.float64, ">d"), (torch.tensor, ">f"), (np.float32, ">d"),
]  # fmt: skip


def test_losses_and_norms_have_the_bits_that_the_program_had(tmp_path: Path) -> None:
    """Nothing is rounded before it is compared: 64 bits stay 64 bits, and finite stays finite."""
    expected = [
        (make, form, float(torch.tensor(value)) if make in (torch.tensor, np.float32) else value)
        for make, form in FORMS
        for value in (1 + 2.0**-50, 1e300, float("nan"), float(2**24 + 1))
    ]

    def program() -> None:
        recorder = record(model_of())
        for make, _, value in expected:
            with recorder.step():
                recorder.microbatch(make(value))
                recorder.grad_norm(make(value))

    steps = recorded(program, tmp_path).steps
    for step, (_, form, value) in zip(steps, expected, strict=True):
        for found in (step.loss, *step.microbatch_losses, step.grad_norm):
            assert found is not None
            assert found.bits == struct.pack(form, value).hex()
            assert found.value == (value if np.isfinite(value) else None)


def of_roots(dtype: torch.dtype, *values: float) -> Callable[[], None]:
    """A step of backward passes of roots with these values."""

    def run() -> None:
        model = nn.Linear(3, 1).to(dtype)
        optimizer = SGD(model.parameters(), 0.0)
        root = model(torch.ones(3, dtype=dtype)).sum() * 0
        for value in values:
            (root + value).backward(retain_graph=True)
        (root.float() + 1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


@pytest.mark.parametrize(
    ("dtype", "value", "chars"),
    [(torch.float64, 1 + 2.0**-50, 16), (torch.bfloat16, 0.1, 8), (torch.bfloat16, np.nan, 8)],
)
def test_a_root_is_not_rounded(
    dtype: torch.dtype, value: float, chars: int, tmp_path: Path
) -> None:
    """Hooks record what lines would; the mean is in the wider of two formats; NaN has no value."""
    (step,) = recorded(of_roots(dtype, value), tmp_path).steps
    first = float(torch.tensor(value, dtype=dtype))
    expected = [first if np.isfinite(value) else None, 1.0]
    assert losses(step) == expected
    assert [len(loss.bits) for loss in step.microbatch_losses] == [chars, 8]
    assert step.loss is not None
    assert step.loss.value == ((first + 1) / 2 if np.isfinite(value) else None)
    assert step.loss.finite == np.isfinite(value)
    assert step.grad_norm is not None
    assert len(step.grad_norm.bits) == chars


def test_the_norm_is_that_of_clipping(tmp_path: Path) -> None:
    """The norm before clipping is recorded, however the program calls torch for it, or says it."""
    utils = torch.nn.utils
    clips: list[Callable[[Any], Any]] = [
        lambda params: utils.clip_grad_norm_(params, 0.5),
        lambda params: utils.clip_grad_norm_(iter(list(params)), 0.5),
        lambda params: utils.clip_grad.clip_grad_norm_(params, 0.5),
        lambda params: utils.clip_grads_with_norm_(
            params, 0.5, utils.get_total_norm([p.grad for p in params])
        ),
        lambda _: record().grad_norm(7),
        lambda _: record().grad_norm(np.int64(7)),
    ]

    def program() -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = SGD(model.parameters(), 0.1)
        for clip in clips:
            optimizer.zero_grad()
            model(torch.tensor([2.0, 3.0, 6.0])).sum().backward()
            clip(list(model.parameters()))
            optimizer.step()

    norms = [step.grad_norm for step in recorded(program, tmp_path).steps]
    assert [norm and norm.value for norm in norms] == [7.0] * len(clips)


@pytest.mark.parametrize(("num_optimizers", "fused"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_step_that_a_scaler_skips(
    explicit: bool, num_optimizers: int, fused: bool, tmp_path: Path
) -> None:
    """Only the step that no optimizer took is recorded as skipped, and its weights stay.

    A fused optimizer is called all the same, and leaves it out by itself.
    """

    def program() -> None:
        model = model_of()
        optimizers = [SGD(part.parameters(), 0.1, fused=fused) for part in model][:num_optimizers]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        recorder = record(model, optimizers)

        def step(factor: float) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(model(torch.ones(3)).sum()).backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad *= factor
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        for factor in (1.0, float("inf"), 1.0):
            if explicit:
                with recorder.step():
                    step(factor)
            else:
                step(factor)

    records = recorded(program, tmp_path)
    assert [bool(step.skipped) for step in records.steps] == [False, True, False]
    assert digests(records, "weights", 0) == digests(records, "weights", 1)
    assert digests(records, "weights", 1) != digests(records, "weights", 2)


class OwnScaler(torch.amp.GradScaler):
    """Scales by itself, as FSDP's does."""

    def scale(self, outputs: Any) -> Any:
        super().scale(torch.ones(1))  # makes the scale
        return outputs * self._scale


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, OwnScaler])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_scaled_loss_is_recorded_as_it_was(scaler: Any, factor: float, tmp_path: Path) -> None:
    """A scale that is too large is no infinite loss; a loss that is infinite before it is one."""

    def program() -> None:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), 0.1)
        made = scaler("cpu", init_scale=2.0**127, backoff_factor=1e-30)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(torch.ones(3)).sum()
            made.scale(((out - out.detach()) * 4 + 3.0) * factor).backward()
            made.step(optimizer)
            made.update()

    first, second = recorded(program, tmp_path / "alone").steps
    assert (bool(first.skipped), bool(second.skipped)) == (True, factor > 1)
    bits = struct.pack(">f", 3.0 * factor).hex()
    assert [each.bits for each in first.microbatch_losses] == [bits]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    x = torch.tensor([1.0, value, 1.0])
    (step,) = recorded(lambda: step_of(nn.Linear(3, 1, bias=False), x), tmp_path).steps
    assert step.nonfinite["grads"] == ("weight",)
    assert step.loss is not None
    assert not step.loss.finite


def test_a_resume_by_torchs_checkpoints_is_no_step(tmp_path: Path) -> None:
    """Loading steps a new optimizer by zero, to make its state: no part of the step before."""

    def program(resumes: bool) -> None:
        model = model_of()
        optimizer = Adam(model.parameters())
        train(model, optimizer)
        if resumes:
            saved = copy.deepcopy(get_state_dict(model, optimizer))
            model = model_of()
            optimizer = Adam(model.parameters())
            set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        train(model, optimizer)

    straight, resumed = pair(program, tmp_path, False, True)
    assert len(straight.steps) == len(resumed.steps) == 2
    for group in ("grads", "weights", "optim"):
        for step in (0, 1):
            assert digests(straight, group, step) == digests(resumed, group, step) != {}


def digests_of_taps(records: Any) -> list[tuple[str, str]]:
    """Of step 0 by name, without their places."""
    text = records.steps[0].taps
    rows = (text[at : at + DIGEST_HEX_CHARS] for at in range(0, len(text), TAP_HEX_CHARS))
    return list(zip(records.start.taps, rows, strict=True))


def test_the_state_before_step_0_is_that_of_the_pass_that_is_trained(tmp_path: Path) -> None:
    """Passes that warm a model up, kept or not, change nothing; the loss may be of several."""

    def program(warm_up: int, is_kept: bool = False, value: float = 1.0) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer, state = SGD(model.parameters(), 0.1), copy.deepcopy(model.state_dict())
        kept = [model(torch.ones(2, 3)) for _ in range(warm_up)]
        if not is_kept:
            kept.clear()
        model.load_state_dict(state)
        torch.manual_seed(1)
        first, second = value * torch.rand(2, 3), torch.rand(2, 3)
        (model(first).sum() + model(second).sum()).backward()
        optimizer.step()

    taps = tuple(f"**:{kind}" for kind in ("input", "output", "gradient"))
    cold, *others = pair(lambda given: program(*given), tmp_path, (0,), (1,), (3, True), taps=taps)
    for warm in others:
        assert warm.initial == cold.initial
        assert warm.steps[0].digests == cold.steps[0].digests
        assert digests_of_taps(warm) == digests_of_taps(cold)
    other = recorded(lambda: program(1, value=2.0), tmp_path / "other")
    assert other.initial == cold.initial
    assert digests(other, "buffers", 0) != digests(cold, "buffers", 0)


def test_a_warm_up_changes_nothing_about_when_modules_are_found(tmp_path: Path) -> None:
    """An average that is made after the first step is seen from the same step on."""

    def program(warm_up: int) -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(warm_up):
            model(torch.ones(2, 3))
        train(model, optimizer)
        average = copy.deepcopy(model)
        train(model, optimizer, steps=6)
        assert average is not None

    cold, *others = pair(program, tmp_path, 0, 1, 2)
    for warm in others:
        assert [step.digests for step in warm.steps] == [step.digests for step in cold.steps]

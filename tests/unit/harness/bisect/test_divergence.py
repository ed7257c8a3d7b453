"""Where two runs part, by the rules of DESIGN.md: each edit of the records has one right answer."""

import dataclasses

import pytest

from harness.bisect.found import Location
from harness.bisect.locate import between
from harness.checks.evidence import BEFORE
from harness.records import COPIES, SAMPLES, RunResult
from tests.unit.harness.bisect.small_model import (
    OTHER,
    ROWS,
    WEIGHTS,
    Edit,
    both,
    calls_from,
    digests,
    edited,
    floats,
    place_in,
    run_of,
    tapped,
    without_calls,
)


def brief(found: Location) -> tuple[object, ...]:
    """Phase, module, tensor."""
    return found.phase, found.module, found.tensor


@pytest.mark.parametrize(
    ("group", "module", "tensor"),
    [("weights", "embedding", "embedding.weight"), ("rng", "", "cpu")],
)
def test_other_weights_before_step_0_are_an_initialisation(
    group: str, module: str, tensor: str
) -> None:
    """Whatever the steps after it computed of them: the rank and its first tensor are named."""
    candidate = edited(run_of(graph=("attn",)), {1: both(calls_from("embedding:output"))}, step=0)
    own = candidate.ranks[1]
    assert own.initial is not None
    text = own.initial.digests | {group: "f" + own.initial.digests[group][1:]}
    other = dataclasses.replace(own, initial=dataclasses.replace(own.initial, digests=text))
    found = between(run_of(), dataclasses.replace(candidate, ranks=(candidate.ranks[0], other)))
    assert brief(found) == ("initialisation", module, tensor)
    assert (found.step, found.rank, found.ranks, found.quantity) == (BEFORE, 1, (1,), group)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("buffers", ("forward", "layers.0.mlp.router", "layers.0.mlp.router.balance_loss")),
        (COPIES, ("optimizer", "norm", "norm.weight")),
        (SAMPLES, ("input", "", "targets")),
    ],
)
def test_what_nothing_was_computed_from_yet(group: str, expected: tuple[str, str, str]) -> None:
    """A loss that is logged alone, a copy that is behind its weight, labels: all else equal."""
    found = place_in({1: digests(**{group: {expected[2]}})})
    assert brief(found) == expected
    assert (found.step, found.ranks, found.quantity) == (2, (1,), group)


@pytest.mark.parametrize(
    ("tap", "expected"),
    [
        ("embedding:input", ("input", "embedding", "embedding:input")),
        ("embedding:output", ("forward", "embedding", "embedding:output")),
        ("layers.0.attn.norm:input", ("forward", "layers.0.attn", "layers.0.attn.norm:input")),
        ("layers.0.attn.attention.wq:output",
         ("forward", "layers.0.attn.attention.wq", "layers.0.attn.attention.wq:output")),
        ("layers.0.attn.attention.wo:input",
         ("forward", "layers.0.attn.attention", "layers.0.attn.attention.wo:input")),
        ("layers.0.attn:output", ("forward", "layers.0.attn", "layers.0.attn:output")),
        ("norm:gradient", ("backward", "head", "norm:gradient")),
        ("layers.0.attn:gradient", ("backward", "norm", "layers.0.attn:gradient")),
        ("layers.0.attn.attention.wo:gradient",
         ("backward", "layers.0.attn", "layers.0.attn.attention.wo:gradient")),
        ("layers.0.attn.attention.wq:gradient",
         ("backward", "layers.0.attn.attention", "layers.0.attn.attention.wq:gradient")),
        ("layers.0.attn.norm:gradient",
         ("backward", "layers.0.attn.attention.wq", "layers.0.attn.norm:gradient")),
        ("embedding:gradient", ("backward", "layers.0.attn.norm", "embedding:gradient")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 1])
def test_the_first_call_that_differs_names_whose_work_it_was(
    tap: str, number: int, expected: tuple[str, str, str]
) -> None:
    """All before it is equal: the module that made it is named, and the microbatch."""
    found = place_in({1: both(calls_from(tap, number), digests(grads=WEIGHTS, weights=WEIGHTS))})
    assert brief(found) == expected
    assert (found.step, found.microbatch, found.rank, found.ranks) == (2, number, 1, (1,))


def test_the_step_that_captures_is_blamed_if_it_differs_from_its_beginning() -> None:
    """All ranks alike, in the step of the capture: it was not run, or on what the capture left."""
    candidate = run_of(graph=("attn",))
    config = candidate.spec.config | {"graph_warmup_steps": 2}
    candidate = dataclasses.replace(
        candidate, spec=dataclasses.replace(candidate.spec, config=config)
    )
    edit = calls_from("embedding:output")
    assert between(run_of(), edited(candidate, {0: edit, 1: edit})).phase == "capture"
    assert between(run_of(), edited(candidate, {0: edit})).phase == "forward"
    later = edited(candidate, {0: edit, 1: edit}, step=3)
    assert between(run_of(), later).phase == "forward"


def test_a_call_that_differs_on_one_rank_first_is_its_origin() -> None:
    """What comes to another rank later in the step spread there; the evidence says with what."""
    found = place_in({0: calls_from("norm:input"), 1: calls_from("embedding:output")})
    assert (found.rank, found.ranks, found.module) == (1, (1,), "embedding")
    assert found.near == "after"
    assert any("rank 0 with norm:input[0]" in told for told in found.evidence)


def test_a_call_that_differs_on_every_rank_names_no_gather() -> None:
    """Nothing is known of what ranks gave to it: the module may have computed otherwise."""
    edit = calls_from("embedding:output")
    found = place_in({0: edit, 1: edit})
    assert (found.near, found.collective, found.ranks) == ("", "", (0, 1))


def test_a_call_that_one_run_never_made_is_not_the_first_result_that_differs() -> None:
    """Another graph was replayed: its module's output is what differs, not calls it left out."""
    parts = [row for row in ROWS if row[0].startswith("layers.0.attn.") and row[1] == 0]
    edit = both(calls_from("layers.0.attn:output"), without_calls(parts))
    found = place_in({0: edit, 1: edit})
    assert brief(found) == ("forward", "layers.0.attn", "layers.0.attn:output")
    assert (found.ranks, found.microbatch) == ((0, 1), 0)
    # The other layer is called once more.
    more = edited(run_of(), {rank: without_calls(parts) for rank in (0, 1)})
    edit = calls_from("layers.0.attn:output")
    found = between(more, edited(run_of(graph=("attn",)), {0: edit, 1: edit}))
    assert brief(found) == ("forward", "layers.0.attn", "layers.0.attn:output")


def test_a_call_that_one_run_alone_made_is_no_input() -> None:
    """Calls are all that differs: nobody says that the data does."""
    edit = without_calls([("embedding:input", 0)])
    found = place_in({0: edit, 1: edit})
    assert brief(found) == ("forward", "embedding", "embedding:input")


def test_the_first_gradient_is_the_losss_and_no_gathers() -> None:
    """Wrong on every rank alike, it came from the loss, which reads no weights."""
    edit = both(calls_from("head:gradient"), digests(grads=WEIGHTS))
    found = place_in({0: edit, 1: edit})
    assert brief(found) == ("backward", "head", "head:gradient")
    assert (found.near, found.collective) == ("", "")


STAGED = {
    "layers.0:input[0]": 0, "layers.0:output[0]": 0, "layers.1:input[0]": 1,
    "layers.1:output[0]": 1, "layers.2:input[0]": 2, "layers.2:output[0]": 2,
    "layers.2:gradient[0]": 2, "layers.1:gradient[0]": 1, "layers.0:gradient[0]": 0,
}  # fmt: skip
"""Rows in program order, and the stage of each; a rank of an interleaved pipeline has several."""


@pytest.mark.parametrize(
    ("first", "phase", "transfer"),
    [
        ("layers.1:input[0]", "forward", "transfer of activations to stage 1 of the pipeline"),
        ("layers.0:gradient[0]", "backward", "transfer of gradients to stage 0 of the pipeline"),
    ],
)
def test_what_a_stage_begins_with_came_by_a_transfer(first: str, phase: str, transfer: str) -> None:
    """Also where the rank works at other stages of the microbatch before."""

    def run(*, other_from: str = "") -> RunResult:
        names = list(STAGED)
        bad = names.index(other_from) if other_from else len(names)
        rows = {
            name: f"{place + (100 if place >= bad else 0):032x}{place:08x}"
            for place, name in enumerate(names)
        }
        return tapped(run_of(), 1, rows, stages=list(STAGED.values()))

    found = between(run(), run(other_from=first))
    assert (found.phase, found.near, found.collective) == (phase, "in", transfer)
    assert found.module == first.partition(":")[0]


def test_numbers_drawn_otherwise_are_told() -> None:
    """A module without weights whose output differs while the random state does: its mask."""
    edit = both(calls_from("layers.0.attn:output"), digests(rng=("cpu",)))
    found = place_in({0: edit, 1: edit})
    assert brief(found) == ("forward", "layers.0.attn", "layers.0.attn:output")
    assert any("random state" in told for told in found.evidence)


LOSS_1 = (OTHER, OTHER)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (both(floats(microbatch_losses=LOSS_1, loss=OTHER), digests(grads=WEIGHTS)),
         ("input", "head", "microbatch_losses[0]")),
        (floats(microbatch_losses=LOSS_1, loss=OTHER), ("outside", "", "microbatch_losses[0]")),
        (floats(loss=OTHER), ("reduce", "", "loss")),
        (digests(grads=WEIGHTS), ("reduce", "", "head.weight")),
        (digests(grads=[name for name in WEIGHTS if name.startswith("layers.0.")]),
         ("reduce", "layers.0", "layers.0.attn.attention.wo.weight")),
        (digests(grads=("layers.0.attn.attention.wq.weight",)),
         ("backward", "layers.0.attn.attention.wq", "layers.0.attn.attention.wq.weight")),
        (digests(grads=("layers.0.attn.norm.weight", "layers.1.attn.norm.weight")),
         ("reduce", "layers.0.attn.norm", "layers.0.attn.norm.weight")),
        (floats(grad_norm=OTHER), ("reduce", "", "grad_norm")),
        (both(floats(grad_norm=OTHER), digests(optim=("step_count",))),
         ("optimizer", "", "step_count")),
        (digests(optim=("norm.weight.exp_avg",), weights=("norm.weight",)),
         ("optimizer", "norm", "norm.weight")),
        (digests(optim=("step_count", "norm.weight.exp_avg"), weights=WEIGHTS),
         ("optimizer", "", "step_count")),
        (digests(weights=("norm.weight",)), ("optimizer", "norm", "norm.weight")),
        (digests(weights=WEIGHTS), ("optimizer", "embedding", "embedding.weight")),
        (digests(rng=("cpu",)), ("input", "", "cpu")),
    ],
)  # fmt: skip
def test_what_differs_while_every_call_is_equal_names_the_phase(
    edit: Edit, expected: tuple[str, str, str]
) -> None:
    """Losses, gradients, norm, moments, weights, random state: each rules out those before it."""
    found = place_in({0: edit, 1: edit})
    assert brief(found) == expected
    assert found.ranks == (0, 1)


def test_wrong_rows_of_one_rank_alone_came_after_the_collective() -> None:
    """The other rank has right rows of the same tensors: the sum itself was right."""
    found = place_in({1: digests(grads=("embedding.weight", "norm.weight", "head.weight"))})
    assert (found.phase, found.near, found.ranks) == ("reduce", "after", (1,))


def test_without_taps_nothing_is_claimed_of_modules() -> None:
    """A loss that differs may come from anything that went before: that is said."""
    edit = both(floats(loss=OTHER, microbatch_losses=LOSS_1), digests(grads=WEIGHTS))
    found = place_in({0: edit}, taps=False)
    assert (found.module, found.quantity) == ("", "microbatch_losses[0]")
    assert any(told.startswith("module:") for told in found.unknown)


def test_equal_runs_have_no_place() -> None:
    """Nothing differs, nobody failed: nothing is made up."""
    found = between(run_of(), run_of(graph=("attn",)))
    assert (found.step, found.phase, found.module) == (None, None, "")
    assert found.unknown


def test_of_two_engines_losses_calls_and_random_states_are_looked_at() -> None:
    """Ranks hold other parts of each tensor, by other names: no digest of these is a difference."""
    candidate = run_of()
    ranks = []
    for records in candidate.ranks:
        assert records.start is not None
        tensors = {g: ("x",) if g == "weights" else n for g, n in records.start.tensors.items()}
        ranks.append(dataclasses.replace(
            records, start=dataclasses.replace(records.start, tensors=tensors)
        ))  # fmt: skip
    spec = dataclasses.replace(candidate.spec, config=candidate.spec.config | {"engine": "ddp"})
    candidate = dataclasses.replace(candidate, spec=spec, ranks=tuple(ranks))
    candidate = edited(candidate, {0: digests(weights=WEIGHTS), 1: calls_from("embedding:input")})
    found = between(run_of(), candidate)
    assert (found.step, *brief(found)) == (2, "input", "embedding", "embedding:input")
    assert (found.rank, found.ranks) == (1, (1,))
    assert not any("weights" in text for text in found.evidence)

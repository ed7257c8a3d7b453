"""Runs that died, hung or stopped themselves: what their last words are made into."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from harness.bisect.experiments import Asker
from harness.bisect.found import Location
from harness.bisect.locate import between, locate, locate_case
from harness.checks.evidence import BEFORE, failed
from harness.records import (
    COPIES,
    DIGEST_HEX_CHARS,
    GIVEN,
    NEVER_RAN,
    OTHERS,
    SAMPLES,
    TAP_HEX_CHARS,
    UNFINISHED,
    CollectiveFault,
    Ending,
    Entered,
    EventRecord,
    GivenCall,
    RaceEvidence,
    RunResult,
    StepRecord,
    StreamUse,
    What,
)
from tests.support import records
from tests.unit.harness.bisect.small_model import (
    BIAS,
    CALLS,
    OTHER,
    ROWS,
    STEPS,
    WEIGHTS,
    WORLD,
    Edit,
    both,
    calls_from,
    case_of,
    digests,
    edited,
    fields_of,
    floats,
    foreign,
    of_rank,
    other_calls,
    place_of,
    run_of,
    tapped,
    without_calls,
)

LAYER, NORM = "layers.0.attn", "layers.0.attn.norm.weight"
MEMORY = "memory made by aten::new_empty at gradients.py:230 for the grad buffer of unit layers.1"


def use(operator: str, stream: str, *, writes: bool = True) -> StreamUse:
    return StreamUse(operator=operator, writes=writes, stream=stream, place="x.py:1")


RACE = RaceEvidence(
    tensor="root main_weight", unit="root", is_gradient=False,
    later=use("aten::copy_", "gather", writes=False), earlier=use("aten::_fused_adamw_", "main"),
)  # fmt: skip
RACE_GRAD = RaceEvidence(
    tensor=MEMORY, unit="layers.1", is_gradient=True,
    later=use("reuse", "main"), earlier=use("c10d::_reduce_scatter_base_", "reduce"),
)  # fmt: skip
GATHER = Entered(operator="allgather_base", label="layers.1")
NEVER = CollectiveFault(
    ranks=(1,), entered=None, others=(0,), expected=GATHER, group=(0, 1), number=50, step=2
)
ENTERED = dataclasses.replace(
    NEVER, entered=Entered(operator="allreduce"),
    expected=Entered(operator="reduce_scatter_base", label="layers.0"),
)  # fmt: skip
CAPTURING = dataclasses.replace(
    NEVER, entered=Entered(operator="all_reduce"),
    expected=Entered(operator="allgather_base", in_capture=True),
)  # fmt: skip


def ended(what: What, message: str = "boom", *, captured_in: int = 0, **fields: Any) -> RunResult:
    """A graphed run that rank 1 ended in step 2, with these fields of its error record."""
    run = run_of(graph=("attn",), captured_in=captured_in)
    error = records.error(1, step=2, what=what, type="Error", message=message, **fields)
    for rank in range(2):
        steps = run.ranks[rank].steps[:2]
        run = of_rank(run, rank, steps=steps, end=None, error=error if rank else None)
    outcome = dataclasses.replace(run.outcome, what=what, message=message, culprit_rank=1)
    return dataclasses.replace(run, outcome=outcome)


def silent(what: What, **ending: Any) -> RunResult:
    """A run that ended so, of which no rank left a record of its end."""
    run = of_rank(ended(what), 1, error=None)
    outcome = dataclasses.replace(run.outcome, ending=Ending(**ending))
    return dataclasses.replace(run, outcome=outcome)


LOST_GROUPS = "Could not resolve the process group registered under the name 0"
ODD = "stale_address: layers.9.mlp.w1: captured at 0x1; embedding is odd; race: head: a reads"


@pytest.mark.parametrize(
    ("run", "phase", "module", "tensor"),
    [
        (ended("stale_address", ODD, tensors=(NORM, "root")), "state", f"{LAYER}.norm", NORM),
        (ended("stale_address", tensors=("layers.0 full gradient",)), "state", "layers.0",
         "layers.0 full gradient"),
        (ended("stale_address", ODD), "state", "", ""),
        (ended("race", race=RACE), "forward", "embedding", "root main_weight"),
        (ended("race", race=RACE_GRAD), "reduce", "layers.1", MEMORY),
        (ended("race", ODD), "outside", "", ""),
        (ended("oom"), "outside", "", ""),
        (ended("capture_refused", phase="capture", module=LAYER), "capture", LAYER, ""),
        # A module is the one that raised, never one that words name.
        (ended("crashed", ODD, phase="capture", module="layers.1.mlp"), "capture", "layers.1.mlp",
         ""),
        (ended("crashed", ODD, phase="capture"), "capture", "", ""),
        (ended("crashed", phase="backward", tensors=(NORM, "head.weight")), "backward",
         f"{LAYER}.norm", NORM),
        # Whatever it wanted to exchange: no step takes groups away.
        (ended("crashed", LOST_GROUPS, phase="forward", module="layers.0"), "outside", "", ""),
        # It left no word but the module that it was in.
        (silent("killed", signal="SIGKILL", module=LAYER), "capture", LAYER, ""),
        (silent("hang", phase="backward", module="encoder"), "backward", "encoder", ""),
        (silent("hang"), "outside", "", ""),
        *((ended("crashed", phase=name), name, "", "")
          for name in ("forward", "backward", "optimizer", "reduce", "capture")),
        (ended("crashed", phase="replay"), "capture", "", ""),
        (ended("crashed", phase="backward", captured_in=2), "capture", "", ""),
    ],
)  # fmt: skip
def test_what_an_end_says_is_a_place(run: RunResult, phase: str, module: str, tensor: str) -> None:
    """Step and rank are the error's, module and tensor those of its fields; words say nothing."""
    found = between(run_of(), run)
    assert (found.phase, found.module, found.tensor) == (phase, module, tensor)
    assert (found.step, found.rank, found.ranks) == (2, 1, (1,))


@pytest.mark.parametrize(
    ("fault", "near", "phase", "collective"),
    [
        (NEVER, "before", "outside", "allgather_base of layers.1"),
        (ENTERED, "in", "reduce", "allreduce"),
        (CAPTURING, "in", "capture", "all_reduce"),
    ],
)
def test_a_hang_names_the_collective_and_who_is_missing(
    fault: CollectiveFault, near: str, phase: str, collective: str
) -> None:
    """Who waits in vain is not at fault; one rank captures where another does not."""
    found = between(run_of(), silent("hang", collective=fault))
    assert (found.near, found.phase, found.collective) == (near, phase, collective)
    assert (found.ranks, found.step) == ((1,), 2)


def test_a_hang_of_two_equal_sides_names_no_rank() -> None:
    """Unless one of them did otherwise than before; a chain's end is who all others wait for."""
    tied = silent("hang", collective=ENTERED)
    tied = dataclasses.replace(tied, outcome=dataclasses.replace(tied.outcome, culprit_rank=None))
    found = between(run_of(), tied)
    assert (found.rank, found.ranks, found.phase, len(found.unknown)) == (None, (0, 1), None, 1)
    chain = dataclasses.replace(ENTERED, ranks=(0,), others=())
    assert between(run_of(), silent("hang", collective=chain)).ranks == (1,)


def test_a_difference_before_the_end_comes_first() -> None:
    """What was computed otherwise in step 1 may be why the rank died in step 2."""
    found = between(run_of(), edited(ended("crashed"), {1: calls_from("norm:output")}, step=1))
    assert (found.step, found.module) == (1, "norm")
    assert "boom" in found.evidence[-1]
    stale = edited(ended("stale_address", tensors=(NORM,)), {1: calls_from("norm:output")}, step=1)
    assert between(run_of(), stale).step == 1


def test_memory_that_grows_is_led_to_the_step_from_which_it_does() -> None:
    """All bits are equal: what each step leaves behind tells, on the rank that the check names."""
    candidate = run_of(graph=("attn",))
    for step in (2, 3):
        candidate = edited(candidate, {1: floats(live_bytes=1000 + 64 * step)}, step=step)
    bad = failed("peak_memory", "memory_regression", "it grew", growth_rank=1.0)
    verdict = records.verdict(outcome="failed", what="memory_regression", checks=(bad,))
    found = between(run_of(), candidate, verdict)
    assert (found.phase, found.step, found.rank) == ("outside", 2, 1)


def test_a_reference_that_failed_is_to_blame_itself() -> None:
    """A lost record of its own is no fault of the program: it has a step and a rank, no module."""
    whole = case_of(run_of(graph=("attn",)))
    lost = of_rank(whole.reference, 0, steps=whole.reference.ranks[0].steps[:3])
    expected = {"phase": "outside", "step": 3, "rank": 0, "quantity": "missing_step", "module": ""}
    for runs in (
        dataclasses.replace(whole, reference=lost), dataclasses.replace(whole, control=lost),
    ):  # fmt: skip
        found = locate(runs)
        assert fields_of(found, expected) == expected
        assert "the candidate is not to blame" in found.evidence[0]
    unlike = edited(whole.control, {1: calls_from("norm:output")})
    found = locate(dataclasses.replace(whole, control=unlike))
    assert (found.module, found.step) == ("norm", 2)
    assert "the candidate is not to blame" in found.evidence[0]


# --- steps that did not end


def stopped(edit: Edit, what: What, *, reached: int, captured_in: int = 1) -> RunResult:
    """The run with that edit of rank 1 if it fails in step 2, after so many calls of it."""
    whole = edited(run_of(graph=("attn",), captured_in=captured_in), {1: edit})
    run = ended(what, captured_in=captured_in, phase="backward")
    for rank, held in enumerate(whole.ranks):
        taps = held.steps[2].taps
        rows = [taps[i : i + TAP_HEX_CHARS] for i in range(0, len(taps), TAP_HEX_CHARS)]
        text = "".join(
            row if place_of(*name) < reached else "0" * DIGEST_HEX_CHARS + NEVER_RAN
            for name, row in zip(ROWS, rows, strict=True)
        )
        event = EventRecord(name=UNFINISHED, rank=rank, step=2, detail={"taps": text})
        run = of_rank(run, rank, events=(event,))
    return run


OUTPUT = f"{LAYER}:output"


@pytest.mark.parametrize(
    ("edit", "what", "reached", "captured_in", "expected"),
    [
        # The forward pass was wrong, and the backward pass stopped.
        (calls_from(OUTPUT), "crashed", len(CALLS), 1, ("forward", LAYER)),
        (lambda record: record, "crashed", len(CALLS), 1, ("backward", "")),
        # Calls that were not reached are no difference.
        (calls_from(OUTPUT), "crashed", place_of(OUTPUT, 0), 1, ("backward", "")),
        # The last row of a tap has all calls that have none of their own: some may be lacking.
        (calls_from("embedding:input", 1), "crashed", 2 * len(CALLS), 1, ("backward", "")),
        # An end that names its cause outranks its step.
        (calls_from(OUTPUT), "stale_address", len(CALLS), 1, ("state", "")),
        # Calls of the step that captures were also those of warm-ups and captures.
        (calls_from(OUTPUT), "crashed", len(CALLS), 2, ("capture", "")),
    ],
)
def test_what_went_wrong_before_the_end_in_its_step(
    edit: Edit, what: What, reached: int, captured_in: int, expected: tuple[str, str]
) -> None:
    """As far as the step came."""
    found = between(run_of(), stopped(edit, what, reached=reached, captured_in=captured_in))
    assert (found.phase, found.module) == expected
    assert (found.step, found.rank) == (2, 1)


class _Idle:
    """An asker that makes no runs."""

    def ask(self, *question: Any, **options: Any) -> Any:
        raise LookupError


def test_no_run_is_spent_on_elements_of_a_step_that_did_not_end() -> None:
    """Contents are written after a step; where it ended, they are asked for."""
    asker = cast("Asker", _Idle())
    wrong = edited(run_of(graph=("attn",)), {1: calls_from(OUTPUT)})
    with pytest.raises(LookupError):
        locate_case(case_of(wrong), asker)
    cut = stopped(calls_from(OUTPUT), "crashed", reached=len(CALLS))
    found = locate_case(case_of(cut), asker)
    assert found.tensor == OUTPUT
    assert found.unknown[-1] == "element: step 2 did not end, so no contents were kept"


# --- where two runs part: each edit of the records has one right answer ---


GATHERED, SCATTER, SUM = "allgather_base", "reduce_scatter_base", "allreduce"
Given = tuple[int, str, str]
Brief = tuple[str, str, str]
"""Phase, module, tensor."""


def place(
    edit: Edit, ranks: Sequence[int] = (0, 1), *, taps: bool = True, captured_in: int = 0,
    given: Collection[Given] | None = None, without: str = "",
) -> Location:  # fmt: skip
    """Where a candidate with that edit of step 2 on these ranks left its reference."""
    reference = run_of(taps=taps)
    candidate = run_of(graph=("attn",), taps=taps, captured_in=captured_in)
    candidate = edited(candidate, dict.fromkeys(ranks, edit))
    if given is not None:
        reference, candidate = with_given(reference, ()), with_given(candidate, given, without)
    return between(reference, candidate)


def with_given(run: RunResult, wrong: Collection[Given], without: str = "") -> RunResult:
    """The run, in whose step 2 ranks gave something else to a collective of a unit."""
    for rank in range(WORLD):
        calls = [
            GivenCall(
                operator=operator, label=label, group=(0, 1),
                digest="other" if (rank, operator, label) in wrong else "same",
            ).to_json()
            for label in ("root", "layers.0", "layers.1")
            for operator in (GATHERED, SCATTER, SUM)
            if operator != without
        ]  # fmt: skip
        event = EventRecord(name=GIVEN, rank=rank, step=2, detail={"calls": calls})
        run = of_rank(run, rank, events=(event,))
    return run


def brief(found: Location) -> tuple[object, ...]:
    return found.phase, found.module, found.tensor


@pytest.mark.parametrize(
    ("group", "expected"),
    [("weights", ("initialisation", "embedding", "embedding.weight")),
     ("rng", ("initialisation", "", "cpu"))],
)  # fmt: skip
def test_other_weights_before_step_0_are_an_initialisation(group: str, expected: Brief) -> None:
    """Whatever the steps after it computed of them: the rank and its first tensor are named."""
    candidate = edited(run_of(graph=("attn",)), {1: calls_from("embedding:output")}, step=0)
    own = candidate.ranks[1].initial
    assert own is not None
    text = own.digests | {group: "f" + own.digests[group][1:]}
    candidate = of_rank(candidate, 1, initial=dataclasses.replace(own, digests=text))
    found = between(run_of(), candidate)
    assert brief(found) == expected
    assert (found.step, found.ranks, found.quantity) == (BEFORE, (1,), group)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("tap", "phase", "module"),
    [
        ("embedding:input", "input", "embedding"),
        ("embedding:output", "forward", "embedding"),
        (f"{LAYER}.norm:input", "forward", LAYER),
        (f"{LAYER}.attention.wq:output", "forward", f"{LAYER}.attention.wq"),
        (f"{LAYER}.attention.wo:input", "forward", f"{LAYER}.attention"),
        (f"{LAYER}:output", "forward", LAYER),
        ("norm:gradient", "backward", "head"),
        (f"{LAYER}:gradient", "backward", "norm"),
        (f"{LAYER}.attention.wo:gradient", "backward", LAYER),
        (f"{LAYER}.attention.wq:gradient", "backward", f"{LAYER}.attention"),
        (f"{LAYER}.norm:gradient", "backward", f"{LAYER}.attention.wq"),
        ("embedding:gradient", "backward", f"{LAYER}.norm"),
    ],
)
def test_the_first_call_that_differs_names_whose_work_it_was(
    tap: str, phase: str, module: str, number: int
) -> None:
    """All before it is equal: the module that made it is named, and the microbatch."""
    found = place(both(calls_from(tap, number), digests(grads=WEIGHTS, weights=WEIGHTS)), [1])
    assert brief(found) == (phase, module, tap)
    assert (found.step, found.microbatch, found.rank, found.ranks) == (2, number, 1, (1,))


PARTS = [row for row in ROWS if row[0].startswith(f"{LAYER}.") and row[1] == 0]


@pytest.mark.parametrize(
    ("edit", "expected", "told"),
    [
        (calls_from("embedding:output"), ("forward", "embedding", "embedding:output"), "alike"),
        # Another graph was replayed: what it returned differs, not calls that it left out.
        (both(calls_from(f"{LAYER}:output"), without_calls(PARTS)),
         ("forward", LAYER, f"{LAYER}:output"), "the candidate did not call layers.0.attn.norm"),
        # Calls are all that differs: nobody says that the data does.
        (without_calls([("embedding:input", 0)]), ("forward", "embedding", "embedding:input"),
         "the candidate did not call embedding"),
        # It came from the loss, which reads no weights.
        (both(calls_from("head:gradient"), digests(grads=WEIGHTS)),
         ("backward", "head", "head:gradient"), "it comes from the loss"),
        (both(calls_from(f"{LAYER}:output"), digests(rng=("cpu",))),
         ("forward", LAYER, f"{LAYER}:output"), "it drew other numbers"),
    ],
    ids=["no gather", "left out", "no input", "from the loss", "drawn"],
)  # fmt: skip
def test_what_every_rank_has_wrong(edit: Edit, expected: Brief, told: str) -> None:
    """No gather is blamed: a module may have computed otherwise, as nobody knows what was given."""
    found = place(edit)
    assert (*brief(found), found.near, found.collective) == (*expected, "", "")
    assert found.ranks == (0, 1)
    assert any(told in each for each in found.evidence)


def test_a_call_that_differs_on_one_rank_first_is_its_origin() -> None:
    """What comes to another rank later in the step spread there; the evidence says with what."""
    edits = {0: calls_from("norm:input"), 1: calls_from("embedding:output")}
    found = between(run_of(), edited(run_of(graph=("attn",)), edits))
    assert (found.ranks, found.module, found.near) == ((1,), "embedding", "after")
    assert found.collective == "all-gather of the weights of root"
    assert any("rank 0 with norm:input[0]" in told for told in found.evidence)


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

    def run(bad: int) -> RunResult:
        digest = {n: f"{at + (100 if at >= bad else 0):032x}" for at, n in enumerate(STAGED)}
        rows = {name: f"{text}{at:08x}" for at, (name, text) in enumerate(digest.items())}
        return tapped(run_of(), 1, rows, stages=list(STAGED.values()))

    found = between(run(len(STAGED)), run(list(STAGED).index(first)))
    assert (found.phase, found.near, found.collective) == (phase, "in", transfer)
    assert found.module == first.partition(":")[0]


LOSSES = floats(microbatch_losses=(OTHER, OTHER), loss=OTHER)
EVALUATED, DRAWN = floats(evaluation=OTHER), digests(rng=("cpu",))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (both(LOSSES, digests(grads=WEIGHTS)), ("input", "head", "microbatch_losses[0]")),
        (LOSSES, ("outside", "", "microbatch_losses[0]")),
        (floats(loss=OTHER), ("reduce", "", "loss")),
        (digests(grads=WEIGHTS), ("reduce", "", "head.weight")),
        (digests(grads=[name for name in WEIGHTS if name.startswith("layers.0.")]),
         ("reduce", "layers.0", f"{LAYER}.attention.wo.weight")),
        (digests(grads=(f"{LAYER}.attention.wq.weight",)),
         ("backward", f"{LAYER}.attention.wq", f"{LAYER}.attention.wq.weight")),
        (digests(grads=(NORM, "layers.1.attn.norm.weight")), ("reduce", f"{LAYER}.norm", NORM)),
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
        # An evaluation comes after the update, and tells of the weights before it nothing new.
        (both(EVALUATED, digests(grads=WEIGHTS)), ("reduce", "", "head.weight")),
        (both(EVALUATED, digests(weights=WEIGHTS)), ("optimizer", "embedding", "embedding.weight")),
        (both(EVALUATED, DRAWN), ("forward", "", "evaluation")),
        (digests(buffers=("layers.0.mlp.router.balance_loss",)),
         ("forward", "layers.0.mlp.router", "layers.0.mlp.router.balance_loss")),
        (digests(**{COPIES: ("norm.weight",)}), ("optimizer", "norm", "norm.weight")),
        (digests(**{SAMPLES: ("targets",)}), ("input", "", "targets")),
    ],
)  # fmt: skip
def test_what_differs_while_every_call_is_equal_has_a_phase(edit: Edit, expected: Brief) -> None:
    """Losses, gradients, norm, moments, weights, random state: each rules out those before it."""
    found = place(edit)
    assert brief(found) == expected
    assert found.ranks == (0, 1)


def test_what_one_rank_alone_has_wrong() -> None:
    """Rows and norm of one rank came after the sum that ranks share; a loss before gradients."""
    rows = digests(grads=("embedding.weight", "norm.weight", "head.weight"))
    for edit in (rows, floats(grad_norm=OTHER)):
        found = place(edit, [1])
        assert (found.phase, found.near, found.ranks) == ("reduce", "after", (1,))
        assert not found.unknown
    found = place(both(LOSSES, calls_from("head:gradient"), digests(grads=WEIGHTS)))
    assert brief(found) == ("input", "head", "microbatch_losses[0]")
    found = place(both(calls_from("head:gradient"), digests(grads=WEIGHTS)), [1])
    assert (found.module, found.near, found.collective) == ("head", "", "")  # reads no weights
    found = place(both(LOSSES, digests(grads=WEIGHTS)), [0], taps=False)
    assert (found.module, found.quantity) == ("", "microbatch_losses[0]")
    assert found.unknown[0].startswith("module:")
    found = place(lambda record: record)
    assert (found.step, found.phase, found.module, bool(found.unknown)) == (None, None, "", True)


@pytest.mark.parametrize("other", [{"engine": "ddp"}, {"fused_experts": True}])
def test_where_state_is_cut_otherwise_losses_calls_and_random_states_tell(
    other: dict[str, Any],
) -> None:
    """Ranks hold other parts of each tensor, by other names: no digest of these is a difference."""
    candidate = run_of()
    for rank, held in enumerate(candidate.ranks):
        assert held.start is not None
        candidate = of_rank(candidate, rank, tensors=held.start.tensors | {"weights": ("x",)})
    spec = dataclasses.replace(candidate.spec, config=candidate.spec.config | other)
    candidate = dataclasses.replace(candidate, spec=spec)
    norm = between(run_of(), edited(candidate, dict.fromkeys((0, 1), floats(grad_norm=OTHER))))
    assert (norm.step, norm.phase, norm.near) == (2, "backward", "")
    assert norm.unknown[0].startswith("phase:")  # gradients may differ
    candidate = edited(candidate, {0: digests(grads=WEIGHTS), 1: calls_from("embedding:input")})
    found = between(run_of(), candidate)
    assert (found.step, *brief(found)) == (2, "input", "embedding", "embedding:input")
    assert found.ranks == (1,)
    assert not any("weights" in text for text in found.evidence)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (digests(grads=("norm.weight",)), ("backward", "grads", "norm.weight")),
        (digests(buffers=("layers.0.mlp.router.balance_loss",)),
         ("state", "ema", "layers.0.mlp.router.balance_loss")),
        (digests(weights=("norm.weight",)), ("optimizer", "weights", "norm.weight")),
    ],
)  # fmt: skip
def test_of_a_program_no_collective_is_named(edit: Edit, expected: Brief) -> None:
    """Nobody knows how it distributes its work; groups of its own come last."""
    found = between(foreign(run_of(taps=False)), foreign(edited(run_of(taps=False), {1: edit})))
    assert (found.phase, found.quantity, found.tensor) == expected
    assert (found.step, found.ranks, found.near, found.collective) == (2, (1,), "", "")


def test_a_teacher_that_differs_is_told_beside_the_loss() -> None:
    """Calls without gradients are not looked into: what it returned is unknown."""
    name = "layers.0.mlp.router.balance_loss"
    edit = both(LOSSES, digests(grads=WEIGHTS, buffers=(name,)))
    candidate = foreign(edited(run_of(), {1: edit}), group=OTHERS)
    found = between(foreign(run_of(), group=OTHERS), candidate)
    assert (found.phase, found.quantity) == ("input", "microbatch_losses[0]")
    assert any(name in told for told in found.evidence)


def test_a_gradient_comes_before_the_loss_of_a_later_microbatch() -> None:
    """As checkpointing that draws other numbers has it."""

    def later(record: StepRecord) -> StepRecord:
        losses = (record.microbatch_losses[0], OTHER)
        return dataclasses.replace(record, microbatch_losses=losses, loss=OTHER)

    found = place(both(later, calls_from("norm:gradient"), digests(grads=WEIGHTS)))
    assert (found.phase, found.tensor, found.microbatch) == ("backward", "norm:gradient", 0)


def test_a_tensor_of_one_run_alone_is_named() -> None:
    """Runs that hold other tensors are compared by name, not given up."""
    found = between(foreign(run_of(taps=False)), foreign(run_of(taps=False), extra=True))
    expected = {"phase": "initialisation", "tensor": "extra", "quantity": "weights", "step": -1}
    assert fields_of(found, expected) == expected
    assert any("one run alone" in told for told in found.evidence)


# --- who gave what to a collective


ONE_MODULE, ONE_UNIT = digests(grads=(NORM,)), digests(grads=WEIGHTS[2:5])
ALL_UNITS = [(rank, SCATTER, unit) for rank in (0, 1) for unit in ("root", "layers.0", "layers.1")]


@pytest.mark.parametrize(
    ("edit", "given", "expected"),
    [
        (ONE_MODULE, [(1, SCATTER, "layers.0")], ("backward", "before", (1,))),
        (ONE_UNIT, [(1, SCATTER, "layers.0")], ("reduce", "before", (1,))),
        # What a rank gave for another layer, or to a gather, is no matter: the sum went wrong.
        (ONE_MODULE, [(1, SCATTER, "layers.1"), (1, GATHERED, "layers.0")],
         ("reduce", "after", (0, 1))),
        (ONE_MODULE, [(0, SCATTER, "layers.0"), (1, SCATTER, "layers.0")],
         ("backward", "before", (0, 1))),
        # What a second reduction gets is the sum that came out of the first.
        (ONE_UNIT, [(0, SUM, "layers.0"), (1, SCATTER, "layers.0")], ("reduce", "before", (1,))),
        (digests(grads=WEIGHTS), ALL_UNITS, ("backward", "before", (0, 1))),
        (digests(grads=WEIGHTS), [], ("reduce", "in", (0, 1))),
        # A gather brings one rank's stale rows to all of them; one of equal weights is not blamed.
        (calls_from(f"{LAYER}.norm:output"), [(1, GATHERED, "layers.0")],
         ("forward", "before", (1,))),
        (calls_from(f"{LAYER}.norm:output"), [], ("forward", "", (0, 1))),
    ],
)  # fmt: skip
def test_what_each_rank_gave_tells_the_origin(edit: Edit, given: Any, expected: Any) -> None:
    """Rows of a sum are wrong on every rank that holds some; one of them brought it along."""
    found = place(edit, given=given)
    assert (found.phase, found.near, found.ranks) == expected
    assert not found.rank_is_hidden
    gathered = found.phase == "forward" and given
    assert (found.collective == "all-gather of the weights of layers.0") == bool(gathered)


def test_the_rank_that_entered_or_gave_something_else_first_is_the_origin() -> None:
    """Not the one whose module is wrong first; of all ranks alike it says nothing."""
    reference = with_given(run_of(), ())
    candidate = edited(
        with_given(run_of(graph=("attn",)), ()), {1: calls_from(f"{LAYER}.norm:output")}
    )
    (event,) = candidate.ranks[0].events
    turned = dataclasses.replace(event, detail={"calls": event.detail["calls"][::-1]})
    one = of_rank(candidate, 0, events=(turned,))
    gave = with_given(candidate, [(0, SCATTER, "root"), (1, SCATTER, "layers.0")])
    for other, expected in ((one, ("before", 0)), (gave, ("before", 0)), (candidate, ("after", 1)),
                            (of_rank(one, 1, events=(turned,)), ("after", 1))):  # fmt: skip
        found = between(reference, other)
        assert (found.near, found.rank, found.phase) == (*expected, "forward")


# --- what captures leave behind


REPEATED = both(LOSSES, digests(grads=WEIGHTS, weights=WEIGHTS, optim=("step_count",)))


EVERY, FIRST = (0, 1), (0,)


@pytest.mark.parametrize(
    ("edit", "taps", "ranks", "phase", "otherwise"),
    [
        (both(LOSSES, DRAWN), False, EVERY, "capture", "forward"),
        (both(LOSSES, DRAWN, calls_from(f"{LAYER}:output")), True, EVERY, "capture", "forward"),
        (DRAWN, True, EVERY, "capture", "input"),
        (both(LOSSES, DRAWN, other_calls([("layers.0:output", 0)])), True, EVERY, "capture",
         "forward"),
        (digests(weights=(BIAS,)), False, EVERY, "capture", "optimizer"),
        (REPEATED, False, EVERY, "capture", "forward"),
        (calls_from("embedding:output"), True, EVERY, "capture", "forward"),
        # A module that draws was right in the first microbatch: what replays do came after it.
        (both(LOSSES, DRAWN, other_calls([("layers.0:output", 0), (f"{LAYER}:output", 1)])),
         True, EVERY, "forward", "forward"),
        # A module that multiplies by weights draws nothing.
        (both(LOSSES, DRAWN, calls_from(f"{LAYER}.attention.wq:output")), True, EVERY, "forward",
         "forward"),
        (calls_from("embedding:output"), True, FIRST, "forward", "forward"),
        (digests(weights=(BIAS, WEIGHTS[1])), True, EVERY, "optimizer", "optimizer"),
        (digests(weights=(BIAS,), optim=("step_count",)), True, EVERY, "optimizer", "optimizer"),
    ],
    ids=["losses", "a module that draws", "the state", "one microbatch", "counts", "repeated",
         "from its beginning on", "drawn right", "draws nothing", "one rank", "a weight", "steps"],
)  # fmt: skip
def test_what_a_capture_leaves_behind_is_its_own(
    edit: Edit, taps: bool, ranks: Any, phase: str, otherwise: str
) -> None:
    """In the step that captures, unless the update or a replay did something else."""
    found = place(edit, ranks, taps=taps, captured_in=2)
    assert (found.step, found.phase) == (2, phase)
    assert place(edit, ranks, taps=taps, captured_in=1).phase == otherwise


# --- records that are at fault


@pytest.mark.parametrize("order", [(0, 1, 2, 2, 3), (0, 1, 3, 2), (0, 1, 3)])
def test_the_step_of_a_damaged_file_is_the_first_that_is_not_in_its_place(order: Any) -> None:
    """A record that stands twice, after that of the next step, or nowhere."""
    candidate = run_of(graph=("attn",))
    steps = tuple(candidate.ranks[1].steps[step] for step in order)
    problems = ("line 5: step 2 follows step 3",) if len(order) >= STEPS else ()
    found = between(run_of(), of_rank(candidate, 1, steps=steps, problems=problems))
    assert (found.phase, found.step, found.rank) == ("outside", 2, 1)


def old_state(record: StepRecord) -> StepRecord:
    """The record, with the digests of what step 1 left, though not of the data that it read."""
    before = run_of().ranks[1].steps[1].digests
    return dataclasses.replace(record, digests=before | {SAMPLES: record.digests[SAMPLES]})


def test_a_record_with_the_digests_of_the_step_before_is_not_the_programs_fault() -> None:
    """All of them, with the losses of its own step, and the next step is right again."""
    before, right = run_of().ranks[1].steps[1].digests, run_of(graph=("attn",))
    old = edited(right, {1: lambda record: dataclasses.replace(record, digests=before)})
    expected = {
        "phase": "outside", "module": "", "quantity": "digests", "step": 2, "ranks": (1,),
    }  # fmt: skip
    for found in (between(run_of(), old), between(old, right)):
        assert fields_of(found, expected) == expected
    # State that stays wrong, data of its own or other losses: something was computed otherwise.
    for other in (
        edited(old, {1: digests(weights=WEIGHTS)}, step=3),
        edited(old, {1: floats(loss=OTHER)}),
        edited(run_of(graph=("attn",)), {1: old_state}),
    ):
        assert between(run_of(), other).quantity != "digests"

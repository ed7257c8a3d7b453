"""What a failure follows: decided from made-up trials, and from runs of an engine without ranks."""

from collections.abc import Callable, Sequence

import pytest

from harness.bisect.experiments import CONFIDENCE
from harness.bisect.hardware import (
    MAX_TRIALS,
    Pair,
    Trial,
    began_on,
    decide,
    placements,
    weigh,
)
from harness.bisect.locate import failure_of_two
from tests.unit.harness.bisect.small_model import (
    OTHER,
    WEIGHTS,
    Edit,
    calls_from,
    digests,
    edited,
    floats,
    run_of,
)

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
Fails = Callable[[tuple[str, ...], int], Sequence[int] | None]
"""From a placement and a round to the ranks that fail, () unknown; None: it passes."""


def trials(
    fails: Fails, *, devices: Sequence[str] = GPUS[:2], ranks: int = 2, rounds: int = 5,
    hidden: bool = False,
) -> list[Trial]:  # fmt: skip
    """What would be seen in so many rounds."""
    found = []
    for number in range(rounds):
        for placed in placements(devices, ranks, hidden=hidden, pinned=False):
            bad = fails(placed, number)
            failed = bad is not None
            found.append(Trial(placed=placed, failed=failed, ranks=tuple(bad or ()), step=3))
    return found


def follows(made: Sequence[Trial], devices: Sequence[str] = GPUS[:2], ranks: int = 2) -> str:
    """The answer, with its device or rank."""
    found = decide(made, devices, ranks)
    best = found.suspects[0] if found.suspects else None
    is_sure = best is not None and best.probability >= CONFIDENCE
    assert (found.follows != "undecided") <= is_sure
    if found.follows == "undecided" or best is None:
        return "undecided"
    return f"{found.follows} {best.device or ('' if best.rank is None else best.rank)}".strip()


def on_device(placed: tuple[str, ...], _: int) -> list[int] | None:
    """Ranks on the second GPU fail."""
    return [rank for rank, device in enumerate(placed) if device == "GPU-b"] or None


def hidden_on_device(placed: tuple[str, ...], _: int) -> list[int] | None:
    """The same, and a sum over ranks hides which."""
    return [] if "GPU-b" in placed else None


@pytest.mark.parametrize(
    ("fails", "hidden", "answer"),
    [
        (on_device, False, "device GPU-b"),
        (lambda *_: [1], False, "rank 1"),
        (lambda *_: [0, 1], True, "program"),
        (lambda *_: [], True, "program"),
        # As a race does: on any rank, wherever that is.
        (lambda placed, n: [(n + (placed[0] == "GPU-b") * (n // 2)) % 2], False, "program"),
        (lambda *_: None, False, "nothing"),
        (hidden_on_device, True, "device GPU-b"),
    ],
    ids=["device", "rank", "program", "hidden", "any rank", "nothing", "hidden device"],
)
def test_each_answer(fails: Fails, hidden: bool, answer: str) -> None:
    """Of two ranks on two devices, by as many trials as a search makes."""
    assert follows(trials(fails, hidden=hidden)) == answer


def test_one_of_several_devices_is_singled_out() -> None:
    """Of four, whether or not ranks tell, and where ranks are fewer than devices."""
    for ranks in (1, 2, 4):
        for fails in (on_device, hidden_on_device):
            made = trials(fails, devices=GPUS, ranks=ranks, rounds=6, hidden=True)
            assert follows(made, GPUS, ranks) == "device GPU-b", (ranks, fails)


@pytest.mark.parametrize(
    ("edit", "ranks"),
    [
        (digests(weights=[WEIGHTS[0]]), (1,)), (digests(rng=["cpu"]), (1,)),
        (calls_from("layers.0.attn.norm:output"), (1,)),
        # Another rank may have brought these in.
        (digests(grads=[WEIGHTS[0]]), ()), (floats(microbatch_losses=(OTHER, OTHER)), ()),
    ],
    ids=["update", "random state", "call", "gradient", "loss"],
)  # fmt: skip
def test_ranks_on_which_a_failure_began(edit: Edit, ranks: tuple[int, ...]) -> None:
    """Of what is computed on a rank alone, by records; of nothing else."""
    pair = Pair(run_of(), edited(run_of(replica=2), {1: edit}))
    place = failure_of_two(*pair)
    assert place is not None
    assert began_on(pair, place) == ranks
    assert failure_of_two(run_of(), run_of(replica=2)) is None


def test_without_an_answer_nothing_is_concluded() -> None:
    """No trial, none that ran, or most of them lost: whatever the others say."""
    assert follows([]) == "undecided"
    lost = [Trial(placed=GPUS[:2], failed=None, told="not_run")] * 12
    assert follows(lost) == "undecided"
    made = trials(on_device)
    assert follows([*made, *lost]) == "undecided"
    assert decide(lost, GPUS[:2], 2).suspects == ()


def test_ties_are_undecided() -> None:
    """One device, or a failure that no rank tells and devices that are never left out."""
    alone = trials(lambda *_: [0], devices=GPUS[:1], ranks=1)
    assert follows(alone, GPUS[:1], 1) == "undecided"
    assert follows(trials(lambda *_: [])) == "undecided"


def test_few_trials_are_not_enough() -> None:
    """A pass or two may be luck, and so may one failure that moved."""
    quiet = trials(lambda *_: None, rounds=1)
    assert follows(quiet) == "undecided"
    assert follows(trials(on_device, rounds=1)) == "undecided"


def test_a_rare_failure_is_not_taken_for_one_that_moves() -> None:
    """It fails once in ten, on one placement; or in half of its runs, with the device."""
    once = trials(lambda placed, n: [0] if (placed[0], n) == ("GPU-a", 2) else None)
    assert follows(once) in ("undecided", "nothing")
    seldom = trials(
        lambda placed, n: on_device(placed, n) if n % 2 else None, rounds=MAX_TRIALS // 2
    )
    assert follows(seldom) == "device GPU-b"


def test_failures_elsewhere_speak_against_a_suspect() -> None:
    """A device that fails and another one, too: neither is blamed at once."""
    stray = [Trial(placed=GPUS[:2], failed=True, ranks=(0,), step=1)]
    both = trials(on_device, rounds=1) + stray * 2
    assert follows(both) == "undecided"
    before = weigh(trials(on_device), GPUS[:2], 2)[0].probability
    assert weigh(trials(on_device) + stray, GPUS[:2], 2)[0].probability < before


def test_another_machine_is_not_acquitted() -> None:
    """That nothing fails here says nothing of where it failed; a device here is blamed all the
    same."""
    quiet = trials(lambda *_: None)
    assert decide(quiet, GPUS[:2], 2, moved=True).follows == "undecided"
    assert decide(trials(on_device), GPUS[:2], 2, moved=True).follows == "device"


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_placements_tell_devices_and_ranks_apart(devices: int, ranks: int) -> None:
    """Each once; every rank is on two devices; of any two devices one is somewhere without the
    other, if there are that many."""
    names = [str(number) for number in range(devices)]
    found = placements(names, ranks, hidden=True, pinned=False)
    assert len(found) == len(set(found))
    assert {len(placed) for placed in found} == {ranks}
    for rank in range(ranks if devices > 1 else 0):
        assert len({placed[rank] for placed in found}) > 1
    base = found[0]
    for device in set(base) if devices > 1 else ():
        assert any(device not in placed for placed in found)
        for other in set(base) - {device}:
            assert any(device in placed and other not in placed for placed in found)

"""Contracts of tests.memory_table.allocations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_table.allocations import OWNERS, Ledger, explain, owner_of

MODEL = ("fsdp_core/model/attention.py:forward",)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["made", "resized", "freed"]), st.integers(0, 5), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(CHANGES, st.booleans())
def test_what_was_live_at_the_peak_is_what_a_copy_would_hold(
    changes: list[tuple[str, int, int]], long: bool
) -> None:
    """Undoing changes since the peak gives the allocations that a copy made then would have."""
    ledger, copied, peak = Ledger(), {}, 0
    for what, key, nbytes in changes * (40 if long else 1):
        if what == "made" and not ledger.holds(key):
            ledger.made(key, nbytes, MODEL)
        elif what == "resized":
            ledger.resized(key, nbytes)
        elif what == "freed":
            ledger.freed(key)
        if ledger.live_bytes > peak:
            peak, copied = ledger.live_bytes, ledger.now()
    assert ledger.peak_bytes == peak == sum(each.nbytes for each in copied.values())
    if peak:
        assert ledger.at_peak() == copied


@pytest.mark.parametrize(
    ("places", "owner"),
    [
        ((), "activations"),
        (("fsdp_core/fsdp/pool.py:_new_slot", "fsdp_core/fsdp/param_group.py:unshard",
          "fsdp_core/model/decoder.py:forward"), "gather buffers"),
        (("fsdp_core/fsdp/pool.py:acquire", "fsdp_core/fsdp/gradients.py:_take_full"),
         "reduce buffers"),
        (("fsdp_core/fsdp/layout.py:reduce", "fsdp_core/fsdp/gradients.py:reduce"),
         "reduce buffers"),
        (("fsdp_core/model/attention.py:forward", "fsdp_core/graph/host_graph.py:capture"),
         "graph pools"),
        (("fsdp_core/graph/graphed_callable.py:__init__",), "graph pools"),
        (("fsdp_core/graph/digest.py:mix", "fsdp_core/train/trainer.py:update"), "digests"),
        (("fsdp_core/model/weights.py:init_weights", "fsdp_core/train/build.py:build_stages"),
         "building"),
        (("fsdp_core/fsdp/optimizer.py:norm", "fsdp_core/model/sharding.py:clip_grads"),
         "optimizer"),
        (("harness/worker/main.py:run",), "rest"),
    ],
)  # fmt: skip
def test_the_code_that_asks_tells_the_owner(places: tuple[str, ...], owner: str) -> None:
    """The innermost place that means something decides, a capture and construction above all."""
    assert owner_of(places) == owner


def test_an_object_that_still_has_memory_owns_it() -> None:
    """Objects come before stacks, but only for the very allocation that was live at the peak."""
    ledger = Ledger()
    for key in (1, 2, 3):
        ledger.made(key, 100, MODEL)
    ledger.freed(2)
    ledger.freed(3)
    ledger.made(3, 50, MODEL)  # the address again, another request
    found = explain(ledger, {1: "optimizer", 2: "gradients", 3: "parameters"}, 310)
    expected = {"optimizer": 100, "activations": 200, "rest": 10}
    assert found.owners == dict.fromkeys(OWNERS, 0) | expected
    assert (sum(found.owners.values()), found.unexplained_bytes) == (310, 10)


def test_places_of_the_rest_are_named() -> None:
    """What nobody owns is listed by the code that asked for it, the largest first."""
    ledger = Ledger()
    for key, (nbytes, place) in enumerate([(5, "a.py:f"), (9, "b.py:g"), (5, "a.py:f")]):
        ledger.made(key, nbytes, (place,))
    found = explain(ledger, {}, 19)
    assert found.largest_rest == (("a.py:f", 10), ("b.py:g", 9))
    assert found.owners["rest"] == 19

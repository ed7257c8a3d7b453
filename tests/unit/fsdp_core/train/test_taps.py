"""Taps: the digests of calls, the same in graphs and outside, and no bit of the run changed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_core.dispatch import tensors_in
from fsdp_core.graph.digest import digest_tensors, empty_rows
from fsdp_core.train.taps import MOST_KINDS, NEVER, PLACE_COLUMN, Tap, Taps

CPU = torch.device("cpu")
MICROBATCHES = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.3, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


KINDS = ("input", "output", "gradient")


def everything(
    model: nn.Module, kinds: tuple[str, ...] = KINDS, names: tuple[str, ...] = ()
) -> Taps:
    called = [(n, m) for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]
    called = [(n, m) for n, m in called if not names or n in names]
    taps = [Tap(name or "net", module, kind) for name, module in called for kind in kinds]
    return Taps(taps, MICROBATCHES, CPU)


def data(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 8, generator=generator) for _ in range(MICROBATCHES)]


def rows_by_name(taps: Taps) -> dict[str, list[int]]:
    return dict(zip(taps.names, taps.rows.tolist(), strict=True))


def in_order(taps: Taps) -> list[str]:
    """Names of the rows that were written, in the order in which they ran."""
    ran = [(row[PLACE_COLUMN], name) for name, row in rows_by_name(taps).items()]
    return [name for place, name in sorted(ran) if place != NEVER]


def digest(*tensors: torch.Tensor) -> list[int]:
    while True:
        rows = empty_rows(len(tensors), CPU)
        digest_tensors(tensors, rows)
        if len(rows) == 1:
            return list(rows[0].tolist())
        tensors = (rows,)


def step_eagerly(model: nn.Module, number: int) -> None:
    for x in data(number):
        model(x).square().mean().backward()


@dataclass
class Seen:
    """What a run showed: rows of taps and calls by step, and the bits that it left."""

    rows: list[dict[str, list[int]]]
    calls: list[list[int]]
    bits: list[torch.Tensor]


def run(model: nn.Module, taps: Taps | None, step: Callable[[int], None]) -> Seen:
    torch.manual_seed(5)
    seen = Seen([], [], [])
    for number in range(2):
        if taps is not None:
            taps.begin()
        model.zero_grad(set_to_none=False)
        step(number)
        if taps is not None:
            seen.rows.append(rows_by_name(taps))
            seen.calls.append(taps.calls_seen.tolist())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                seen.bits.append(parameter.grad.clone())
                parameter.sub_(parameter.grad, alpha=0.1)
    seen.bits += [torch.get_rng_state(), *(p.detach().clone() for p in model.parameters())]
    return seen


def test_rows_are_the_digests_of_what_went_through() -> None:
    """Input, output and the gradient of the output of each call, in the row of its number."""
    model = Net()
    taps = everything(model)
    expected: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            continue
        calls = iter(range(MICROBATCHES))

        def note(
            module: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor,
            name: str = name or "net", calls: Iterator[int] = calls,
        ) -> None:  # fmt: skip
            number = next(calls)
            expected[f"{name}:input[{number}]"] = digest(args[0])
            expected[f"{name}:output[{number}]"] = digest(out)

            def note_gradient(grad: torch.Tensor) -> None:
                expected[f"{name}:gradient[{number}]"] = digest(grad)

            out.register_hook(note_gradient)

        module.register_forward_hook(note)
    taps.begin()
    step_eagerly(model, 0)
    assert {name: row[:5] for name, row in rows_by_name(taps).items()} == expected
    assert len({tuple(row) for row in expected.values()}) > len(expected) // 2


def test_the_place_is_the_order_of_the_step() -> None:
    """Calls of all modules and directions are numbered as they ran, from 0 in each step."""
    model = Net()
    taps = everything(model, ("input", "output", "gradient"))
    for number in range(2):
        taps.begin()
        step_eagerly(model, number)
        order = in_order(taps)
        assert order[:3] == ["net:input[0]", "blocks.0:input[0]", "blocks.0.up:input[0]"]
        forward = [name for name in order if "gradient" not in name]
        assert [name for name in order if name.endswith("[0]")] == order[: len(order) // 2]
        assert forward[len(forward) // 2 - 1] == "net:output[0]"
        gradients = [name for name in order if "gradient" in name]
        assert gradients[0] in ("net:gradient[0]", "head:gradient[0]")
        assert gradients.index("blocks.1:gradient[0]") < gradients.index("blocks.0:gradient[0]")
        places = [row[PLACE_COLUMN] for row in rows_by_name(taps).values()]
        assert sorted(places) == list(range(len(taps.names)))


def test_hooks_that_are_taken_away_do_not_take_taps_along() -> None:
    """Captures take the hooks off a subtree; a tap is none."""
    model = Net()
    taps = everything(model, ("output", "gradient"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    taps.begin()
    step_eagerly(model, 0)
    assert all(row[PLACE_COLUMN] != NEVER for row in taps.rows.tolist())


def test_only_training_is_seen() -> None:
    """Evaluation between steps, with gradients or without, leaves the rows as they were."""
    model = Net()
    taps = everything(model)
    taps.begin()
    step_eagerly(model, 0)
    before = taps.rows.clone()
    model.eval()
    model(data(1)[0])
    with torch.no_grad():
        model(data(1)[0])
    assert torch.equal(taps.rows, before)
    assert taps.calls_seen.tolist() == [MICROBATCHES] * len(taps.tap_names)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_are_seen_once(reentrant: bool) -> None:
    """A checkpoint calls the block twice: digests and order of calls are those without it."""

    def rows(checkpointed: bool) -> dict[str, list[int]]:
        model = Net()
        taps = everything(model)
        taps.begin()
        torch.manual_seed(7)
        for x in data(0):
            x.requires_grad_()
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
            model.head(x).square().mean().backward()
        assert taps.calls_seen.tolist()[3:] == [MICROBATCHES] * (len(taps.tap_names) - 3)
        return {name: row[:4] for name, row in rows_by_name(taps).items()}

    assert rows(True) == rows(False)


def test_calls_beyond_the_rows_are_folded_into_the_last() -> None:
    """Of a module that is called more often no call is lost, nor the order of calls."""

    def rows_of(*values: float) -> list[list[int]]:
        shared, other = nn.Identity(), nn.Identity()
        taps = Taps([Tap("x", shared, "output"), Tap("y", other, "output")], 2, CPU)
        taps.begin()
        for value in values:
            shared(torch.full((2,), value))
        other(torch.zeros(1))
        assert taps.calls_seen.tolist() == [len(values), 1]
        assert taps.rows[:, PLACE_COLUMN].tolist() == [0, 1, len(values), NEVER]
        return [row[:4] for row in taps.rows[:2].tolist()]

    first, last = rows_of(1, 2, 3, 4)
    assert [first] == rows_of(1, 2)[:1] == rows_of(1, 3, 2, 4)[:1]
    others = [rows_of(*v)[1] for v in ((1, 2), (1, 3, 2, 4), (1, 2, 4, 3), (1, 2, 3), (1, 2, 3, 5))]
    assert last not in others
    assert len({tuple(row) for row in others}) == len(others)
    assert rows_of(1, 2, 3, 4) == [first, last]


def test_what_never_ran_says_so() -> None:
    """A step begins with no row written; a call that is left out leaves its row so."""
    model = Net()
    taps = everything(model, ("output",))
    step_eagerly(model, 0)
    taps.begin()
    model.head(torch.ones(1, 8))
    rows = rows_by_name(taps)
    assert rows.pop("head:output[0]")[PLACE_COLUMN] == 0
    assert all(row == [0, 0, 0, 0, 0, NEVER] for row in rows.values())


@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Splits(nn.Module):
    def forward(self, x: torch.Tensor, swap: bool) -> Pair:
        return Pair(x[1], x[0]) if swap else Pair(x[0], x[1])


def test_swapped_outputs_differ() -> None:
    """Several tensors are digested together, each in its place; a dataclass shows its fields."""
    model = Splits()
    taps = Taps([Tap("splits", model, "output")], 2, CPU)
    taps.begin()
    x = torch.arange(8.0).view(2, 4)
    model(x, False)
    model(x, True)
    assert taps.rows[:, :5].tolist() == [digest(x[0], x[1]), digest(x[1], x[0])]
    assert digest(x[0], x[1]) != digest(x[1], x[0])


def test_records_among_inputs_are_left_alone() -> None:
    """Plans that a module is given describe its data; tensors in tuples and dicts are seen."""
    a, b, c = (torch.ones(n) for n in (1, 2, 3))
    value = ((a, Pair(b, b)), {"key": [c]})
    found = [(name, t.numel()) for name, t in tensors_in(value, open_records=False)]
    assert found == [("[0][0]", 1), ("[1]['key'][0]", 3)]
    found = [(name, t.numel()) for name, t in tensors_in(value, "x")]
    assert [number for _, number in found] == [1, 2, 2, 3]
    assert [name for name, _ in found][1:3] == ["x[0][1].first", "x[0][1].second"]


def test_what_cannot_be_digested_is_refused_by_name() -> None:
    """A tensor without a bit pattern names its tap and says what to do."""
    model = nn.Identity()
    taps = Taps([Tap("layers.0", model, "output")], 1, CPU)
    taps.begin()
    with pytest.raises(ValueError, match=r"layers\.0:output.*leave it out of taps.*complex64"):
        model(torch.ones(2, dtype=torch.complex64))


def test_many_shapes_are_forgotten_again() -> None:
    """Shapes that depend on the data do not pile up, and each is still digested."""
    model = nn.Identity()
    taps = Taps([Tap("x", model, "output")], 1, CPU)
    for size in range(1, 2 * MOST_KINDS):
        taps.begin()
        model(torch.ones(size))
        assert taps.rows[0, :5].tolist() == digest(torch.ones(size))
    kinds = {name.rpartition(" ")[2] for name, _ in taps.named_tensors() if "scratch" in name}
    assert len(kinds) == MOST_KINDS


def test_no_taps_cost_nothing() -> None:
    """Without taps there are no rows, no names, and a step begins without any work."""
    taps = Taps([], 2, CPU)
    taps.begin()
    assert taps.rows.shape == (0, 6)
    assert list(taps.named_tensors()) == []

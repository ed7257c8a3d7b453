"""Faults are planted in cells that nobody chose, and what the entry needs stays."""

from harness.detection.elsewhere import ELSEWHERE_LABEL, elsewhere
from harness.detection.matrix import plan_cases
from harness.faults.catalogue import CATALOGUE

SEED = 3


def test_a_seed_gives_each_fault_one_legal_cell_that_is_not_its_own() -> None:
    """Every entry that runs on the CPU is moved, by the rules, and alike each time."""
    chosen = tuple(fault for fault in CATALOGUE.values() if "cpu" in fault.devices)[::6]
    cases = plan_cases(chosen, 0, "cpu", SEED)
    assert [case.labels["fault"] for case in cases] == [fault.name for fault in chosen]
    for fault, case in zip(chosen, cases, strict=True):
        assert not case.skip_reason, (fault.name, case.skip_reason)
        assert case.labels[ELSEWHERE_LABEL] == str(SEED)
        moved = elsewhere(fault, SEED, "cpu")
        assert moved == elsewhere(fault, SEED, "cpu")
        assert moved.cell != fault.cell, fault.name


def test_what_an_entry_says_of_its_own_cell_stays() -> None:
    """No setting of an entry is drawn anew, and a fault of the capture keeps its step."""
    for fault in CATALOGUE.values():
        moved = elsewhere(fault, SEED, "cpu")
        assert fault.cell.settings.items() <= moved.cell.settings.items()
        assert moved.cell.graph == fault.cell.graph
        if fault.cell.step == 2:
            assert moved.cell.step == 2


def test_another_seed_gives_other_cells() -> None:
    """Two seeds are two looks at most entries."""
    chosen = tuple(CATALOGUE.values())[::6]
    other = sum(elsewhere(f, 1, "cpu").cell != elsewhere(f, 2, "cpu").cell for f in chosen)
    assert other > len(chosen) / 2


def test_a_moved_tensor_moves_the_pointer_with_it() -> None:
    """Where a fault takes a tensor and gets another one, the answer is due there."""
    ulp = CATALOGUE["ulp"]
    moved = [elsewhere(ulp, seed, "cpu") for seed in range(12)]
    named = [fault for fault in moved if fault.cell.tensor]
    assert named
    for fault in named:
        assert fault.points_at is not None
        assert fault.points_at.tensor == fault.cell.tensor
        assert fault.cell.tensor.startswith(fault.points_at.module)

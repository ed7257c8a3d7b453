"""Checkpoints over ranks: every bit back, in any layout, whatever dies."""

import pickle
import re
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.checkpoint import latest
from tests.dist import checkpoint_programs as programs
from tests.dist.checkpoint_programs import LAYOUTS, OPTIMIZERS, world_of
from tests.dist.fsdp_sides import differences, same_bits
from tests.dist.rank_pool import RankPool

HUBS = ("plain", "hfsdp")
"""Every layout is loaded into these, and these into every layout."""


@pytest.fixture(scope="module")
def saved(warm_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each layout: a folder with a checkpoint, and the state that was saved."""
    found = {}
    for layout in LAYOUTS:
        folder = str(tmp_path_factory.mktemp("saved"))
        states = warm_ranks.run(
            programs.train_and_save, folder, layout, world_size=world_of(layout)
        )
        found[layout] = folder, states[0]
    return found


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_checkpoint_loads_into_other_layouts_bit_for_bit(
    warm_ranks: RankPool, saved: dict[str, Any], layout: str
) -> None:
    """Weights, buffers, optimizer states and hyperparameters are those saved, on every rank."""
    sources = [name for name in LAYOUTS if layout in HUBS or name in (*HUBS, layout)]
    folders = [saved[name][0] for name in sources]
    for rank in warm_ranks.run(programs.load_each, folders, layout, world_size=world_of(layout)):
        for source, (step, extra, state) in zip(sources, rank, strict=True):
            assert (step, extra) == (3, {"tokens": [3, 0.1]})
            assert "blocks.0.up.weight.exp_avg_sq" in state
            assert differences(saved[source][1], state) == [], source


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "NAdam", "ASGD"])
def test_states_of_any_optimizer_load_into_other_layouts(
    warm_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """Cut and single states alike, of matrices and of numbers, both ways."""
    folder, back = str(tmp_path / "cut"), str(tmp_path / "whole")
    expected = warm_ranks.run(programs.train_and_save, folder, "params", optimizer, world_size=4)[0]
    whole = warm_ranks.run(programs.train_and_save, back, "plain", optimizer, world_size=1)[0]
    for layout in ("plain", "optim"):
        for rank in warm_ranks.run(
            programs.load_each, [folder, back], layout, optimizer, world_size=world_of(layout)
        ):
            assert differences([expected, whole], [state for _, _, state in rank]) == []


CONTINUED = [("AdamW", name) for name in ("plain", "no_shard", "optim", "params", "hfsdp")]
CONTINUED += [(name, "params") for name in OPTIMIZERS if name != "AdamW"]


@pytest.mark.parametrize(("optimizer", "layout"), CONTINUED)
def test_continued_training_is_uninterrupted_training(
    warm_ranks: RankPool, tmp_path: Path, optimizer: str, layout: str
) -> None:
    """Two steps after a load give the bits of two steps after the save; live memory stays put."""
    ranks = warm_ranks.run(
        programs.continue_or_not, str(tmp_path), layout, optimizer, world_size=world_of(layout)
    )
    for expected, resumed, put_back in ranks:
        assert differences(expected, resumed) == []
        assert differences(expected, put_back) == []


def test_buffers_that_differ_between_ranks_come_back_to_their_rank(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """BatchNorm's statistics of each rank are its own again."""
    ranks = warm_ranks.run(programs.rank_statistics, str(tmp_path), True, world_size=2)
    assert ranks[0] != ranks[1]
    assert warm_ranks.run(programs.rank_statistics, str(tmp_path), False, world_size=2) == ranks


def test_buffers_of_other_ranks_are_the_firsts_with_a_warning(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """On another number of ranks BatchNorm's statistics are the first rank's, and that is said."""
    first, _ = warm_ranks.run(programs.rank_statistics, str(tmp_path), True, world_size=2)
    for statistics, texts in warm_ranks.run(
        programs.warned_statistics, str(tmp_path), world_size=4
    ):
        assert statistics == first
        assert any("model.norm.running_mean differed between the ranks" in t for t in texts)


def test_parameters_that_differ_between_ranks_load_on_as_many_only(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """A parameter of each rank's own is its own again, and is refused on other numbers of ranks."""
    warm_ranks.run(programs.own_parameters, str(tmp_path), True, world_size=2)
    loaded = warm_ranks.run(programs.own_parameters, str(tmp_path), False, world_size=2)
    assert loaded == ["0.0", "1.0"]
    for text in warm_ranks.run(programs.own_parameters, str(tmp_path), False, world_size=3):
        assert "Expected the 2 ranks that saved, as model.weight differed" in text


@pytest.mark.parametrize("layout", ["no_shard", "optim_grads", "params", "hfsdp"])
def test_units_may_be_gathered_while_saved_and_loaded(
    warm_ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Main weights are saved, not their bfloat16 copies, and copies follow a load at once."""
    for before, after, outs in warm_ranks.run(
        programs.gathered, str(tmp_path), layout, world_size=world_of(layout)
    ):
        assert differences(before, after) == []
        assert not same_bits(outs[0], outs[1])
        assert same_bits(outs[0], outs[2])


def test_torchs_own_load_reads_the_folder(warm_ranks: RankPool, saved: dict[str, Any]) -> None:
    """`torch.distributed.checkpoint.load` of the model's state_dict loads the same weights."""
    for found in warm_ranks.run(programs.read_with_dcp, saved["hsdp"][0], world_size=4):
        assert found == []


# --- asynchronous saves -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["optim", "hsdp", "plain"])
def test_training_goes_on_during_an_asynchronous_save(
    warm_ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """What was there at the call is saved; a second save waits for the first."""
    for expected, found, name in warm_ranks.run(
        programs.save_while_training, str(tmp_path), layout, world_size=world_of(layout)
    ):
        assert differences(expected, found) == []
        assert name == "step-00000001"


# --- failures ---------------------------------------------------------------------------------

FAILURES = {
    "full disk": r"CheckpointError: Saving step 2 into \S+ failed on rank 1 .*Errno 27\] File too",
    "unlike extra": r"ValueError: .*rank 0.*same extra on all ranks, got on rank 1 ",
    "odd extra": r"ValueError: .* failed on rank 1 .*extra\.odd, got a set\.",
}


@pytest.mark.parametrize(
    ("how", "asynchronous"), [*((how, False) for how in FAILURES), ("full disk", True)]
)
def test_a_failure_on_one_rank_is_known_to_all(
    warm_ranks: RankPool, tmp_path: Path, how: str, asynchronous: bool
) -> None:
    """All ranks raise and name rank and cause; the last checkpoint stands; the next save works."""
    for found in warm_ranks.run(
        programs.fail_then_save, str(tmp_path), how, asynchronous, world_size=3
    ):
        assert re.match(FAILURES[how], found["text"]), found["text"]
        assert "step-00000002" not in found["names"]
        assert (found["step"], found["differences"]) == (1, [])
        assert found["after"] == [".lock", "step-00000001", "step-00000002"]


WORLD = 4
DEATHS = {
    "rank writing": ([1], "writing", 1),
    "rank writing asynchronously": ([1], "writing", 1),
    "all writing": ([0, 1, 2, 3], "writing", 1),
    "coordinator renaming": ([0], "renaming", 1),
    "coordinator removing the oldest": ([0], "removing", 2),
}


@pytest.mark.parametrize("death", list(DEATHS))
def test_a_killed_rank_leaves_the_last_checkpoint(
    warm_ranks: RankPool, tmp_path: Path, death: str
) -> None:
    """Ranks that live learn of it before any timeout, and what is complete loads bit for bit."""
    victims, where, left = DEATHS[death]
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", programs.__name__])
    pipes = [context.Pipe() for _ in range(WORLD)]
    processes = [
        context.Process(
            target=programs.die,
            args=(rank, WORLD, str(tmp_path), victims, (where, "async" in death), pipes[rank][1]),
            daemon=True,
        )
        for rank in range(WORLD)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    states: list[Any] = []
    for rank in range(WORLD):
        ours = pipes[rank][0]
        states = [pickle.loads(ours.recv_bytes()) for _ in range(2)]
        if rank in victims:
            with pytest.raises(EOFError):
                ours.recv_bytes()
        else:
            text, seconds = pickle.loads(ours.recv_bytes())
            assert "step 2" in text
            assert "another rank died or did not answer" in text or left == 2
            assert seconds < 30
    for process, (ours, _) in zip(processes, pipes, strict=True):
        if process.is_alive():
            ours.send_bytes(b"done")
        process.join()
        ours.close()
    folder = tmp_path / "saved"
    assert latest(folder) == left
    for step, state, names in warm_ranks.run(programs.load_and_save, str(folder), world_size=3):
        assert step == left
        assert differences(states[left - 1], state) == []
        assert names == [".lock", *(f"step-{s:08d}" for s in (left, 9))]


def test_what_one_rank_finds_wrong_stops_all(warm_ranks: RankPool, tmp_path: Path) -> None:
    """A misfit or damage that one rank sees raises on all, before anything is changed."""
    folder = str(tmp_path)
    warm_ranks.run(programs.train_and_save, folder, "more units", world_size=2)
    kinds = ["optimizer on one rank", "damaged"]
    for misfit, damage in warm_ranks.run(programs.refusals, folder, kinds, world_size=2):
        assert re.match(
            r"ValueError: Loading \S+ failed on rank 1 .*Expected SGD with 1 .*got AdamW with 2",
            misfit[0],
        )
        assert re.match(r"CheckpointError: .*__1_0.distcp is damaged", damage[0])
        assert misfit[1] == damage[1] == []

"""`launch.slurm` and `--slurm`: what is taken, what is refused, what wins."""

from pathlib import Path
from typing import Any

import pytest

from harness.engine.slurm_job import OURS, SlurmOptions, device_on_slurm, stored_options
from harness.errors import ScenarioError, UsageError
from harness.repeats import confirming_runs
from harness.runner import launch
from harness.runner.launch import Request, prepare
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.sections import Launch

SCENARIO = """\
name: small
why: A reason.
base: {steps: 4}
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}}
launch: LAUNCH
"""
FULL = (
    "{engine: slurm, slurm: {partition: gpu, account: me, walltime_s: 90, pending_s: 60, "
    "nodes: 2, "
    "ranks_per_node: 4, gpus_per_node: 8, cpus_per_rank: 3, requeue: true, args: [--qos=high]}}"
)


@pytest.fixture
def launch_of(tmp_path: Path):  # type: ignore[no-untyped-def]
    """The launch section of a scenario whose launch section is the text given."""

    def load(text: str, *sets: str) -> Launch:
        path = tmp_path / "s.yaml"
        path.write_text(SCENARIO.replace("LAUNCH", text))
        return load_scenario(path, overrides=Overrides(sets=sets)).launch

    return load


def test_every_key_is_taken(launch_of) -> None:  # type: ignore[no-untyped-def]
    """A scenario can say all that a job may ask of Slurm."""
    launch = launch_of(FULL)
    assert launch.engine == "slurm"
    assert launch.slurm == SlurmOptions(
        partition="gpu", account="me", walltime_s=90.0, pending_s=60.0, nodes=2,
        ranks_per_node=4, gpus_per_node=8, cpus_per_rank=3, requeue=True, args=("--qos=high",),
    )  # fmt: skip


def test_options_of_the_command_line_win_key_by_key(launch_of) -> None:  # type: ignore[no-untyped-def]
    """`--set launch.slurm.KEY` replaces that key alone; without a section it makes one."""
    launch = launch_of(FULL, "launch.slurm.partition=other", "launch.slurm.args=[]")
    assert (launch.slurm.partition, launch.slurm.account, launch.slurm.args) == ("other", "me", ())
    bare = launch_of("{}", "launch.engine=slurm", "launch.slurm.nodes=2")
    assert (bare.engine, bare.slurm) == ("slurm", SlurmOptions(nodes=2))


def test_without_a_word_of_it_runs_are_local(launch_of) -> None:  # type: ignore[no-untyped-def]
    """The engine is this machine unless a scenario or an option says otherwise."""
    assert launch_of("{}").engine == "local"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{engine: slrum}", "did you mean slurm"),
        ("{slurm: {partitions: x}}", "did you mean partition"),
        ("{slurm: {nodes: 0}}", "launch.slurm.nodes: expected an integer >= 1, got 0"),
        ("{slurm: {walltime_s: 0}}", "a number > 0"),
        ("{slurm: {pending_s: 0}}", "a number > 0"),
        ("{slurm: {pending_s: 1e300}}", "at most 2592000"),
        ("{slurm: {walltime_s: 1e300}}", "at most 2592000"),
        ("{slurm: {partition: a b}}", "a name without spaces"),
        ("{slurm: {requeue: 1}}", "expected a bool"),
        ("{slurm: {args: --qos=high}}", "a list of options of sbatch"),
        ("{slurm: {args: [qos]}}", "each with its value"),
        ("{slurm: {args: ['--partition=x']}}", "launch.slurm.partition, as the engine says"),
        ("{slurm: {args: [-px]}}", "launch.slurm.partition, as the engine says"),
        ("{slurm: {args: ['-Q']}}", "an option that is not its own"),
        ("{slurm: {args: ['--array=1-3']}}", "an option that is not its own"),
        ("{slurm: {args: ['--arr=1-3']}}", "an option that is not its own"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(  # type: ignore[no-untyped-def]
    launch_of, text: str, told: str
) -> None:
    """A misspelt key, a wrong type, an option that would undo the engine's own."""
    with pytest.raises(ScenarioError, match="launch") as refused:
        launch_of(text)
    assert told in str(refused.value)


def test_every_option_points_at_a_key_that_there_is() -> None:
    """Whoever is sent to a key of launch.slurm finds it."""
    assert {key for key in OURS.values() if key} <= set(SlurmOptions().to_json())


def test_the_device_is_not_that_of_the_machine_at_hand() -> None:
    """On Slurm, auto is cuda exactly where GPUs are asked for; cuda without them is a mistake."""
    gpus = SlurmOptions(gpus_per_node=8)
    assert device_on_slurm("auto", SlurmOptions()) == "cpu"
    assert device_on_slurm("auto", gpus) == device_on_slurm("cuda", gpus) == "cuda"
    assert device_on_slurm("cpu", gpus) == "cpu"
    with pytest.raises(UsageError, match="gpus_per_node"):
        device_on_slurm("cuda", SlurmOptions())


def test_a_prepared_request_carries_engine_options_and_room(tmp_path: Path) -> None:
    """`--engine slurm --slurm nodes=2` plans every run at once, GPUs or none on this machine."""
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.replace("LAUNCH", "{slurm: {gpus_per_node: 8}}"))
    prepared = prepare(Request(paths=(path,), engine="slurm", slurm=("nodes=2",)))
    assert prepared.slurm == SlurmOptions(nodes=2, gpus_per_node=8)
    assert (prepared.device, prepared.devices) == ("cuda", ())
    assert prepared.plan.slots == 3 * (1 + 2)
    assert not prepared.plan.skipped
    assert prepare(Request(paths=(path,), device="cpu")).slurm is None
    with pytest.raises(UsageError, match="these go to Slurm"):
        prepare(Request(paths=(path,), engine="slurm", ranks_per_gpu=2))


def test_what_was_asked_is_read_back_from_the_manifest() -> None:
    """`--resume` goes to the same place; a damaged entry is an error, not this machine."""
    options = SlurmOptions(partition="x", nodes=3)
    assert stored_options({"slurm": options.to_json()}) == options
    assert stored_options({"slurm": None}) is None
    assert stored_options({}) is None
    with pytest.raises(UsageError, match="damaged"):
        stored_options({"slurm": {"nodes": "3"}})


@pytest.mark.parametrize("same", ["false", "true"])
def test_every_run_of_a_case_is_sent_to_the_nodes_of_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: str
) -> None:
    """Control, candidate and the repeats that confirm a difference; only where it is asked for."""
    path = tmp_path / "s.yaml"
    path.write_text(
        SCENARIO.replace(
            "LAUNCH", f"{{engine: slurm, confirm: true, slurm: {{same_nodes: {same}}}}}"
        )
    )
    given: dict[str, Any] = {}
    monkeypatch.setattr(launch, "SlurmEngine", lambda options, **more: given.update(more))
    prepared = prepare(Request(paths=(path,)))
    launch.make_engine(prepared)
    expected = {
        spec.key: case.reference.key
        for case in prepared.plan.cases
        for spec in (case.control, case.candidate, *confirming_runs(case).values())
    }
    assert len(expected) == 2 * 4
    assert given["references"] == (expected if same == "true" else None)

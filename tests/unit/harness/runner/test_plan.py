"""Contracts of plans: what cannot run here, order, shards, and what is expected of the time."""

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.config import (
    ParallelConfig,
    TrainConfig,
    model_from_preset,
    to_plain,
)
from harness.engine.machine import Machine
from harness.errors import NothingSelected, UsageError
from harness.history.ledger import History, work_of
from harness.records import CaseSpec, PlantSpec, RunResult, RunSpec
from harness.repeats import NUM_SAMPLES, SLOWDOWN, runs_of
from harness.runner import plan as planning
from harness.runner.plan import (
    Cost,
    Estimates,
    Job,
    Plan,
    Queue,
    Timeline,
    arrange,
    cost,
    cut,
    estimate_s,
    expected,
    expected_here,
    make_plan,
    makespan_s,
    num_parameters,
    parse_shard,
    parts,
    take_shard,
)
from harness.store.merge import Shard
from tests.support.fake_engine import Patch
from tests.support.records import case_spec, end, outcome, rank_records, run_spec, start, step
from tests.unit.harness.history.nights import MACHINE, night

TINY = TrainConfig(steps=4).to_dict()


def run(world_size: int, **fields: Any) -> RunSpec:
    """A run of so many ranks."""
    return run_spec(world_size, **({"timeout_s": 60.0, "config": TINY} | fields))


def case(name: str, world_size: int, *, graph: str = "attn", **fields: Any) -> CaseSpec:
    """A case whose runs have so many ranks."""
    config = TrainConfig(graph=(graph,), steps=4).to_dict()
    reference, control = (run(world_size, replica=number, **fields) for number in range(2))
    return case_spec(name, reference, control, run(world_size, **({"config": config} | fields)))


def named(name: str, world_size: int = 1, reference: str = "") -> CaseSpec:
    """A case whose runs have names in place of configurations."""
    config = {"name": reference or f"{name}-ref"}
    ref, control = (run(world_size, config=config, replica=number) for number in range(2))
    return case_spec(name, ref, control, run(world_size, config={"name": name}))


def names(jobs: Iterable[Job]) -> list[str]:
    return [f"{job.spec.config['name']}{'*' if job.spec.replica else ''}" for job in jobs]


def changed(part: str, **values: Any) -> dict[str, Any]:
    """A configuration with other values in one of its parts, or at its root."""
    return TINY | ({part: TINY[part] | values} if part else values)


def test_shared_runs_are_made_once_and_the_widest_first() -> None:
    """One reference and one control serve all candidates; cases of one stay together; as JSON."""
    plan = make_plan([case("a", 2), case("b", 2, graph="full_iteration"), case("w", 8)], slots=8)
    assert [planned.serves for planned in plan.runs] == [
        ("w",), ("w",), ("w",), ("a", "b"), ("a", "b"), ("a",), ("b",),
    ]  # fmt: skip
    assert [planned.key for planned in plan.runs] == [planned.spec.key for planned in plan.runs]
    assert [c.id for c in plan.cases] == ["a", "b", "w"]
    assert Plan.from_json(plan.to_json()) == plan


def test_samples_of_rounding_are_shared_and_cost_more() -> None:
    """Cases of one reference share six runs that round at random, each several times as long."""
    of_two = [case("a", 2), case("b", 2, graph="full_iteration")]
    plan = make_plan([dataclasses.replace(c, expect="rounding") for c in of_two], slots=8)
    samples = [planned for planned in plan.runs if planned.spec.rounding]
    assert len(plan.runs) == 4 + NUM_SAMPLES
    assert [planned.serves for planned in samples] == [("a", "b")] * NUM_SAMPLES
    plain = next(planned for planned in plan.runs if planned.spec == of_two[0].reference)
    fixed = 1.1
    longer = pytest.approx(fixed + SLOWDOWN * (plain.estimate_s - fixed))
    assert samples[0].estimate_s == longer


def test_resume_plans_what_is_left_and_keeps_reasons() -> None:
    """Finished runs are not planned; repeats that are left come first; nobody is skipped anew."""
    large, small = case("a", 8), case("b", 2)
    again = run(2, replica=-1)
    plan = make_plan(
        [large, small], slots=4, finished=lambda key: key == small.reference.key,
        repeats={"b": [again]}, expected=Estimates(lambda spec: 1.0, 3.0),
    )  # fmt: skip
    assert [c.skip_reason for c in plan.cases] == ["", ""]
    assert (plan.runs[0].key, plan.runs[0].serves) == (again.key, ("b",))
    assert small.reference.key not in {planned.key for planned in plan.runs}
    assert (len(plan.runs), plan.start_s) == (6, 3.0)
    done = make_plan([small], slots=4, finished=lambda key: True)
    assert (done.runs, done.estimate_s) == ((), 0.0)


TEXT = TINY | {"data": {"kind": "text", "path": "/nowhere/at/all"}}
ILLEGAL = PlantSpec(fault="illegal_access", step=1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"world_size": 8, "device": "cuda"},
         "needs GPUs for 8 ranks, this machine has them for 4"),
        ({"world_size": 8}, "needs 8 rank slots, 4 are stated (--slots)"),
        ({"plant": ILLEGAL}, "the fault illegal_access needs cuda, this run is on cpu"),
        ({"config": TINY | {"stress": ["poison", "races"]}, "device": "cuda"},
         "the stressor races needs cpu, this run is on cuda"),
        ({"config": TINY | {"stress": ["poison", "races"]}}, ""),
        ({"config": TINY | {"backend": "te"}}, "backend te needs a GPU, this run is on cpu"),
        ({"config": TINY | {"backend": "te"}, "device": "cuda"},
         "backend te needs transformer-engine, which is not installed"),
        ({"config": TINY | {"engine": "megatron_fsdp"}, "device": "cuda"}, ""),
        ({"config": TINY | {"engine": "megatron_fsdp"}},
         "engine megatron_fsdp needs a GPU, this run is on cpu"),
        ({"config": TEXT}, "data.path /nowhere/at/all is not on this machine"),
        ({"config": TINY | {"compile": ["attn"], "compile_backend": "inductor"}},
         "compile_backend inductor needs a C++ compiler, none is found (aot_eager needs none)"),
        ({"config": TINY | {"compile": ["attn"], "compile_backend": "aot_eager"}}, ""),
        ({"config": changed("model", hidden=10**9)}, "one copy of the weights needs "),
        ({"config": changed("model", layers=10**9)}, "one copy of the weights needs "),
        ({"config": changed("model", seq=10**9)}, "a microbatch between two layers needs "),
        ({"config": changed("", micro_batch_size=10**9)}, "a microbatch between two layers "),
    ],
)  # fmt: skip
def test_a_case_that_cannot_run_here_is_skipped_with_the_reason(
    fields: dict[str, Any], reason: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Before anything starts, and none of its runs is planned; other cases are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(
        planning, "package_version", lambda name: "1" if name == "megatron-fsdp" else ""
    )
    cases = [case("a", **({"world_size": 1} | fields)), case("b", 4)]
    plan = make_plan(cases, slots=4, memory_bytes=64 << 30)
    found = plan.cases[0].skip_reason
    assert found.startswith(reason) if reason else found == ""
    assert {id for planned in plan.runs for id in planned.serves} == {"b", *("" if reason else "a")}
    assert [c.id for c in plan.skipped] == (["a"] if reason else [])
    weights = 2 * num_parameters(TINY["model"])  # exact: two bytes a weight fit, a byte less not
    for memory, fits in ((weights, True), (weights - 1, False)):
        assert bool(make_plan([case("a", 1)], slots=4, memory_bytes=memory).runs) == fits


def test_wide_and_long_runs_go_first_and_groups_stay_together() -> None:
    """A reference, its control and its candidates are neighbours; what is finished is left out."""
    cases = [named("a", 2), named("b", 4), named("c", 4), named("a2", 2, "a-ref")]
    order = arrange(
        cases, lambda s: 9.0 if s.config["name"] == "c" else 1.0,
        left=lambda key: key != cases[1].control.key,
    )  # fmt: skip
    assert names(order) == [
        "c-ref", "c-ref*", "c", "b-ref", "b", "a-ref", "a-ref*", "a", "a2",
    ]  # fmt: skip


def jobs(*given: tuple[str, int, float]) -> list[Job]:
    return [Job(run(width, config={"name": name}), seconds) for name, width, seconds in given]


def test_the_first_run_that_fits_starts() -> None:
    """One that does not fit yet is overtaken; one that is made again goes before all that wait."""
    order = jobs(("a", 3, 2.0), ("b", 3, 2.0), ("c", 1, 1.0), ("d", 1, 9.0))
    queue = Queue(order)

    def next_of(free: int) -> str:
        spec = queue.next(lambda spec: spec.world_size <= free)
        return "" if spec is None else str(spec.config["name"])

    assert [next_of(free) for free in (4, 1, 0, 1)] == ["a", "c", "", "d"]
    queue.push(order[0].spec)
    assert [next_of(free) for free in (2, 3, 3, 3)] == ["", "a", "b", ""]


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 13])
def test_what_a_plan_takes_is_bounded(slots: int) -> None:
    """At most twice what busy slots would take, and the longest run."""
    for seed in range(20):
        draw = random.Random(1000 * slots + seed)
        widths = [draw.randint(1, slots) if draw.random() < 0.5 else 1 for _ in range(40)]
        took = {f"r{n}": draw.lognormvariate(1.0, 1.2) for n in range(40)}
        cases = [named(name, width, name) for name, width in zip(took, widths, strict=True)]
        order = arrange(cases, lambda s, took=took: took[s.config["name"]])  # type: ignore[misc]
        assert len({job.spec.key for job in order}) == len(order) == 2 * 40
        busy_s = sum(job.spec.world_size * job.seconds for job in order)
        found_s = makespan_s(order, slots=slots)
        assert max(busy_s / slots, max(took.values())) <= found_s * (1 + 1e-9)
        assert found_s <= 2 * busy_s / slots + max(took.values())


def test_the_time_of_a_schedule() -> None:
    """Jobs limit it; what is under way holds its slots until it ends."""
    order = jobs(("a", 1, 1.0), ("b", 1, 2.0), ("c", 1, 3.0))
    assert makespan_s(order, slots=8, jobs=1) == 6.0
    assert makespan_s(order, slots=8) == 3.0
    # A plan's time is that of its schedule, after the start-up.
    given = Estimates(lambda spec: 2.0, start_s=5.0)
    for slots, at_once, seconds in ((12, None, 7.0), (4, None, 11.0), (12, 1, 11.0)):
        plan = make_plan([case("a", 4)], slots=slots, jobs=at_once, expected=given)
        assert (plan.estimate_s, plan.start_s) == (seconds, 5.0)


def drawn(seed: int, num_groups: int) -> tuple[list[CaseSpec], dict[str, float]]:
    draw = random.Random(seed)
    cases = [
        named(f"c{group}.{n}", width, f"r{group}")
        for group in range(num_groups)
        for width in [draw.choice([1, 2, 4, 8])]
        for n in range(draw.randint(1, 6))
    ]
    draw.shuffle(cases)
    return cases, {s.config["name"]: draw.lognormvariate(1, 1) for c in cases for s in runs_of(c)}


@pytest.mark.parametrize("number", [1, 2, 3, 7, 40])
def test_all_shards_together_are_all_cases_once(number: int) -> None:
    """None is lost or twice, order is kept, no two make the same run, none is far the longest."""
    cases, takes = drawn(number, 25)
    shards = cut(cases, number, lambda s: takes[s.config["name"]])
    assert sorted(c.id for held in shards for c in held) == sorted(c.id for c in cases)
    for held in shards:
        assert [c.id for c in held] == [c.id for c in cases if c in held]
    made = [{s.key: s for c in held for s in runs_of(c)} for held in shards]
    assert sum(map(len, made)) == len(set().union(*made))
    assert [bool(held) for held in shards].count(True) == min(number, 25)

    def slot_s(held: Iterable[RunSpec]) -> float:
        return sum(takes[s.config["name"]] * s.world_size for s in held)

    by_reference: dict[str, dict[str, RunSpec]] = {}
    for c in cases:
        by_reference.setdefault(c.reference.key, {}).update({s.key: s for s in runs_of(c)})
    costs = [slot_s(held.values()) for held in made]
    largest = max(slot_s(held.values()) for held in by_reference.values())
    assert max(costs) <= max(4 / 3 * sum(costs) / number, largest)


def test_cases_that_share_any_run_stay_together_and_free_ones_are_spread() -> None:
    """A candidate that is another case's reference, too."""
    cases = [named("b", 1, "a"), named("x", 1, "y"), named("c", 1, "b")]
    shards = cut(cases, 3, lambda s: 1.0)
    assert [[c.id for c in held] for held in shards] == [["b", "c"], ["x"], []]
    free = [named(f"c{n}") for n in range(12)]
    assert [len(held) for held in cut(free, 4, lambda s: 0.0)] == [3, 3, 3, 3]


def test_every_machine_cuts_alike(monkeypatch: Patch) -> None:
    """Cores and GPUs of the machine at hand are not asked; another cut has another name."""
    model = model_from_preset("dense_small", {"seq": 4096})
    heavy = [TrainConfig(model=model, steps=20 + n).to_dict() for n in range(4)]
    cases = [case(f"wide{n}", 8) for n in range(8)]  # host time, which many cores share
    cases += [case(f"heavy{n}", 1, config=config) for n, config in enumerate(heavy)]
    orders = []
    for cores in (1, 64):  # else the cuts would be equal in any case
        seconds = planning.by_size(cores)
        orders.append(cut(cases, 3, seconds))
    assert orders[0] != orders[1]
    cuts = []
    for cores in (1, 64):
        monkeypatch.setattr(planning, "num_cores", lambda cores=cores: cores)
        cuts.append(take_shard(cases, "1/3")[1])
    assert cuts[0] == cuts[1]
    assert cuts[0].cut != take_shard(cases, "1/4")[1].cut
    assert [part["shard"] for part in parts(cases, 3)] == ["1/3", "2/3", "3/3"]


def test_a_shard_is_written_i_of_n() -> None:
    """What is not a shard is refused with what was expected; an empty one selects nothing."""
    assert parse_shard("2/4") == Shard(index=2, number=4)
    for text in ("0/0", "5/4", "0/4", "1/0", "1", "a/b", "-1/2", "1/2/3", " 1/2", "1/1001", ""):
        with pytest.raises(UsageError, match="--shard"):
            parse_shard(text)
    with pytest.raises(NothingSelected, match="fill 1 of 2 shards"):
        take_shard([case("a", 1)], "2/2")


def test_more_work_is_estimated_longer() -> None:
    """Steps, ranks and parameters add to it; ranks of one replica share their tokens."""
    base = estimate_s(run(2), 2)
    more = [run(2, config=TINY | {"steps": 400}), run(16), run(2, config=changed("model",
            layers=200))]  # fmt: skip
    assert all(estimate_s(other, 2) > base for other in more)
    big = model_from_preset("dense_small", {"seq": 4096})
    fixed = estimate_s(run(8, config=TINY | {"steps": 1}), 8)
    alone, shared = (
        estimate_s(run(8, config=TrainConfig(model=big, parallel=p, steps=1).to_dict()), 8) - fixed
        for p in (ParallelConfig(dp=8), ParallelConfig(pp=2, cp=2, tp=2))
    )
    assert alone / shared == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "norms_and_biases", "published"),
    [
        ("llama3_8b", 65 * 4096, 8_030_261_248),
        ("qwen3_8b", 73 * 4096 + 36 * 2 * 128, 8_190_735_360),
        ("qwen3_30b_a3b", 97 * 2048 + 48 * 2 * 128, 30_532_122_624),
    ],
)
def test_presets_have_the_published_number_of_parameters(
    preset: str, norms_and_biases: int, published: int
) -> None:
    """The shapes of a public model give exactly the parameters that its checkpoint has."""
    assert num_parameters(to_plain(model_from_preset(preset))) + norms_and_biases == published


ESTIMATE = -7.0


@pytest.fixture
def known(tmp_path: Path, monkeypatch: Patch) -> History:
    """A new history; what it does not know is -7 s."""
    monkeypatch.setattr(planning, "estimate_s", lambda spec, cores, device=None: ESTIMATE)
    return History.open(tmp_path / "h", create=True)


def of_preset(seed: int = 0, preset: str = "dense_tiny", **fields: Any) -> RunSpec:
    config = {"model": {"preset": preset}, "steps": 20, "seed": seed, "graph": []}
    return run(2, **({"config": config, "device": "cuda"} | fields))


def took(history: History, number: int, wall_s: float, **changes: Any) -> planning.Seconds:
    """Record that the work of `of_preset()` took so long; what is expected now."""
    own = {"work": work_of(of_preset()), "wall_s": wall_s, **changes}
    history.record(night(number, values=lambda run, leg: own if leg == "reference" else {}))
    return expected(history, MACHINE, 1).seconds


def test_equal_work_takes_the_median_of_its_newest_times(known: History) -> None:
    """One slow run does not move it; replica and limit do not matter, the machine does."""
    for number, wall_s in enumerate((900.0, 4.0, 90.0, 5.0)):
        took(known, number, wall_s)
    seconds = took(known, 4, 6.0)
    assert seconds(of_preset()) == seconds(of_preset(replica=1, timeout_s=7.0)) == 6.0
    assert took(known, 5, 5.0)(of_preset()) == 5.0  # 900 is no longer among the newest
    assert expected(known, "another machine", 1).seconds(of_preset()) == ESTIMATE


def test_similar_runs_stand_in_for_unknown_ones(known: History) -> None:
    """Same preset, ranks and device: start-up and step time separately, for the run's own steps."""
    known.record(night(values=lambda run, leg: {"wall_s": 4.0, "step_s": 0.1, "steps": 20}))
    seconds = expected(known, MACHINE, 1).seconds
    fresh = of_preset(seed=7)
    assert seconds(fresh) == pytest.approx(2.0 + 20 * 0.1)
    assert seconds(of_preset(config=fresh.config | {"steps": 100})) == pytest.approx(2.0 + 10.0)
    others = (run(4, config=fresh.config, device="cuda"), of_preset(7, device="cpu"),
              of_preset(7, "moe_tiny"))  # fmt: skip
    assert {seconds(other) for other in others} == {ESTIMATE}
    assert seconds(of_preset(7, rounding=1)) == pytest.approx(2.0 + 20 * 0.1 * SLOWDOWN)


def test_runs_that_did_not_end_well_count_only_alone(known: History) -> None:
    """A hang says how long a run takes only if it always hangs; an interruption says nothing."""
    unknown = of_preset(preset="none")
    own = {"work": work_of(unknown)}
    assert took(known, 0, 1.0, what="interrupted", **own)(unknown) == ESTIMATE
    assert took(known, 1, 60.0, what="hang", **own)(unknown) == 60.0
    assert took(known, 2, 3.0, **own)(unknown) == 3.0


def test_the_start_up_is_that_of_earlier_folders(known: History) -> None:
    """From the making of a folder to its first run; a damaged history says nothing."""
    begun = night(0)
    created = "2031-02-03T04:05:06+00:00"
    first_s = 1927857906.0 + 7.5
    runs = tuple(dataclasses.replace(r, started_unix_s=first_s + n)
                 for n, r in enumerate(begun.runs))  # fmt: skip
    known.record(dataclasses.replace(begun, created=created, runs=runs))
    assert expected(known, MACHINE, 1).start_s == 7.5
    here = Machine(cores=2, memory_bytes=1, system="s", python="3.12", gpus=(), gpu_driver="",
                   gpu_note="", versions={})  # fmt: skip
    for text in (b"", b"no history"):
        known.path.with_name("bad").write_bytes(text)
        assert expected_here(known.path.with_name("bad"), here).seconds(run(2)) == ESTIMATE
    assert expected_here(None, here).start_s > 0


def made(
    *times_s: tuple[float, ...], peaks: tuple[int, ...] = (), begun: float = 0.0,
    wall_s: float = 1.0, what: Any = "", **variables: str,
) -> RunResult:  # fmt: skip
    """A run with the given step times of each rank."""
    spec = run_spec(len(times_s), config={"begun": begun, "times": times_s})
    environment = {"fingerprint": {"environment": variables}}
    ranks = tuple(
        rank_records(
            rank, start=start(rank, environment=environment), end=end(rank, peak_bytes=peak),
            steps=tuple(
                step(number, rank, step_s=step_s, peak_bytes=peak)
                for number, step_s in enumerate(own)
            ),
        )
        for rank, (own, peak) in enumerate(zip(times_s, peaks or (1,) * len(times_s), strict=True))
    )  # fmt: skip
    ended = outcome(spec.key, what=what, started_unix_s=begun, wall_s=wall_s)
    return RunResult(spec=spec, outcome=ended, ranks=ranks)


def cost_of(**runs: RunResult) -> Cost:
    """What `cost` says of these runs, which are all runs of the folder."""
    return cost(runs, Timeline(runs.values()))


def test_memory_is_of_the_worst_rank_and_a_step_takes_what_its_slowest_rank_takes() -> None:
    """The earlier half of the steps, in which graphs are captured, is left out."""
    first = (9.0, 9.0, 9.0)
    found = cost_of(
        reference=made((*first, 4.0, 4.0, 4.0), (*first, 1.0, 6.0, 1.0), peaks=(100, 40)),
        control=made((*first, 5.0, 5.0, 5.0), (*first, 1.0, 1.0, 1.0), begun=1.0),
        candidate=made(
            (*first, 2.0, 2.0, 2.0), (*first, 1.0, 1.0, 1.0), peaks=(10, 150), begun=2.0
        ),
    )
    assert (found.peak_bytes["reference"], found.peak_bytes["candidate"]) == (100, 150)
    assert found.step_s == {"reference": 4.0, "control": 5.0, "candidate": 2.0}
    assert (found.memory, found.speed, found.control_speed, found.caution) == (1.5, 2.0, 0.8, "")
    assert "a step takes 2000 ms, the reference's 4000, the control's 5000" in found.words


def test_times_of_runs_that_were_not_alone() -> None:
    """A run that begins as another ends did not overlap it; shared GPUs are said first."""
    runs = [made((1.0,), begun=begun, wall_s=2.0) for begun in (0.0, 2.0, 3.0)]
    timeline = Timeline(runs)
    assert [timeline.concurrent(each) for each in runs] == [0, 1, 1]
    found = cost({"reference": runs[0], "candidate": runs[1]}, timeline)
    assert found.caution == "other runs under way meanwhile: 1"
    shared = made((1.0,) * 8, NCCL_HOSTID="shared-gpus-3")
    found = cost_of(reference=made((1.0,) * 8), candidate=shared)
    assert found.caution == "ranks shared GPUs, so times mean nothing"
    assert found.caution in found.words

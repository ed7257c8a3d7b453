"""Contracts of harness.runner.plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.config import (
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    built,
    model_from_preset,
    to_plain,
)
from fsdp_core.config.rule import Rule
from harness.errors import UsageError
from harness.machine import num_cores
from harness.records import CaseSpec, PlantSpec, RunSpec
from harness.repeats import NUM_SAMPLES, SLOWDOWN
from harness.runner import plan as planning
from harness.runner.plan import estimate_s, make_plan, num_parameters, resume_plan


def run(
    world_size: int, *, graph: tuple[str, ...] = (), replica: int = 0, **fields: Any
) -> RunSpec:
    """A run of so many ranks."""
    given: dict[str, Any] = {"device": "cpu", "timeout_s": 60.0} | fields
    config = given.pop("config", TrainConfig(graph=graph, steps=4).to_dict())
    return RunSpec(config=config, world_size=world_size, replica=replica, **given)


def case(name: str, world_size: int, *, graph: str = "attn", **fields: Any) -> CaseSpec:
    """A case whose runs have so many ranks."""
    return CaseSpec(
        id=name,
        scenario="s",
        labels={},
        reference=run(world_size, **fields),
        control=run(world_size, replica=1, **fields),
        candidate=run(world_size, graph=(graph,), **fields),
        expect="bitwise",
        checks={"loss": {}},
    )


def test_shared_runs_are_made_once() -> None:
    """One reference and one control serve all their candidates, and the plan says whom."""
    plan = make_plan([case("a", 2), case("b", 2, graph="full_iteration")], slots=8)
    assert len(plan.runs) == 4
    assert [planned.serves for planned in plan.runs] == [("a", "b"), ("a", "b"), ("a",), ("b",)]
    assert [planned.key for planned in plan.runs] == [planned.spec.key for planned in plan.runs]


def test_samples_of_rounding_are_shared_and_cost_more() -> None:
    """Cases of one reference share six runs that round at random, each several times as long."""
    of_two = [case("a", 2), case("b", 2, graph="full_iteration")]
    plan = make_plan([replace(each, expect="rounding") for each in of_two], slots=8)
    samples = [planned for planned in plan.runs if planned.spec.rounding]
    assert len(plan.runs) == 4 + NUM_SAMPLES
    assert [planned.serves for planned in samples] == [("a", "b")] * NUM_SAMPLES
    plain = next(planned for planned in plan.runs if planned.spec == of_two[0].reference)
    fixed, step = 1.1, plain.estimate_s - 1.1
    assert samples[0].estimate_s == pytest.approx(fixed + SLOWDOWN * step)
    resumed = resume_plan(
        plan.cases, slots=8, finished={planned.key for planned in samples[1:]}.__contains__
    )
    assert len(resumed.runs) == 5


def test_large_worlds_go_first_and_cases_stay_together() -> None:
    """Runs are ordered by size, those of a case next to each other."""
    plan = make_plan([case("a", 2), case("b", 8), case("c", 4)], slots=8)
    assert [planned.spec.world_size for planned in plan.runs] == [8, 8, 8, 4, 4, 4, 2, 2, 2]
    assert [planned.serves[0] for planned in plan.runs[:3]] == ["b"] * 3
    assert [c.id for c in plan.cases] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda", "needs GPUs for 8 ranks, this machine has them for 4"),
        ("cpu", "needs 8 rank slots, 4 are stated (--slots)"),
    ],
)
def test_a_world_too_large_is_skipped_with_the_reason(device: str, reason: str) -> None:
    """A case that cannot run here says why, and none of its runs is planned."""
    plan = make_plan([case("a", 8, device=device), case("b", 4, device=device)], slots=4)
    assert [c.skip_reason for c in plan.cases] == [reason, ""]
    assert {planned.spec.world_size for planned in plan.runs} == {4}
    assert [c.id for c in plan.skipped] == ["a"]


@pytest.mark.parametrize(
    ("part", "size", "what"),
    [
        ("model", {"hidden": 10**9}, "one copy of the weights"),
        ("model", {"layers": 10**9}, "one copy of the weights"),
        ("model", {"seq": 10**9}, "a microbatch between two layers"),
        ("", {"micro_batch_size": 10**9}, "a microbatch between two layers"),
    ],
)
def test_a_model_beyond_all_memory_is_skipped_before_anything_starts(
    part: str, size: dict[str, int], what: str
) -> None:
    """What not even two bytes an element of the least that a run keeps would fit into."""
    config = TrainConfig(steps=4).to_dict()
    config |= {part: config[part] | size} if part else size
    plan = make_plan([case("a", 1, config=config)], slots=4, memory_bytes=64 << 30)
    assert plan.runs == ()
    assert plan.cases[0].skip_reason.startswith(f"{what} needs ")
    assert plan.cases[0].skip_reason.endswith(" GiB of memory, this machine has 64 GiB")
    weights = 2 * num_parameters(TrainConfig().to_dict()["model"])
    assert make_plan([case("a", 1)], slots=4, memory_bytes=weights).runs
    assert not make_plan([case("a", 1)], slots=4, memory_bytes=weights - 1).runs


def test_a_fault_that_needs_a_gpu_is_skipped_on_the_cpu() -> None:
    """An illegal access cannot be planted without a device."""
    plant = PlantSpec(fault="illegal_access", step=1)
    plan = make_plan([case("a", 2, plant=plant)], slots=8)
    assert plan.cases[0].skip_reason == "the fault illegal_access needs cuda, this run is on cpu"
    assert plan.runs == ()


def test_inductor_is_skipped_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What cannot be compiled here is skipped, with what can; nothing else is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    configs = {
        backend: TrainConfig(compile=("attn",), compile_backend=backend).to_dict()
        for backend in ("inductor", "aot_eager")
    } | {"plain": TrainConfig().to_dict()}
    cases = [case(name, 1, config=config) for name, config in configs.items()]
    inductor, *others = (c.skip_reason for c in make_plan(cases, slots=4).cases)
    assert "needs a C++ compiler" in inductor
    assert "aot_eager needs none" in inductor
    assert others == ["", ""]


def test_races_are_skipped_on_gpus() -> None:
    """Streams of a GPU cannot be watched, and a run that watches nothing must not pass."""
    config = TrainConfig(stress=("poison", "races")).to_dict()
    cases = [case(device, 1, device=device, config=config) for device in ("cpu", "cuda")]
    plan = make_plan(cases, slots=4)
    reason = "the stressor races needs cpu, this run is on cuda"
    assert [c.skip_reason for c in plan.cases] == ["", reason]


@pytest.mark.parametrize(
    ("device", "version", "reason"),
    [
        ("cpu", "2.9", "backend te needs a GPU, this run is on cpu"),
        ("cuda", "", "backend te needs transformer-engine, which is not installed"),
        ("cuda", "2.9", ""),
    ],
)
def test_transformer_engine_is_needed_where_it_is_asked_for(
    device: str, version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`backend: te` is skipped, never silently replaced."""
    monkeypatch.setattr(planning, "package_version", lambda name: version)
    config = TrainConfig(backend="te").to_dict()
    one = make_plan([case("a", 1, device=device, config=config)], slots=4).cases[0]
    assert one.skip_reason == reason


def test_a_corpus_that_is_not_here_is_said_before_the_run() -> None:
    """A missing text corpus costs no process."""
    config = TrainConfig().to_dict()
    config["data"] = {"kind": "text", "path": "/nowhere/at/all"}
    plan = make_plan([case("a", 1, config=config)], slots=4)
    assert plan.cases[0].skip_reason == "data.path /nowhere/at/all is not on this machine"


@pytest.mark.parametrize(("slots", "jobs"), [(0, None), (-1, None), (4, 0)])
def test_counts_below_one_are_refused(slots: int, jobs: int | None) -> None:
    """Nothing can run on no slot: that is a mistake, not an empty plan."""
    with pytest.raises(UsageError, match="expected an integer >= 1"):
        make_plan([case("a", 1)], slots=slots, jobs=jobs)


def test_the_estimate_follows_the_packing() -> None:
    """Two runs side by side take as long as one; after each other, twice as long."""
    pair = [case("a", 4)]
    each = estimate_s(pair[0].reference, num_cores())
    assert make_plan(pair, slots=12).estimate_s == pytest.approx(each)
    assert make_plan(pair, slots=4).estimate_s == pytest.approx(3 * each)
    assert make_plan(pair, slots=12, jobs=1).estimate_s == pytest.approx(3 * each)


def test_more_work_is_estimated_longer() -> None:
    """Steps, ranks and parameters each add to the estimate."""
    small = run(2)
    longer = run(2, config=TrainConfig(steps=400).to_dict())
    wider = run(16)
    deeper = run(2, config=TrainConfig(model=ModelConfig(layers=200), steps=4).to_dict())
    base = estimate_s(small, 2)
    assert all(estimate_s(other, 2) > base for other in (longer, wider, deeper))


def test_parameters_are_counted_by_the_shapes() -> None:
    """Attention, feed-forward, embedding and head of the default decoder, added by hand."""
    model = TrainConfig().to_dict()["model"]
    attention = 64 * 64 + 2 * (64 * 32) + 64 * 64
    assert num_parameters(model) == 2 * (attention + 3 * 64 * 160) + 2 * 256 * 64


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
    model = to_plain(model_from_preset(preset))
    assert num_parameters(model) + norms_and_biases == published


def test_active_parameters_are_those_that_a_token_meets() -> None:
    """Moonlight has 15.29B parameters beside its embeddings, of which a token meets 2.24B."""
    model = to_plain(model_from_preset("moonlight_16b_a3b"))
    embeddings = 2 * model["vocab_size"] * model["hidden"]
    counts = [num_parameters(model, active=active) - embeddings for active in (False, True)]
    assert [round(count / 1e7) for count in counts] == [1529, 224]


def test_a_latent_of_queries_counts() -> None:
    """With q_lora_rank queries are two small matrices in place of a large one."""
    model = to_plain(model_from_preset("mla_moe_tiny"))
    direct = num_parameters(model | {"q_lora_rank": None})
    assert direct - num_parameters(model) == 2 * (64 * 4 * 24 - 24 * (64 + 4 * 24))


def test_ranks_of_one_replica_share_their_tokens() -> None:
    """Eight ranks that share one batch have an eighth of the arithmetic of eight with their own."""
    alone = ParallelConfig(dp=8), ParallelConfig(pp=2, cp=2, tp=2)
    big = model_from_preset("dense_small", {"seq": 4096})
    each = [
        estimate_s(run(8, config=TrainConfig(model=big, parallel=p, steps=1).to_dict()), 8)
        for p in alone
    ]
    fixed = estimate_s(run(8, config=TrainConfig(steps=1).to_dict()), 8)
    assert (each[0] - fixed) / (each[1] - fixed) == pytest.approx(8, rel=0.01)


def test_what_is_not_built_is_skipped_with_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A legal run that the trainer cannot make yet is planned as skipped, with the reason."""

    def odd(run: TrainConfig) -> ConfigError | None:
        expected = "an even seed (others are not built so far)"
        return ConfigError("seed", expected=expected, got=run.seed) if run.seed % 2 else None

    rule = Rule("odd_seeds_are_not_built", "Odd seeds are not built so far.", odd)
    monkeypatch.setattr(built, "NOT_BUILT", (rule,))
    config = TrainConfig(seed=7).to_dict()
    even = TrainConfig(seed=8).to_dict()
    plan = make_plan([case("a", 2, config=config), case("b", 2, config=even)], slots=4)
    assert [c.id for c in plan.skipped] == ["a"]
    assert plan.skipped[0].skip_reason.startswith("seed: expected an even seed")
    assert plan.skipped[0].skip_reason.endswith("rule: odd_seeds_are_not_built")


def test_resume_plans_what_is_left_and_keeps_reasons() -> None:
    """Finished runs are not planned; a case planned on a larger machine is not skipped."""
    large, small = case("a", 8), case("b", 2)
    plan = resume_plan([large, small], slots=4, finished=lambda key: key == small.reference.key)
    assert [c.skip_reason for c in plan.cases] == ["", ""]
    assert small.reference.key not in {planned.key for planned in plan.runs}
    assert len(plan.runs) == 5
    assert plan.estimate_s > 0


def test_a_plan_survives_json() -> None:
    """`--dry-run --json` loses nothing."""
    plan = make_plan([case("a", 2)], slots=8, jobs=2)
    assert planning.Plan.from_json(plan.to_json()) == plan

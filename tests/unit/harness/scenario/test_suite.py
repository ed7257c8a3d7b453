"""Contracts of what is run together: scenarios, tiers, `-k`, pairs of values, shards, merging."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cli import main
from harness.errors import UsageError
from harness.records import CaseSpec
from harness.scenario.suite import num_pairs, pairwise, select
from harness.store import RunFolder
from tests.support.fake_engine import SCENARIO, Cli, FakeEngine, Patch, unequal
from tests.support.records import case_spec, run_spec

WIDE = """\
name: wide
why: Three axes, so that pairs are fewer than cases.
tier: pr
select: pairwise
axes:
  seed: [1, 2]
  steps: [4, 5]
  graph_warmup_steps: [1, 2]
  graph: [eager, [attn], [full_iteration]]
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu}
"""
SMOKE = ("--tier", "smoke")
FREE = "scenarios/free.yaml"
SMALL = ["dp1-attn", "dp1-full_iteration", "dp2-attn", "dp2-full_iteration"]


@pytest.fixture
def folder(engine: FakeEngine, tmp_path: Path) -> Path:
    """scenarios/ with two of tier smoke, one of tier pr, one without."""
    place = tmp_path / "scenarios"
    place.mkdir()
    for name, text in {
        "one": SCENARIO + "tier: smoke\n", "wide": WIDE, "free": SCENARIO.replace("small", "free"),
        "two": SCENARIO.replace("small", "other") + "tier: smoke\n",
    }.items():  # fmt: skip
        (place / f"{name}.yaml").write_text(text)
    return place


def cases_of(path: str) -> list[str]:
    return [case.id for case in RunFolder.open(Path(path)).cases]


@pytest.mark.usefixtures("folder")
def test_a_tier_runs_in_one_folder_with_one_schedule(engine: FakeEngine, cli: Cli) -> None:
    """Scenarios of the tier and no others, each run made once though two scenarios need it."""
    assert cli.json("run", *SMOKE, "--out", "r")["num_cases"] == 8
    assert len(engine.made) == len(set(engine.made)) == 8  # not 16: the scenarios are alike
    assert cases_of("r")[0] == "small.dp1-attn"
    assert cases_of("r")[-1] == "other.dp2-full_iteration"
    manifest = RunFolder.open(Path("r")).manifest
    assert (manifest["tier"], manifest["scenario"]) == ("smoke", "smoke")
    assert [part["num_cases"] for part in manifest["selected"]] == [4, 4]
    cli("run", FREE, "--out", "s")
    assert cases_of("s")[0] == "dp1-attn"  # one file: ids as they are


def test_a_file_may_hold_several_scenarios(folder: Path, engine: FakeEngine, cli: Cli) -> None:
    """Each is listed and run by FILE::NAME as if it had a file; the file is all of them."""
    both = "# two\n---\n" + "---\n".join(
        (folder / f"{name}.yaml").read_text() for name in ("wide", "one")
    )
    Path("both.yaml").write_text(both)
    cli("run", "both.yaml::small", "--out", "r")
    assert (cases_of("r"), RunFolder.open(Path("r")).manifest["scenario"]) == (SMALL, "small")
    assert RunFolder.open(Path("r")).scenario_text == (folder / "one.yaml").read_text()
    cli("run", "both.yaml", "-k", "scenario=small", "--select", "all", "--out", "s")
    assert cases_of("s") == [f"small.{case}" for case in SMALL]
    assert RunFolder.open(Path("s")).manifest["scenario"] == "both"
    counts = cli.json("list", "--count", "both.yaml")
    assert counts == {"both.yaml::wide": 16, "both.yaml::small": 4}
    assert "legal values: wide, small" in cli.refused("run", "both.yaml::other")
    assert "expected one scenario, got both.yaml, which has" in cli.refused("bisect", "both.yaml")
    Path("both.yaml").write_text(both.replace("steps: 4", "stops: 4"))
    line = 1 + both.splitlines().index(next(x for x in both.splitlines() if "steps: 4" in x))
    cli("list", "--check", "both.yaml::wide")
    assert f"both.yaml:{line}: base.stops: " in cli("list", "--check", "both.yaml", code=4).err


def test_editors_write_files_of_several_their_own_way(folder: Path, cli: Cli) -> None:
    """A mark of the byte order at the start, comments beside `---`, line ends of Windows."""
    wide, one = ((folder / f"{name}.yaml").read_text() for name in ("wide", "one"))
    text = f"\ufeff{wide}--- # the small one\n{one}".replace("\n", "\r\n")
    Path("both.yaml").write_bytes(text.encode())
    counts = cli.json("list", "--count", "both.yaml")
    assert counts == {"both.yaml::wide": 16, "both.yaml::small": 4}


@pytest.mark.usefixtures("folder")
def test_selections_are_said_and_legs_stay(cli: Cli) -> None:
    """A pairwise choice covers all pairs, keeps every reference, and says what it left out."""
    said = cli("run", "scenarios/wide.yaml", "--out", "r").out
    chosen = RunFolder.open(Path("r"))
    note = f"wide: {len(chosen.cases)} of 16 cases cover all "
    assert len(chosen.cases) < 16
    assert note in said
    assert chosen.manifest["notes"][0].startswith(note)
    for case in chosen.cases:
        assert all(chosen.finished(getattr(case, leg).key) for leg in ("reference", "control"))
    wide = ("run", "scenarios/wide.yaml")
    assert cli.json(*wide, "--select", "all")["num_cases"] == 16
    assert cli.json(*wide, "-k", "seed2 and steps5 and steps2 and attn")["num_cases"] == 1


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--tier", "weekly"), 5, "no scenario in scenarios has this tier (tiers there: pr"),
        (("--tier", "smoke", "--tier", "nightly"), 5, "--tier nightly: no scenario"),
        (("scenarios", "--shard", "5/4"), 4, "1 <= I <= N <= 1000, as 2/4, got '5/4'"),
        (("scenarios", "--shard", "1/99999"), 4, "got '1/99999'"),
        ((FREE, "--shard", "4/4"), 5, "shard 4/4 holds no case"),
        ((FREE, "--shard", "1/2", "-k", "nothing"), 5, "selects none"),
        (("--select", "changed"), 4, "'--select': 'changed' is not one of 'all', 'pairwise'"),
        (("--resume", "r", "--shard", "1/2"), 4, "--resume: expected no --shard"),
        (("--resume", "r", "--tier", "pr"), 4, "--resume: expected no --tier"),
        ((FREE, FREE, "again.yaml"), 4, "the name of"),
    ],
)
def test_misuse_is_one_line(
    args: tuple[str, ...], code: int, said: str, folder: Path, engine: FakeEngine, cli: Cli
) -> None:
    """A shard, tier or file that cannot be is refused; nothing selected is 5, never 0."""
    Path("again.yaml").write_text((folder / "free.yaml").read_text())
    if args[0] == "--resume":
        cli("run", FREE, "-k", "dp1-attn", "--out", "r")
    made = len(engine.made)
    assert said in cli.refused("run", *args, code=code)
    assert len(engine.made) == made
    assert not list(Path().glob("out/*/manifest.json"))


@pytest.mark.usefixtures("folder")
def test_shards_are_all_cases_once_and_ci_can_ask(cli: Cli) -> None:
    """The job matrix names the shards that hold cases; together they run what one run would."""
    matrix = cli.json("list", "scenarios", "--shards", "4")["include"]
    assert [*matrix[0]] == ["shard", "cases", "runs", "expected_slot_s"]
    found: list[str] = []
    for part in matrix:
        (cases,) = cli.json("list", "scenarios", "--shard", part["shard"]).values()
        assert len(cases) == part["cases"]
        found += [case["id"] for case in cases]
    (every,) = cli.json("list", "scenarios", "--select", "all").values()
    assert (len(matrix), len(found)) == (4, len(set(found)))
    assert set(found) < {case["id"] for case in every}  # wide says pairwise
    few = cli.json("list", FREE, "--shards", "5")["include"]
    assert [part["shard"] for part in few] == ["1/5", "2/5"]  # two references
    told = cli("list", FREE, "--shards", "2", "--shard", "1/2", code=4).err
    assert "expected no --shard 1/2 with it" in told


@pytest.mark.usefixtures("folder")
def test_merged_shards_are_one_report(engine: FakeEngine, cli: Cli) -> None:
    """Merged: the cases of an unsharded run in its order, its verdicts, and every run once."""
    engine.spoil = unequal
    cli("run", *SMOKE, "--out", "whole", code=1)
    for index in (1, 2):
        cli("run", *SMOKE, "--shard", f"{index}/2", "--out", f"s{index}", code=1)
    cli("merge", "s2", "s1", "--out", "m", code=1)
    assert cases_of("m") == cases_of("whole")
    before, after = (RunFolder.open(Path(path)).verdicts() for path in ("whole", "m"))
    assert [(v.case_id, v.outcome) for v in before] == [(v.case_id, v.outcome) for v in after]
    names = [sorted(p.name for p in Path(path, "runs").iterdir()) for path in ("whole", "m")]
    assert names[0] == names[1]
    cli("show", cases_of("m")[0], "m")
    assert RunFolder.open(Path("m")).manifest["merged"][0]["shard"] == "2/2"
    cli("history", "--history", "history", "--add", "m")  # runs recorded themselves: whole, s1, s2
    answered = [{a["folder"] for a in trend["answers"]} for trend in
                cli.json("history", "--history", "history")]  # fmt: skip
    assert {len(folders) for folders in answered} == {2}


@pytest.mark.usefixtures("folder")
def test_what_a_killed_job_left_is_a_missing_shard(cli: Cli) -> None:
    """One folder that cannot be read costs its own cases; a mistyped name is refused."""
    for index in (1, 2, 3):
        assert main(["run", *SMOKE, "--shard", f"{index}/3", "--out", f"s{index}"]) in (0, 5)
    Path("s2/manifest.json").write_text("{")
    told = cli("merge", "s1", "s2", "typed-wrong", "--out", "m", code=4).err
    assert "typed-wrong is not a run folder" in told
    told = cli("merge", "s1", "s2", "--out", "m", code=6).out
    lost = [v for v in RunFolder.open(Path("m")).verdicts() if v.outcome == "error"]
    assert len(lost) == 8 - len(cases_of("s1"))
    for said in ("shard 2/3 is missing: ", "s2 is a damaged run folder"):
        assert said in told
    cli("run", "--resume", "m")  # what is missing is made
    cli("merge", "s2", "s2", "--out", "n", code=4)
    cli("run", FREE, "--out", "whole")
    cli("merge", "whole", "s2", "--out", "n", code=4)  # nothing would say what is missed
    assert not Path("n").exists()


@pytest.mark.usefixtures("folder")
def test_a_merged_folder_goes_on_with_its_own_code_alone(cli: Cli, monkeypatch: Patch) -> None:
    """What shards say alike of code, packages and machine still holds for what is made later."""
    for index in (1, 2):
        cli("run", *SMOKE, "--shard", f"{index}/2", "--out", f"s{index}")
    cli("merge", "s1", "s2", "--out", "m")
    said, merged = (RunFolder.open(Path(name)).manifest for name in ("s1", "m"))
    kept = ("code", "programs", "packages", "processor", "devices", "slurm")
    assert {key: merged[key] for key in kept} == {key: said[key] for key in kept}
    cli("merge", "s1", "--out", "half", code=6)
    monkeypatch.setattr("harness.provenance.code", lambda: "another")
    assert f"code {said['code']} became another" in cli("run", "--resume", "half", code=4).err
    cli("run", "--resume", "half", "--mixed")


@pytest.mark.usefixtures("folder")
def test_a_shard_of_another_commit_does_not_answer_for_this_one(
    cli: Cli, monkeypatch: Patch
) -> None:
    """What an earlier run left in the workspace is refused; an unknown commit is not another."""
    for name, shard, commit in (("s1", "1/2", "a" * 40), ("s2", "2/2", "b" * 40), ("s", "2/2", "")):
        monkeypatch.setattr("harness.provenance.describe", lambda root=None, commit=commit: commit)
        cli("run", *SMOKE, "--shard", shard, "--out", name)
    said = cli("merge", "s1", "s2", "--out", "m", code=4).err
    assert f"s2 was made by commit {'b' * 40}, " in said
    assert f"s1 by {'a' * 40}: expected shards of one commit" in said
    cli("merge", "s1", "s", "--out", "m")


@pytest.mark.usefixtures("folder")
def test_what_does_not_go_together_is_refused(cli: Cli) -> None:
    """Shards of different cuts, a shard twice, a shard and a whole, the same case twice."""
    for name, *args in (
        ("a", "--shard", "1/2"), ("b", "--shard", "2/3"), ("twice", "--shard", "1/2"),
        ("other", "--shard", "2/2", "-k", "not dp1-attn"), ("whole",), ("again",),
    ):  # fmt: skip
        cli("run", FREE, *args, "--out", name)
    for one, two, said in (
        ("a", "b", "of another cut"), ("a", "other", "of another cut"),
        ("a", "twice", "is shard 1/2, and so is"), ("a", "whole", "is no shard"),
        ("whole", "a", "is shard 1/2"), ("whole", "again", "holds the case dp1-attn, and so"),
    ):  # fmt: skip
        assert said in cli("merge", one, two, "--out", "m", code=4).err
        assert not Path("m").exists()
    shards = Path("a/shards.json")
    shards.write_text(shards.read_text().replace("dp1", "dp9", 1))
    assert "damaged" in cli("merge", "a", "--out", "m", code=4).err


def test_engines_must_agree(folder: Path, cli: Cli) -> None:
    """One run has one engine, --engine decides for all; what is for GPUs is skipped in company."""
    (folder / "one.yaml").write_text(SCENARIO.replace("device: cpu", "engine: slurm"))
    assert "launch.engine: expected that of" in cli("run", "scenarios", code=4).err
    cli("run", "scenarios", "--engine", "local")
    (folder / "one.yaml").write_text(SCENARIO.replace("device: cpu", "device: cuda"))
    (folder / "wide.yaml").unlink()
    verdicts = cli.json("run", "scenarios")["verdicts"]
    reasons = {v["message"] for v in verdicts if v["outcome"] == "skipped"}
    assert reasons == {"its scenario is for cuda, this run is on cpu"}


RUN = run_spec()


def _case(name: str, **labels: str) -> Any:
    return SimpleNamespace(id=name, labels=labels)


CASES = (
    _case("dp2-attn", parallel="dp2", graph="attn"),
    _case("dp4-attn", parallel="dp4", graph="attn"),
    _case("dp4-full_iteration", parallel="dp4", graph="full_iteration"),
)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (None, [0, 1, 2]),
        ("dp4", [1, 2]),
        ("DP4", [1, 2]),
        ("not dp4", [0]),
        ("dp4 and not attn", [2]),
        ("dp2 or full_iteration", [0, 2]),
        ("dp2 or dp4 and full_iteration", [0, 2]),
        ("(dp2 or dp4) and attn", [0, 1]),
        ("not not dp2", [0]),
        ("not (dp2 or attn)", [2]),
        ("graph=attn", [0, 1]),
        ("parallel=dp4 and graph=attn", [1]),
        ("nowhere", []),
    ],
)
def test_expressions_select_as_in_pytest(expression: str | None, expected: list[int]) -> None:
    """Words are parts of ids or axis=value labels; not binds before and, and before or."""
    assert list(select(CASES, expression)) == [CASES[i] for i in expected]


@pytest.mark.parametrize(
    "expression",
    ["", " ", "and", "a and", "a b", "not", "(a", "a)", "()", "or a", "a or or b",
     "a(b)", "lambda: a", "(" * 500 + "a", "not " * 50 + "a", "x" * 5000],
)  # fmt: skip
def test_a_bad_expression_is_one_usage_error(expression: str) -> None:
    """What cannot be read is refused, however deep or long, and selects nothing by accident."""
    with pytest.raises(UsageError, match=r"^-k .*: expected words with .*, got ") as caught:
        select(CASES, expression)
    assert len(str(caught.value)) < 300


def case(name: str, labels: dict[str, str]) -> CaseSpec:
    return case_spec(name, RUN, RUN, RUN, labels=labels)


def product(*lengths: int) -> list[CaseSpec]:
    rows = itertools.product(*map(range, lengths))
    return [
        case("-".join(map(str, row)), {f"a{n}": str(value) for n, value in enumerate(row)})
        for row in rows
    ]


def pairs_of(cases: Sequence[CaseSpec]) -> set[tuple[tuple[str, str], ...]]:
    """Written apart from the module: unordered pairs of (axis, value) that share a case."""
    return {pair for one in cases for pair in itertools.combinations(sorted(one.labels.items()), 2)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 2**16))
def test_every_pair_that_some_case_has_is_covered(lengths: list[int], seed: int) -> None:
    """Whatever was excluded, the chosen are of the cases, in their order, with all their pairs."""
    draw = random.Random(seed)
    held = [one for one in product(*lengths) if draw.random() < 0.7]
    keep = {one.id for one in held if draw.random() < 0.1}
    chosen = pairwise(held, keep=keep)
    assert pairs_of(chosen) == pairs_of(held)
    places = [held.index(one) for one in chosen]
    assert places == sorted(set(places))
    assert keep <= {one.id for one in chosen}
    assert pairwise(held, keep=keep) == chosen


def test_few_are_chosen() -> None:
    """Of 3^4 cases at most 12 are needed for greed to cover 54 pairs (9 is the least)."""
    assert 9 <= len(pairwise(product(3, 3, 3, 3))) <= 12
    assert num_pairs(product(3, 3, 3, 3)) == 6 * 9
    assert len(pairwise(product(5))) == 5  # without pairs, every value
    assert pairwise([]) == ()


def test_values_that_read_alike_are_all_kept() -> None:
    """Two values with one label must not stand for each other."""
    alike = [case("x1", {"a": "v", "b": "w"}), case("x2", {"a": "v", "b": "w"})]
    assert pairwise([*product(2, 2), *alike])[-2:] == tuple(alike)

"""Contracts of the scenario decoder: values and their places, sections, programs, options."""

import json
import os
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.cli import main
from harness.engine.slurm import SlurmOptions, device_on_slurm, stored_options
from harness.errors import ScenarioError, UsageError
from harness.program.spec import ProgramSpec, command_line, program_of
from harness.records import CaseSpec, PlantSpec, RunSpec
from harness.runner.launch import Request, prepare
from harness.scenario import settings
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, Scenario, load_scenario
from harness.scenario.yaml_source import Origin, parse_bytes, parse_text
from harness.values import SoakSpec, turn_of
from tests.support.fake_engine import Capsys
from tests.unit.harness.scenario.small_scenario import cases

LINES = {
    "name": "name: case",
    "why": "why: A sentence.",
    "base": "base: {steps: 4}",
    "axes": "axes: {parallel: [{dp: 2}, {dp: 4}], graph: [eager, [attn]]}",
    "compare": "compare: {axis: graph, reference: eager, expect: bitwise}",
    "checks": "checks: {loss: {}}",
}


def write(folder: Path, **lines: str) -> Path:
    """A scenario file that is right but for the lines given."""
    path = folder / "case.yaml"
    path.write_text("\n".join((LINES | lines).values()) + "\n")
    return path


def load(folder: Path, options: Overrides | None = None, **lines: str) -> Scenario:
    """The scenario of `write`, with options over it."""
    return load_scenario(write(folder, **lines), overrides=options or Overrides())


def value_of(scenario: Scenario, leaf: str) -> Any:
    """The last value that `base` gives a leaf."""
    return [s.value for s in scenario.base if s.leaf == leaf][-1]


@pytest.mark.parametrize("leaf", sorted(settings.leaf_types()))
def test_every_leaf_has_a_decoder_that_refuses_a_list_of_lists(leaf: str, tmp_path: Path) -> None:
    """No leaf takes whatever it is given, and each refusal names the leaf."""
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, base="base: {" + leaf + ": [[1]]}")
    assert (caught.value.line, caught.value.key) == (3, f"base.{leaf}")


@pytest.mark.parametrize(
    ("text", "leaf", "value"),
    [
        ("{optim: {lr: 1}}", "optim.lr", 1.0),
        ("{optim: {lr: 1e-3}}", "optim.lr", 1e-3),
        ("{optim.lr: 2.5e-4}", "optim.lr", 2.5e-4),
        ("{seed: 1_000}", "seed", 1000),
        ("{model: dense_small}", "model.preset", "dense_small"),
        ("{model: {preset: dense_tiny, layers: 3}}", "model.layers", 3),
        ("{data: {kind: text, path: /a}}", "data.path", "/a"),
        ("{data.path: null}", "data.path", None),
        ("{fsdp: {reshard_after_forward: no}}", "fsdp.reshard_after_forward", False),
        ("{parallel: {dp: 4, dynamic_cp: [1, 2]}}", "parallel.dynamic_cp", (1, 2)),
        ("{model.q_lora_rank: 8}", "model.q_lora_rank", 8),
        ("{model.q_lora_rank: null}", "model.q_lora_rank", None),
        ("{model.capacity_factor: 1}", "model.capacity_factor", 1.0),
        ("{graph: eager}", "graph", ()),
        ("{stress: none}", "stress", ()),
        ("{compile: none}", "compile", ()),
        ("{compile: [mlp, attn]}", "compile", ("attn", "mlp")),
        ("{stress: [poison, jitter]}", "stress", ("jitter", "poison")),
        ("{plant: none}", "plant", None),
        ("{plant: ~}", "plant", None),
        ("{plant: {fault: ulp, step: 1, rank: last}}", "plant",
         PlantSpec(fault="ulp", step=1, rank=-1)),
        ("{plant: {fault: ulp, step: 1, rank: -1, tensor: a.b, legs: [reference]}}", "plant",
         PlantSpec(fault="ulp", step=1, rank=-1, tensor="a.b", legs=("reference",))),
        ("{plant: [{fault: ulp, step: 1}]}", "plant", PlantSpec(fault="ulp", step=1)),
        ("{plant: [{fault: ulp, step: 1}, {fault: hang, step: 2, chance: 0.3}]}", "plant",
         PlantSpec(fault="ulp", step=1, beside=(PlantSpec(fault="hang", step=2, chance=0.3),))),
    ],
)  # fmt: skip
def test_legal_values_decode(text: str, leaf: str, value: Any, tmp_path: Path) -> None:
    """Each legal way to write a value gives exactly that value, with its type."""
    decoded = value_of(load(tmp_path, base=f"base: {text}"), leaf)
    assert (decoded, type(decoded)) == (value, type(value))


def test_options_replace_what_the_file_says(tmp_path: Path) -> None:
    """`--set` wins over base, launch and a soak's length; `--axis` replaces or adds an axis."""
    sets = ("steps=7", "launch.timeout_s=5", "model={layers: 3}")
    scenario = load(tmp_path, Overrides(sets, ("parallel=[{dp: 8}]", "seed=[1, 2]")))
    assert (value_of(scenario, "steps"), value_of(scenario, "model.layers")) == (7, 3)
    assert scenario.launch.timeout_s == 5.0
    assert [axis.name for axis in scenario.axes] == ["parallel", "graph", "seed"]
    assert scenario.axes[0].choices[0].leaves == {"parallel.dp": 8}
    lines = {"base": "base: {steps: 64}", "checks": "checks: {state: {}, soak: {}}"}
    for exclude in ("soak: {replays: 500, stall_s: 9}", "exclude: []"):
        options = Overrides(sets=("soak.duration_s=7", "soak.stall_s=9"))
        spec = load(tmp_path, options, exclude=exclude, **lines).soak
        assert spec == SoakSpec(by="duration", amount=7, stall_s=9)


@given(data=st.binary(max_size=300))
@example(data=b"1_")
@example(data=b"1__0")
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    """No input ends in anything but a value or a one-line refusal."""
    try:
        parse_bytes(data, Origin("f", 1)).plain()
    except ScenarioError as error:
        assert str(error).isprintable()  # noqa: PT017 - both ends are legal


TEXTS = st.text("ab:#-[]{}'\"\n é", max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(value=PLAIN)
def test_what_yaml_writes_is_read_back(value: Any) -> None:
    """Plain values survive a round trip through PyYAML's writer and our reader."""
    # Strings in quotes: keys such as a bare `no` are refused here, on purpose.
    style = '"' if isinstance(value, str) else None
    text = yaml.safe_dump(value, default_style=style, allow_unicode=True)
    assert parse_text(text, Origin("f", 1)).plain() == value


def test_the_fast_plain_form_equals_to_dict() -> None:
    """`plain_config` is `to_dict`, only faster, shares nothing, and has every legal leaf."""
    config = TrainConfig(
        graph=("attn",), stress=("poison",), parallel=ParallelConfig(dp=2, dynamic_cp=(1, 2))
    )
    plain = settings.plain_config(config)
    assert plain == config.to_dict()
    leaves = {
        f"{part}.{name}" if name else part
        for part, value in plain.items() for name in (value if isinstance(value, dict) else ("",))
    }  # fmt: skip
    assert set(settings.leaf_types()) == leaves | {"plant"}
    plain["model"]["hidden"] = 0
    plain["parallel"]["dynamic_cp"].append(4)
    assert settings.plain_config(config) == config.to_dict()


def compare(expect: str) -> str:
    return f"compare: {{axis: graph, reference: eager, expect: {expect}}}"


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        ("bitwise", "bitwise"),
        ("rounding", "rounding"),
        ("{rtol: 1e-5, atol: 0}", {"rtol": 1e-5, "atol": 0.0}),
        ("{loss_gap: 0.01, over: 3}", {"loss_gap": 0.01, "over": 3.0}),
    ],
)
def test_compare_expect_is_bitwise_or_a_tolerance(tmp_path: Path, text: str, expect: Any) -> None:
    """Numbers as YAML writes them, `1e-5` included."""
    assert load(tmp_path, compare=compare(text)).compare.expect == expect


CHECKS: dict[str, Any] = {"state": {}, "soak": {}}
BASE = {"steps": 64}
STRESS = {
    "axes": {"stress": ["none", ["poison"]]},
    "compare": {"axis": "stress", "reference": "none", "expect": "bitwise"},
}


def soaked(folder: Path, soak: dict[str, Any], **sections: Any) -> tuple[CaseSpec, ...]:
    return cases(folder, **{"base": BASE, "soak": soak, "checks": CHECKS} | sections)


def test_who_soaks_and_how_long(tmp_path: Path) -> None:
    """By steps all runs; else those with graphs, all where none has any, and references stop."""
    for soak, by in (({"replays": 500}, "replays"), ({"duration_s": 9}, "duration")):
        for case in soaked(tmp_path, soak):
            spec = SoakSpec(by=by, amount=next(iter(soak.values())))  # type: ignore[arg-type]
            runs = (case.reference, case.control, case.candidate)
            assert [run.soak for run in runs] == [None, None, spec]
            assert case.candidate.config["steps"] == 64
    (case, *_) = soaked(tmp_path, {"steps": 300, "period": 50}, base={})
    for run in (case.reference, case.control, case.candidate):
        spec = SoakSpec(by="steps", amount=300, turn_steps=50)
        assert (run.config["steps"], run.soak) == (300, spec)
    (case,) = soaked(tmp_path, {"duration_s": 5}, **STRESS)
    assert case.reference.soak == case.candidate.soak == SoakSpec(by="duration", amount=5)
    (case, *_) = soaked(tmp_path, {"replays": 9, "rotate": ["scramble", "jitter"], "period": 8})
    for run in (case.reference, case.candidate):
        assert run.config["stress"] == ["jitter", "scramble"]


def test_each_stressor_has_one_turn_a_cycle() -> None:
    """The order is another each cycle, by the seed alone; races are always on."""
    names = ("jitter", "poison", "scramble", "races")
    turns = [turn_of(names, 5, number) for number in range(30)]
    assert turns == [turn_of(names, 5, number) for number in range(30)]
    assert turns != [turn_of(names, 6, number) for number in range(30)]
    for cycle in range(0, 30, 3):
        assert {turn[0] for turn in turns[cycle : cycle + 3]} == {"jitter", "poison", "scramble"}
    assert len({tuple(turns[cycle : cycle + 3]) for cycle in range(0, 30, 3)}) > 1
    assert {turn[1:] for turn in turns} == {("races",)}
    assert turn_of(("races",), 0, 3) == ("races",)
    assert turn_of((), 0, 3) == ()


FULL = "{engine: slurm, slurm: {nodes: 2, ranks_per_node: 4, gpus_per_node: 8}}"


def options_of(folder: Path, text: str, *sets: str) -> SlurmOptions:
    """`launch.slurm` of a scenario whose launch section is the text given."""
    return load(folder, Overrides(sets=sets), launch=f"launch: {text}").launch.slurm


def test_every_key_of_slurm_is_taken(tmp_path: Path) -> None:
    """A scenario can say them all; options of the command line win key by key."""
    whole = SlurmOptions(nodes=2, ranks_per_node=4, gpus_per_node=8)
    assert options_of(tmp_path, FULL) == whole
    assert options_of(tmp_path, FULL, "launch.slurm.nodes=3") == replace(whole, nodes=3)
    assert options_of(tmp_path, "{}", "launch.slurm.nodes=2") == SlurmOptions(nodes=2)
    assert load(tmp_path, launch="launch: {}").launch.engine == "local"


@pytest.mark.parametrize(
    ("wanted", "gpus", "device"),
    [("auto", None, "cpu"), ("auto", 8, "cuda"), ("cuda", 8, "cuda"), ("cpu", 8, "cpu"),
     ("cuda", None, "")],
)  # fmt: skip
def test_the_device_is_not_that_of_the_machine_at_hand(
    wanted: str, gpus: int | None, device: str
) -> None:
    """On Slurm, auto is cuda exactly where GPUs are asked for; cuda without them is a mistake."""
    options = SlurmOptions(gpus_per_node=gpus)
    if device:
        assert device_on_slurm(wanted, options) == device
    else:
        with pytest.raises(UsageError, match="gpus_per_node"):
            device_on_slurm(wanted, options)


def test_a_prepared_request_carries_engine_options_and_room(tmp_path: Path) -> None:
    """`--engine slurm --slurm nodes=2` plans runs one by one, GPUs or none on this machine."""
    axes = "axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [full_iteration]]}"
    path = write(tmp_path, axes=axes, launch="launch: {slurm: {gpus_per_node: 8}}")
    prepared = prepare(Request(paths=(path,), engine="slurm", slurm=("nodes=2",)))
    assert prepared.slurm == SlurmOptions(nodes=2, gpus_per_node=8)
    assert (prepared.device, prepared.devices) == ("cuda", ())
    assert (prepared.plan.slots, prepared.plan.jobs) == (2, 1)
    assert not prepared.plan.skipped
    assert prepare(Request(paths=(path,), device="cpu")).slurm is None
    with pytest.raises(UsageError, match="this one is in Slurm"):
        prepare(Request(paths=(path,), engine="slurm", ranks_per_gpu=2))


def test_what_was_asked_is_read_back_from_the_manifest() -> None:
    """`--resume` goes to the same place; a damaged entry is an error, not this machine."""
    options = SlurmOptions(nodes=3)
    assert stored_options({"slurm": options.to_json()}) == options
    assert stored_options({"slurm": None}) is None
    assert stored_options({}) is None
    with pytest.raises(UsageError, match="damaged"):
        stored_options({"slurm": {"nodes": "3"}})


PROGRAM: dict[str, Any] = {"script": "train.py", "steps": 4, "args": {"lr": 0.1}}


def written(folder: Path, program: Any = None, **sections: Any) -> Path:
    """A scenario of one axis of a program, with other keys than `PROGRAM` and other sections."""
    plain: dict[str, Any] = {
        "name": "case", "why": "A sentence.", "program": PROGRAM | (program or {}),
        "axes": {"args.amp": [False, True]},
        "compare": {"axis": "args.amp", "reference": False, "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}},
    } | sections  # fmt: skip
    (folder / "train.py").touch()
    path = folder / "case.yaml"
    path.write_text(json.dumps(plain))
    return path


def cases_of_program(path: Path, **overrides: Any) -> tuple[CaseSpec, ...]:
    return expand(load_scenario(path, overrides=Overrides(**overrides)), "cpu")


def of(run: RunSpec) -> ProgramSpec:
    """The program of a run."""
    program = program_of(run.config)
    assert program is not None
    return program


@pytest.mark.parametrize("word", ["on", "off", "yes", "no"])
def test_a_bare_word_that_yaml_takes_for_a_bool_is_refused(word: str, tmp_path: Path) -> None:
    """The message says what to write; in quotes it is a text."""
    path = written(tmp_path)
    text = path.read_text().replace('"lr": 0.1', f'"lr": {word}')
    path.write_text(text)
    with pytest.raises(ScenarioError) as raised:
        cases_of_program(path)
    assert raised.value.key == "program.args.lr"
    assert f'"{word}" in quotes' in raised.value.expected
    path.write_text(text.replace(f": {word}", f': "{word}"'))
    assert of(cases_of_program(path)[0].reference).args["lr"] == word


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"lr": 0.1}, ["--lr", "0.1"]),
        ({"amp": True, "graphs": False, "seed": None}, ["--amp"]),
        ({"sizes": [1, 2]}, ["--sizes", "1", "--sizes", "2"]),
        ({"-x": 3, "--y": True}, ["-x", "3", "--y"]),
        ({"out=": "a", "flag=": True}, ["out=a", "flag=true"]),
        ({"_": ["in.txt", 2], "a": "b"}, ["--a", "b", "in.txt", "2"]),
        ({"_": "in.txt"}, ["in.txt"]),
        ({"_": 0}, ["0"]),
        ({"name": "with space"}, ["--name", "with space"]),
    ],
)
def test_the_command_line(args: dict[str, Any], words: list[str]) -> None:
    """Options by name, then what stands alone."""
    assert command_line(args) == words


def test_a_case_is_a_pair_of_commands(tmp_path: Path) -> None:
    """Reference and candidate differ in the axis; paths are relative to the scenario's file."""
    keys = {"args": {"lr": "1e-3", "v": 1}, "env": {"A": 1}, "packages": {"x": "0.10"}, "ranks": 2}
    (case,) = cases_of_program(written(tmp_path, keys))
    reference, candidate = of(case.reference), of(case.candidate)
    assert (reference.target, reference.folder) == (str(tmp_path / "train.py"), str(tmp_path))
    assert reference.args == {"lr": "1e-3", "v": 1, "amp": False}
    assert candidate.args == reference.args | {"amp": True}
    assert (reference.env, reference.packages) == ({"A": "1"}, {"x": "0.10"})
    assert (case.reference.world_size, case.reference.config["steps"]) == (2, 4)
    assert (case.id, case.labels) == ("amp", {"args.amp": "true"})


def test_a_blank_value_is_quoted_where_it_is_shown(tmp_path: Path) -> None:
    """A row of a report would have no name."""
    axes = {"env.X": ["", " ", "1"], "args.amp": [False, True]}
    labels = [case.labels["env.X"] for case in cases_of_program(written(tmp_path, axes=axes))]
    assert labels == ["''", "' '", "1"]


def test_what_a_script_says_itself_is_no_mistake_here(tmp_path: Path) -> None:
    """Taps of its own recorder; a mean over all steps, those of the case and not of the file."""
    (case,) = cases_of_program(written(tmp_path, checks={"loss": {}, "taps": {}}))
    assert case.checks["taps"] == {}
    expect = {"loss_gap": 0.1, "over": 5}
    compare = {"axis": "args.amp", "reference": False, "expect": expect}
    (case,) = cases_of_program(written(tmp_path, compare=compare), sets=("steps=5",))
    assert case.expect == expect


def test_numbers_and_texts_of_yaml(tmp_path: Path) -> None:
    """A bare 1e-3 is a number, 0.10 in packages keeps its zero, a quoted number stays a text."""
    path = written(tmp_path)
    bare = '{"script": "train.py", "steps": 4, args: {lr: 1e-3, rate: 0.10, word: "0.10"}, '
    bare += 'packages: {x: 0.10}, env: {N: 10.0, M: "010"}}'
    path.write_text(path.read_text().replace(json.dumps(PROGRAM), bare))
    program = of(cases_of_program(path)[0].reference)
    assert program.args == {"lr": 0.001, "rate": 0.1, "word": "0.10", "amp": False}
    assert (program.packages, program.env) == ({"x": "0.10"}, {"N": "10.0", "M": "010"})


def test_options_replace_settings_and_axes(tmp_path: Path) -> None:
    """`--set args.lr=0.2` and `--axis args.n=[1,2]` reach the program."""
    path = written(tmp_path)
    (case,) = cases_of_program(path, sets=("args.lr=0.2", "steps=7"))
    assert (of(case.candidate).args["lr"], case.candidate.config["steps"]) == (0.2, 7)
    many = cases_of_program(path, axes=("args.n=[1, 2]",))
    assert [of(each.reference).args["n"] for each in many] == [1, 2]


def test_axes_of_variables_packages_and_more(tmp_path: Path) -> None:
    """Variables, versions, ranks and determinism may be axes; include and exclude choose cases."""
    sections: dict[str, Any] = {
        "axes": {"args.amp": [False, True], "env.ALGO": ["Ring", "Tree"], "ranks": [1, 2]},
        "exclude": [{"env.ALGO": "Tree", "ranks": 2}],
        "include": [{"args.amp": True, "env.ALGO": "Ring", "ranks": 1, "args.seed": 3}],
    }
    found = cases_of_program(written(tmp_path, **sections))
    runs = [case.candidate for case in found]
    seen = [(of(run).env["ALGO"], run.world_size, of(run).args.get("seed")) for run in runs]
    assert seen == [("Ring", 1, 3), ("Ring", 2, None), ("Tree", 1, None)]
    assert len({case.id for case in found}) == 3


@pytest.mark.parametrize(
    ("expect", "sketch"),
    [("bitwise", "none"), ({"rtol": 1e-3}, "first"), ({"rtol": 1e-3, "gradients": 0.1}, "first"),
     ("rounding", "all"), ({"loss_gap": 0.1, "over": 2}, "none")],
)  # fmt: skip
def test_a_tolerance_has_the_gradients_of_programs_sketched(
    tmp_path: Path, expect: Any, sketch: str
) -> None:
    """Reference, control and candidate alike; the built-in trainer records none."""
    compare = {"axis": "args.n", "reference": 1, "expect": expect}
    (case,) = cases_of_program(written(tmp_path, axes={"args.n": [1, 2]}, compare=compare))
    assert {run.sketch for run in (case.reference, case.control, case.candidate)} == {sketch}


# --- every malformed scenario of the corpus: its one line, and its exit code ----------------------


HERE = Path(__file__).parent
_, *CORPUS = re.split(r"^=== ", (HERE / "malformed.txt").read_text(), flags=re.MULTILINE)
NOTHING_LEFT = ("exclude_everything",)


def complaint(capsys: Capsys, *args: str | Path) -> tuple[int, str]:
    """Exit code of `harness run` and the only line that it says."""
    began = time.process_time()
    code = main(["run", *map(str, args)])
    assert time.process_time() - began < 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err.rstrip("\n")


def fits(err: str, expected: str) -> bool:
    """Whether a line is as expected, or begins so where it goes on with legal values."""
    whole = f"harness: {expected}"
    return err.startswith(whole) if expected.endswith("legal values:") else err == whole


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.split()[0])
def test_one_clear_line(entry: str, tmp_path: Path, capsys: Capsys) -> None:
    """A mistake costs one line with file, line, key, expected, got; exit 4, or 5 for no case."""
    head, _, text = entry.partition("\n")
    name, _, expected = head.partition(" ")
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    (tmp_path / "train.py").touch()
    code, err = complaint(capsys, path, "--dry-run")
    assert fits(err, expected.replace("@", str(path))), err
    assert code == (5 if name in NOTHING_LEFT else 4)


@pytest.mark.parametrize("line", (HERE / "options.txt").read_text().splitlines())
def test_a_wrong_option_is_named(line: str, capsys: Capsys) -> None:
    """An error in an option names the option, not the file, and never goes unnoticed."""
    options, _, expected = line.partition("\t")
    path = f"{HERE / 'legal.yaml'}::the_reference_is_no_case"
    code, err = complaint(capsys, path, *shlex.split(options))
    assert (code, fits(err, expected)) == (4, True), err


MONSTERS: dict[str, tuple[bytes, str]] = {
    "huge": ((b"# " + b"x" * 999_997 + b"\n") * 30, "file: expected at most 1,000,000 bytes"),
    "laughs": (b"a0: &a0 [x, x]\na1: &a1 [*a0, *a0]\n", "a0: expected values written out"),
    "deep": (b"base: " + b"[" * 900_000, "nesting"),
    "mappings": (b"{a: " * 200_000, "expected at most 20 levels"),
    "wide": (b"name: [" + b"1, " * 300_000 + b"]", "expected at most 20,000 values, got more"),
    "binary": (b"name: case\nwhy: \x80\n", ":2: file: expected UTF-8 text, got byte 0x80"),
    "nul": (b"name: case\nwhy: a\0b\n", ":2: file: expected text, got the control character 0x00"),
    "random": (bytes((i * 7919 + i // 251) % 256 for i in range(500_000)),
               "file: expected UTF-8 text, got byte"),
    "long number": (b"seed: " + b"9" * 5000, "syntax: expected a finite decimal number"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MONSTERS, "missing", "folder", "pipe"])
def test_monsters_cost_one_line_and_no_time(name: str, tmp_path: Path, capsys: Capsys) -> None:
    """30 MB, anchors, deep and wide files, no file, a pipe: one line, exit 4, under 2 s."""
    path = tmp_path / "it.yaml"
    data, said = MONSTERS.get(name, (b"", "file: expected a scenario file, got "))
    if data:
        path.write_bytes(data)
    elif name == "folder":
        path = tmp_path / "missing" / ".." / "gone.yaml"
    elif name == "pipe":
        os.mkfifo(path)
    code, err = complaint(capsys, path)
    assert code == 4
    assert err.startswith(f"harness: {path}:")
    assert said in err

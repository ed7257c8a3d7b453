"""Records go through JSON and back; errors are one line."""

import dataclasses
from typing import Any

import pytest

from harness import errors
from harness.errors import ScenarioError, cut, did_you_mean, one_line, shown
from harness.records import (
    EndRecord,
    ErrorRecord,
    ExitCode,
    PlantSpec,
    RankExit,
    RunOutcome,
    RunSpec,
    dumps,
    each_of,
    joined,
)
from harness.soaking import SoakSpec

SPEC = RunSpec(
    config={"steps": 2}, device="cpu", world_size=2, timeout_s=5.0,
    plant=PlantSpec(fault="hang", step=1), soak=SoakSpec(by="replays", amount=3.0),
)  # fmt: skip
VALUES: list[Any] = [
    SPEC,
    ErrorRecord(rank=1, step=1, what="oom", type="E", message="m", traceback=""),
    EndRecord(rank=0, steps=1, peak_bytes=1, startup_s=0.5, wall_s=0.5),
    RunOutcome(
        key="k", what="", message="", culprit_rank=None, ranks=(RankExit(rank=0, code=0),),
        started_unix_s=0.0, wall_s=1.0,
    ),
]  # fmt: skip


def without_defaults(value: Any) -> Any:
    """The plain value without the keys whose values are defaults, in what it holds, too."""
    if not dataclasses.is_dataclass(value):
        return [without_defaults(each) for each in value] if isinstance(value, tuple) else value
    return {
        field.name: without_defaults(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_left_out_is_written_again(value: Any) -> None:
    """A default is a value: what is decoded without it is encoded, compared and keyed with it."""
    plain = without_defaults(value)
    assert len(plain) < len(dataclasses.fields(value))
    again = type(value).from_json(plain)
    assert again == value
    assert dumps(again) == dumps(value)
    assert type(value).from_json(again.to_json()) == value
    if isinstance(value, RunSpec):
        assert again.key == value.key


ULP = PlantSpec(fault="ulp", step=3, rank=1)
HANG = PlantSpec(fault="hang", step=4, chance=0.3)


def spec_with(plant: PlantSpec | None) -> RunSpec:
    """A run with a plant."""
    return RunSpec(config={}, device="cpu", world_size=2, timeout_s=1, plant=plant)


def test_taking_apart_and_putting_together_are_inverse() -> None:
    """`joined` of `each` is the plant itself, whatever number of faults it has."""
    for faults in ((), (ULP,), (ULP, HANG)):
        plant = joined(faults)
        assert each_of(plant) == faults
        assert joined(each_of(plant)) == plant
    assert joined([]) is None
    assert joined([PlantSpec(fault="a", beside=(ULP,)), HANG]) == PlantSpec(
        fault="a", beside=(ULP, HANG)
    )


def test_specifications_come_back_whole() -> None:
    """Faults beside others and their chances survive JSON."""
    for plant in (None, ULP, HANG, joined([ULP, HANG]), joined([HANG, ULP])):
        spec = spec_with(plant)
        assert RunSpec.from_json(spec.to_json()) == spec
        assert RunSpec.from_json(spec.to_json()).key == spec.key


def test_keys_tell_faults_and_chances_apart() -> None:
    """Runs with other faults, or other chances, are other runs."""
    sure = PlantSpec(fault="hang", step=4)
    plants = [None, ULP, sure, HANG, joined([ULP, HANG]), joined([ULP, sure]), joined([HANG, ULP])]
    assert len({spec_with(plant).key for plant in plants}) == len(plants)


def test_a_scenario_error_is_one_line_with_place_key_and_legal_values() -> None:
    """The whole error is one line: file, line, key, expected, got, legal values."""
    error = ScenarioError(
        file="a.yaml", line=3, key="base.x", expected="a string", got="1", legal=("p", "q")
    )
    assert str(error) == "a.yaml:3: base.x: expected a string, got 1; legal values: p, q"


def test_an_option_has_no_line() -> None:
    """An error in an option names the option where a file and line would be."""
    error = ScenarioError(file="--set x", line=None, key="x", expected="a", got="b")
    assert str(error) == "--set x: x: expected a, got b"


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x1b[31mb", "a\u2028b", "a\ud800b"])
def test_no_text_breaks_the_line(text: str) -> None:
    """Line breaks, escape sequences and half surrogates from a file are shown escaped."""
    said = str(errors.UsageError(text))
    assert said.isprintable()
    assert said == one_line(text)
    assert said != text


def test_what_is_cut_ends_with_a_whole_word_and_a_mark() -> None:
    """A text that fits stays; one word alone that does not is cut within."""
    assert cut("the group says", 14) == "the group says"
    assert cut("the group says", 13) == "the group …"
    assert cut("the group says", 11) == "the group …"
    assert cut("the group says", 10) == "the …"
    assert cut("thegroupsays", 10) == "thegroup …"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, ExitCode.USAGE),
        (errors.NothingSelected, ExitCode.NOTHING_RAN),
        (errors.Infrastructure, ExitCode.NO_VERDICT),
        (errors.Interrupted, ExitCode.INTERRUPTED),
        (errors.InternalError, ExitCode.INTERNAL),
    ],
)
def test_each_kind_has_its_exit_code(kind: type[errors.HarnessError], code: ExitCode) -> None:
    """The tree maps one to one to the documented exit codes."""
    assert kind("x").exit_code == code


def test_long_values_are_cut_and_say_so() -> None:
    """A value that is too long to read is cut, with its length."""
    text = shown("x" * 1000)
    assert len(text) < 120
    assert "1002 characters" in text


def test_the_closest_word_is_suggested_and_only_that() -> None:
    """A near miss names the word meant; a far one suggests nothing."""
    assert did_you_mean("stepz", ["steps", "seed"]) == " (did you mean steps?)"
    assert did_you_mean("qqqq", ["steps", "seed"]) == ""

"""Records go through JSON and back, floats as bits; errors are one line."""

import dataclasses
import math
import struct
from typing import Any

import pytest

from harness import errors
from harness.errors import ScenarioError, cut, did_you_mean, one_line, shown
from harness.records import (
    EndRecord,
    ErrorRecord,
    ExitCode,
    FloatBits,
    PlantSpec,
    RankExit,
    RunOutcome,
    RunSpec,
    dumps,
    each_of,
    joined,
    ulp_distance,
)
from harness.values import MAX_INT, RecordError, SoakSpec

ULP = PlantSpec(fault="ulp", step=3, rank=1)
SURE = PlantSpec(fault="hang", step=4)
HANG = PlantSpec(fault="hang", step=4, chance=0.3)
PLANTS = (None, ULP, SURE, HANG, joined([ULP, HANG]), joined([ULP, SURE]), joined([HANG, ULP]))


def spec(plant: PlantSpec | None = None, **more: Any) -> RunSpec:
    return RunSpec(config={"steps": 2}, device="cpu", world_size=2, timeout_s=5, plant=plant,
                   **more)  # fmt: skip


VALUES: list[Any] = [
    *map(spec, PLANTS), spec(ULP, soak=SoakSpec(by="replays", amount=3)),
    ErrorRecord(rank=1, step=1, what="oom", type="E", message="m", traceback=""),
    EndRecord(rank=0, steps=1, peak_bytes=1, startup_s=0.5, wall_s=0.5),
    RunOutcome(key="k", what="", message="", culprit_rank=None, started_unix_s=0.0, wall_s=1.0,
               ranks=(RankExit(rank=0, code=0),)),
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
    for again in (type(value).from_json(plain), type(value).from_json(value.to_json())):
        assert again == value
        assert dumps(again) == dumps(value)
        assert getattr(again, "key", "") == getattr(value, "key", "")


def test_faults_are_joined_and_taken_apart() -> None:
    """`joined` of `each` is the plant itself; other faults, or chances, are other runs."""
    for faults in ((), (ULP,), (ULP, HANG)):
        assert each_of(joined(faults)) == faults
    both = PlantSpec(fault="a", beside=(ULP,))
    assert joined([both, HANG]) == PlantSpec(fault="a", beside=(ULP, HANG))
    assert len({spec(plant).key for plant in PLANTS}) == len(PLANTS)


def test_keys_know_every_value() -> None:
    """Half a surrogate pair is a text that a file may hold; NaN of a program is none."""
    texts = ("", "\ud800", "\ud801")
    assert len({dataclasses.replace(spec(), config={"taps": [t]}).key for t in texts}) == 3
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = dataclasses.replace(spec(), config={"program": {"args": {"lr": math.nan}}}).key


# --- floats as bits ---


def f64(value: float) -> FloatBits:
    return FloatBits.from_hex(struct.pack(">d", value).hex())


def f32(value: float) -> FloatBits:
    return FloatBits.from_hex(struct.pack(">f", value).hex())


@pytest.mark.parametrize("make", [f32, f64])
def test_bits_and_value_go_together(make: Any) -> None:
    """Both widths come back from JSON as they were; the number cannot say another thing."""
    for value in (0.0, -0.0, 1.5, float("inf"), float("nan")):
        held = make(value)
        assert FloatBits.from_json(held.to_json()) == held
        assert held.finite is (value - value == 0)
        assert held.value == (value if held.finite else None)
    with pytest.raises(RecordError, match="but value says"):
        FloatBits(bits=make(1.0).bits, value=2.0)


@pytest.mark.parametrize("bits", ["", "3f8", "3F800000", "3f8000000", "g" * 16, "0" * 32])
def test_what_is_no_float_is_refused(bits: str) -> None:
    """Neither 8 nor 16 lower-case hex digits."""
    with pytest.raises(RecordError, match="hex digits"):
        FloatBits(bits=bits, value=0.0)


def test_distances() -> None:
    """In units of the width that both have; none between widths, to infinity, or past 64 bits."""
    assert ulp_distance(f32(1.0), f32(1 + 2.0**-23)) == 1
    assert ulp_distance(f64(1.0), f64(1 + 2.0**-52)) == 1
    assert ulp_distance(f64(-0.0), f64(0.0)) == 0
    assert ulp_distance(f32(1.0), f64(1.0)) is None
    assert ulp_distance(f64(1.0), f64(float("inf"))) is None
    widest = ulp_distance(f64(-1e308), f64(1e308))
    assert widest is None or widest < MAX_INT


# --- errors ---


def test_errors_are_one_line_with_their_exit_codes() -> None:
    """File, line, key, expected, got, legal values; an option has no line; no text breaks it."""
    about: dict[str, Any] = {"key": "x", "expected": "a string", "got": "1"}
    error = ScenarioError(file="a.yaml", line=3, legal=("p", "q"), **about)
    assert str(error) == "a.yaml:3: x: expected a string, got 1; legal values: p, q"
    error = ScenarioError(file="--set x", line=None, **about)
    assert str(error) == "--set x: x: expected a string, got 1"
    for kind, code in (
        (errors.UsageError, ExitCode.USAGE), (errors.NothingSelected, ExitCode.NOTHING_RAN),
        (errors.Infrastructure, ExitCode.NO_VERDICT), (errors.Interrupted, ExitCode.INTERRUPTED),
        (errors.InternalError, ExitCode.INTERNAL),
    ):  # fmt: skip
        assert kind("x").exit_code == code
        for text in ("a\nb", "a\rb", "a\x1b[31mb", "a\u2028b", "a\ud800b"):
            assert str(kind(text)).isprintable()
            assert str(kind(text)) == one_line(text) != text


def test_values_and_texts_are_cut_and_words_suggested() -> None:
    """What is too long says its length; a cut ends with a whole word; only a near miss is named."""
    assert "1002 characters" in shown("x" * 1000)
    assert len(shown("x" * 1000)) < 120
    assert [shown(v) for v in (None, True, "a\n")] == ["nothing", "true", "'a\\n'"]
    for most, said in ((14, "the group says"), (13, "the group …"), (11, "the group …"),
                       (10, "the …")):  # fmt: skip
        assert cut("the group says", most) == said
    assert cut("thegroupsays", 10) == "thegroup …"
    assert did_you_mean("stepz", ["steps", "seed"]) == " (did you mean steps?)"
    assert did_you_mean("qqqq", ["steps", "seed"]) == ""

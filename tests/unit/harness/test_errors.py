"""Contracts of harness.errors."""

import pytest

from harness import errors
from harness.errors import ScenarioError, cut, did_you_mean, one_line, shown
from harness.records import ExitCode


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

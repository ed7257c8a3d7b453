"""Hostile text is fit to be shown once it has been cleaned."""

import time
from pathlib import Path
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from reports.text import clean, one_line, tail, well_formed

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT)
def test_cleaned_text_survives_xml_and_utf8(text: str) -> None:
    """Whatever comes in, what comes out encodes and is read back from XML unchanged."""
    shown = clean(text)
    shown.encode()
    element = ET.Element("t")
    element.text = shown
    assert (ET.fromstring(ET.tostring(element, "unicode")).text or "") == shown


@given(ANY_TEXT)
def test_cleaning_twice_changes_nothing(text: str) -> None:
    """One line stays one line, without control characters, however often it is cleaned."""
    shown = one_line(text)
    assert one_line(shown) == shown
    assert shown.isprintable() or not shown.isascii()
    assert "\n" not in shown


def test_terminal_escapes_go_and_controls_are_seen(hostile: str) -> None:
    """Colours vanish; NUL, bell, a lone surrogate and a direction override become a mark."""
    shown = clean(hostile)
    assert "\x1b" not in shown
    assert "[31m" not in shown
    assert "red" in shown
    assert shown.count("\N{REPLACEMENT CHARACTER}") == 4


def test_long_text_is_cut_and_says_so() -> None:
    """A megabyte is clipped with the number of characters that were cut, quickly."""
    began = time.process_time()
    assert clean("x" * 1_000_000, 10) == "x" * 10 + "… (999990 more characters)"
    assert clean("\x1b]x" * 300_000, 1_000_000) == "x" * 300_000
    assert time.process_time() - began < 2.0


def test_plain_text_is_left_alone() -> None:
    """Letters of any script, tabs and line breaks stay; carriage returns become breaks."""
    assert clean("Δ é 漢\t1\r\n2\r3") == "Δ é 漢\t1\n2\n3"
    assert well_formed("a\ud800Δ") == "a?Δ"


def test_tail_of_a_file(tmp_path: Path) -> None:
    """The last lines are kept whole, huge ones clipped; a missing file has no tail."""
    path = tmp_path / "rank0.stderr"
    path.write_bytes(b"first\n" + b"y" * 500_000 + b"\n\xff\xfelast\x00\n")
    shown = tail(path)
    assert (
        shown.splitlines()[-1] == "\N{REPLACEMENT CHARACTER}" * 2 + "last\N{REPLACEMENT CHARACTER}"
    )
    assert len(shown) < 1000
    assert tail(tmp_path / "absent") == ""
    assert tail(tmp_path) == ""

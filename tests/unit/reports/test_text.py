"""Hostile text is fit to be shown once it has been cleaned."""

import time
from pathlib import Path
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from reports.text import clean, one_line, tail, well_formed
from tests.unit.reports.folders import HOSTILE

MARK = "\N{REPLACEMENT CHARACTER}"


@given(st.text(st.characters(exclude_categories=())))
def test_cleaned_text_survives_xml_and_cleaning(text: str) -> None:
    """It encodes, is read back from XML unchanged, and one line stays one line."""
    shown, line = clean(text), one_line(text)
    element = ET.Element("t")
    element.text = shown
    assert (ET.fromstring(ET.tostring(element, "unicode").encode()).text or "") == shown
    assert one_line(line) == line
    assert line.isprintable() or not line.isascii()


def test_controls_are_seen_and_plain_text_is_left_alone() -> None:
    """Colours vanish; NUL, bell, a lone surrogate and a direction override become a mark."""
    shown = clean(HOSTILE)
    assert "red" in shown
    assert "[31m" not in shown
    assert shown.count(MARK) == 4
    assert clean("Δ é 漢\t1\r\n2\r3") == "Δ é 漢\t1\n2\n3"
    assert well_formed("a\ud800Δ") == "a?Δ"


def test_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    """A megabyte is clipped with what was cut, quickly; of a file the last lines are kept whole."""
    began = time.process_time()
    assert clean("x" * 1_000_000, 10) == "x" * 10 + "… (999990 more characters)"
    assert clean("\x1b]x" * 300_000, 1_000_000) == "x" * 300_000
    assert time.process_time() - began < 2.0
    path = tmp_path / "rank0.stderr"
    path.write_bytes(b"first\n" + b"y" * 500_000 + b"\n\xff\xfelast\x00\n")
    assert tail(path).splitlines()[-1] == f"{MARK * 2}last{MARK}"
    assert len(tail(path)) < 1000
    assert tail(tmp_path / "absent") == tail(tmp_path) == ""

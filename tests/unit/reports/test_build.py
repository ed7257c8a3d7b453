"""The files of a report: all four, whole, the same each time, and safe to open."""

import base64
import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import xmlschema

from harness.errors import Infrastructure
from harness.records import Verdict
from harness.store import RunFolder
from reports import build, markdown
from reports.json_report import normalised
from reports.markdown import MAX_BYTES, escape, fenced
from reports.reading import summarise
from tests.pace import in_paces

FORMATS = {
    "html": "index.html", "markdown": "report.md", "junit": "junit.xml", "json": "report.json",
}  # fmt: skip
VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """Tags, their nesting, attributes and visible text, of the details that are packed too.

    `scripts` are what script elements hold, by their id.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: dict[str, str] = {}
        self.feed(text)
        self.close()
        if packed := self.scripts.get("packed"):
            for body in json.loads(zlib.decompress(base64.b64decode(packed))).values():
                self.reset()
                self.feed(body)
                self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[str(self.tags[-1][1].get("id", ""))] = data
        elif self.open and self.open[-1] != "style":
            self.words.append(data)


@pytest.fixture(scope="module")
def built(everything: Path) -> dict[str, str]:
    """Texts of the report by format."""
    return {form: path.read_text("utf-8") for form, path in build(everything).items()}


def test_four_files_in_the_report_folder(everything: Path, built: dict[str, str]) -> None:
    """Every format is written under `report/`, and nothing else is left there."""
    assert set(built) == set(FORMATS)
    names = {path.name for path in (everything / "report").iterdir()}
    assert names == set(FORMATS.values())


def test_reports_are_stable_and_quick(everything: Path, built: dict[str, str]) -> None:
    """Reporting the same folder again gives the same bytes, in under forty paces."""

    def report_again() -> None:
        again = {form: path.read_text("utf-8") for form, path in build(everything).items()}
        assert again == built

    assert in_paces(report_again, times=2) < 40  # 21 measured, with coverage


def test_times_and_place_are_all_that_varies(
    tmp_path: Path, make_writer: Callable[..., Any]
) -> None:
    """Two runs with the same answers at other times and places are equal once normalised."""
    texts = []
    for name, wall_s, created in (("a", 1.0, "2031-01-01T00:00:00Z"), ("b & c", 2.5, "2032-02-02")):
        writer = make_writer(tmp_path / name, wall_s=wall_s, created=created)
        writer.add("dp1-attn", 1, "attn")
        writer.add("dp2-attn", 2, "attn", skip_reason="no room")
        writer.add("dp3-attn", 1, "attn", candidate={"peak": 100 << 20})
        files = build(writer.write())
        texts.append(normalised(files["json"], writer.path))
    assert texts[0] == texts[1]
    assert "dp2-attn" in texts[0]


def test_page_is_well_formed_and_closed_to_the_world(built: dict[str, str]) -> None:
    """Tags nest, only our own script may run, and every address is inside the page."""
    page = Page(built["html"])
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"iframe", "link", "object", "base", "form"}
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert [attributes.get("id") for attributes in scripts] == ["index", "past", "packed", None]
    assert [attributes.get("type", "") for attributes in scripts][:3] == [
        "application/json", "application/json", "text/plain",
    ]  # fmt: skip
    assert not any("src" in attributes for attributes in scripts)
    digest = base64.b64encode(hashlib.sha256(page.scripts[""].encode()).digest()).decode()
    (policy,) = [
        attributes["content"] for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'; ")
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "img":
            assert str(attributes["src"]).startswith("data:image/svg+xml;base64,")
            assert attributes["alt"]
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")
        if tag == "a" and not str(attributes["href"]).startswith("#?"):
            assert str(attributes["href"])[1:] in ids
    assert not re.search(r"url\(|@import", built["html"])


def test_page_says_what_an_engineer_needs(everything: Path, built: dict[str, str]) -> None:
    """Verdict, place, bit patterns, Δloss in words, memory, environment and command are there."""
    words = " ".join(" ".join(Page(built["html"]).words).split())
    for expected in (
        "step 7, rank 1, weights of layers.2.attn.qkv.weight",
        "0x7fc00000", "0x80000000", "the sign of a zero", "Δloss is zero", "2.500 times",
        "differs in torch", "2.13.0", f"harness rerun {everything}/cases/dp2-attn",
        f"Find the cause harness bisect {everything}/cases/dp2-attn Repeat",
        "weights: differs first at step 7 on rank 1, in 13 of 42 (step, rank) pairs",
        "What to do next", "Wall time 1.2 s",
        "needs 6 GPUs", "last line", "rank 1 did not finish within 300 s", "6 failed",
    ):  # fmt: skip
        assert expected in words
    assert words.index("dp2-attn") < words.index("dp1-attn")


def test_failing_cells_lead_to_their_case(built: dict[str, str]) -> None:
    """Each case is a cell of the matrix, told by a symbol and a word, that links to its details."""
    page = Page(built["html"])
    cells = {
        str(attributes["href"]): str(attributes["aria-label"])
        for tag, attributes in page.tags if tag == "a" and "aria-label" in attributes
    }  # fmt: skip
    assert len(cells) == 13
    assert cells["#dp2-attn"] == "failed: dp2-attn"
    assert cells["#dp6-attn"] == "skipped: dp6-attn"
    details = built["html"].split('id="dp2-attn"')[1].split('<details class="case')[0]
    assert (
        details.index("First difference")
        < details.index("harness bisect")
        < details.index("harness rerun")
        < details.index("<svg")
        < details.index("Checks that failed")
    )


def test_the_matrix_of_a_shared_cell_links_to_the_worst(writer: Any) -> None:
    """Two cases of the same labels share a cell: it tells how many, and leads to the failure."""
    writer.add("good", 1, "attn")
    writer.add("bad", 1, "attn", candidate={"peak": 100 << 20})
    page = build(writer.write())["html"].read_text("utf-8")
    assert '<a class="failed" href="#bad" aria-label="failed: bad">✗ 2</a>' in page


def test_hostile_text_is_text(built: dict[str, str], hostile: str) -> None:
    """Markup, template code and control characters of a log are shown, not obeyed."""
    words = " ".join(Page(built["html"]).words)
    assert "<script>alert(1)</script>" in words
    assert "{{ 7*7 }}" in words
    for text in built.values():
        assert not set(text) & set("\x00\x07\x1b\u202e")
    assert "\\ud800" not in built["json"]


def test_junit_is_valid_and_maps_outcomes(built: dict[str, str]) -> None:
    """The XML keeps to the schema, and no case without a pass looks passed."""
    xmlschema.XMLSchema(str(Path(__file__).with_name("junit.xsd"))).validate(built["junit"])
    root = ET.fromstring(built["junit"])
    kinds = {
        case.get("name"): [child.tag for child in case if not child.tag.startswith("system")]
        for case in root.iter("testcase")
    }
    assert kinds["dp1-attn"] == []
    assert kinds["dp2-attn"] == ["failure"]
    assert kinds["dp6-attn"] == ["skipped"]
    for name in ("dp5-attn", "dp6-full_iteration", "dp4-full_iteration", "dp5-full_iteration"):
        assert kinds[name] == ["error"]
    for element in (root, root[0]):
        facts = [element.get(name) for name in ("tests", "failures", "errors")]
        assert facts == ["13", "6", "4"]
    assert root[0].get("skipped") == "1"
    out = root.find(".//testcase[@name='dp2-attn']/system-out")
    assert out is not None
    assert "harness rerun" in str(out.text)


def test_empty_run_is_not_green_anywhere(writer: Any) -> None:
    """A plan without cases is an error in JUnit and says so in every other format."""
    texts = {form: path.read_text("utf-8") for form, path in build(writer.write()).items()}
    xmlschema.XMLSchema(str(Path(__file__).with_name("junit.xsd"))).validate(texts["junit"])
    root = ET.fromstring(texts["junit"])
    assert root.get("errors") == "1"
    assert len(root.findall("./testsuite/testcase/error")) == 1
    assert "nothing ran" in texts["html"]
    assert "No case passed" in texts["markdown"]
    assert json.loads(texts["json"])["exit_code"] == 5


def test_a_run_that_is_not_in_the_history_says_so(writer: Any) -> None:
    """The page, the Markdown and the JSON give the reason, as text; without one they give none."""
    writer.add("dp6-attn", 6, "attn", skip_reason="needs 6 GPUs")
    folder = writer.write()
    plain = {form: path.read_text() for form, path in build(folder).items()}
    assert json.loads(plain["json"])["history_note"] == ""
    (folder / "history_not_written.txt").write_text("not written to the history: <b>disk</b>\n")
    told = {form: path.read_text() for form, path in build(folder).items()}
    assert json.loads(told["json"])["history_note"] == "not written to the history: <b>disk</b>"
    for form in ("html", "markdown"):
        assert "not written to the history" in told[form]
        assert "not written to the history" not in plain[form]
        assert "&lt;b&gt;disk" in told[form]


def test_only_skips_says_that_nothing_passed(writer: Any) -> None:
    """A run of skips alone is not presented as success."""
    writer.add("a", 1, "attn", skip_reason="no GPU")
    texts = {form: path.read_text("utf-8") for form, path in build(writer.write()).items()}
    assert "No case passed" in texts["html"]
    assert "No case passed" in texts["markdown"]


def test_json_holds_every_verdict(everything: Path, built: dict[str, str]) -> None:
    """The verdicts decode from the report as they were stored."""
    assert json.loads(built["json"])["schema_version"] == 2
    plain = json.loads(built["json"])
    found = {case["id"]: Verdict.from_json(case["verdict"]) for case in plain["cases"]}
    stored = RunFolder.open(everything).verdicts()
    assert len(found) == len(stored) + 1
    kept = [verdict for verdict in stored if verdict.case_id != "dp3-attn"]
    assert all(found[verdict.case_id] == verdict for verdict in kept)
    (weights,) = (
        group for case in plain["cases"] if case["id"] == "dp2-attn"
        for group in case["state"] if group["group"] == "weights"
    )  # fmt: skip
    assert weights == {
        "group": "weights", "num_tensors": 4, "num_pairs": 42, "differing_pairs": 13,
        "missing_pairs": 0, "most_tensors": 1, "first": [7, 1],
    }  # fmt: skip


def test_markdown_cannot_be_broken_out_of(built: dict[str, str]) -> None:
    """Rows keep their cells, tags and mentions are inert, fences outlast their text."""
    cases, costs = built["markdown"].split("<summary>What was compared")
    for text, num_rows, num_cells in ((cases, 15, 4), (costs, 14, 8)):
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len(rows) == num_rows
        for row in rows:
            assert len(re.findall(r"(?<!\\)\|", row)) == num_cells + 1
    lines = built["markdown"].splitlines()
    fence = ""
    for line in lines:
        if match := re.match(r"`{3,}", line):
            if not fence:
                fence = match[0]
            elif line == fence:
                fence = ""
        elif not fence:
            assert "<script" not in line
            assert "@everyone" not in line
            assert "https://example" not in line
    assert fence == ""
    assert escape("a|b<i>@x") == r"a\|b&lt;i&gt;&#64;x"
    assert fenced("a\n````\nb").startswith("`````text\n")


def test_markdown_fits_a_comment(writer: Any, make_verdict: Callable[..., Verdict]) -> None:
    """Hundreds of wordy failures stay within the limit, and what was left out is counted."""
    for number in range(200):
        writer.add(f"c{number}", 1, "attn", skip_reason="later")
    folder = writer.write()
    with RunFolder.open(folder) as opened:
        for number in range(200):
            verdict = make_verdict(f"c{number}", message="漢|" * 900)
            opened.save_verdict(verdict, opened.cases[number])
    text = markdown.render(summarise(folder)).encode()
    assert len(text) <= MAX_BYTES
    listed = text.count(b"error | c") + text.count(b"failed | c")
    assert f"*{200 - listed} more cases are in the page: {200 - listed} failed.*".encode() in text
    in_full = text.count(b"<details>")
    assert f"*{200 - in_full} more failing cases in full are in the page.*".encode() in text
    assert b"<details>" in text
    assert text.count(b"<details>") == text.count(b"</details>")


def test_unwritable_place_is_one_line(everything: Path, tmp_path: Path) -> None:
    """A report folder that cannot be made is an infrastructure error, not a traceback."""
    copy = tmp_path / "run"
    shutil.copytree(everything, copy, ignore=shutil.ignore_patterns("report"))
    (copy / "report").write_text("in the way")
    with pytest.raises(Infrastructure, match="report"):
        build(copy)

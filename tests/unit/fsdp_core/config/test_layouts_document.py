"""fsdp_core/LAYOUTS.md has the rules as they are.

After a change of rules, from the root of the tree:

    python -m tests.unit.fsdp_core.config.test_layouts_document
"""

import re
from pathlib import Path

from fsdp_core.config import BEGINS_AT, DEGREES, RULES, SCOPES

PATH = Path(__file__).parents[4] / "fsdp_core" / "LAYOUTS.md"
BETWEEN = re.compile(r"(<!-- rules: .*? -->\n).*?(<!-- end of rules -->)", re.DOTALL)


def table() -> str:
    rows = [
        f"| {about} | `{rule.name}` | {rule.message} |"
        for about, rules in RULES.items()
        if about != "model"
        for rule in rules
    ]
    return "\n".join(["| about | rule | what it asks |", "| --- | --- | --- |", *rows]) + "\n"


def with_table(text: str) -> str:
    found, number = BETWEEN.subn(lambda m: m.group(1) + table() + m.group(2), text)
    assert number == 1, "Expected one pair of marks."
    return found


def test_the_document_has_the_rules() -> None:
    """Names and messages, in the order in which they are checked; see the module for a change."""
    text = PATH.read_text()
    assert with_table(text) == text


def test_the_document_has_every_axis_and_scope() -> None:
    """No degree and no graph scope is left out."""
    text = PATH.read_text()
    for name in (*DEGREES, "edp", "dynamic_cp", "pp_chunks"):
        assert re.search(rf"\b{name}\b", text), name
    for scope in SCOPES:
        assert f"| `{scope}` |" in text, scope


if __name__ == "__main__":
    PATH.write_text(with_table(PATH.read_text()))


def test_every_partial_scope_begins_somewhere() -> None:
    """At a layer or a part of it; but for the one that goes on where another ends."""
    assert set(BEGINS_AT) == set(SCOPES) - {"full_iteration", "moe_preprocess"}

"""What tables and ids call a choice."""

from pathlib import Path

from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario

TEXT = """\
name: a
why: b
axes: {graph: [eager, [attn]], stress: [none, [jitter, poison]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}}
"""


def test_nothing_compiled_is_called_so(tmp_path: Path) -> None:
    """As no stress is."""
    path = tmp_path / "a.yaml"
    stress, compiled = "stress: [none, [jitter, poison]]", "compile: [none, [mlp, attn]]"
    path.write_text(TEXT.replace(stress, compiled))
    found = {case.id: case.labels["compile"] for case in expand(load_scenario(path), "cpu")}
    assert found == {"no_compile-attn": "none", "compile_attn+mlp-attn": "attn+mlp"}


def test_no_stress_is_called_so(tmp_path: Path) -> None:
    """In labels and ids, not by the word for no graph."""
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    found = {case.id: case.labels["stress"] for case in expand(load_scenario(path), "cpu")}
    assert found == {"no_stress-attn": "none", "stress_jitter+poison-attn": "jitter+poison"}

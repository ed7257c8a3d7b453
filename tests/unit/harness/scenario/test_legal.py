"""Contracts of harness.scenario.legal: an axis of layouts that the rules list."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.config import SCOPES, ParallelConfig, model_from_preset
from fsdp_core.layouts import legal_layouts
from harness.errors import ScenarioError
from harness.records import CaseSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario


def write(folder: Path, **sections: Any) -> Path:
    """A scenario given as plain values (JSON is YAML)."""
    plain = {
        "name": "case", "why": "A sentence.", "base": {"steps": 4}, "checks": {"loss": {}},
        "axes": {"parallel": {"legal_layouts": 8}, "graph": ["eager", ["attn"]]},
        "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
    } | sections  # fmt: skip
    path = folder / "case.yaml"
    path.write_text(json.dumps(plain))
    return path


def cases(folder: Path, options: Overrides | None = None, **sections: Any) -> tuple[CaseSpec, ...]:
    """The cases of `write`."""
    return expand(load_scenario(write(folder, **sections), overrides=options or Overrides()), "cpu")


def layouts(found: tuple[CaseSpec, ...]) -> list[ParallelConfig]:
    """The layout of each case."""
    plain = [case.candidate.config["parallel"] for case in found]
    return [ParallelConfig(**p | {"dynamic_cp": tuple(p["dynamic_cp"])}) for p in plain]


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny"])
def test_every_legal_layout_is_a_value(preset: str, tmp_path: Path) -> None:
    """The axis is the list of the rules for the model of base, in its order, each with an id."""
    found = cases(tmp_path, base={"steps": 4, "model": preset})
    assert layouts(found) == list(legal_layouts(8, model_from_preset(preset)))
    assert len({case.id for case in found}) == len(found)
    assert {case.candidate.world_size for case in found} == {8}


def test_ids_name_what_is_cut(tmp_path: Path) -> None:
    """A value names the degrees above 1 and nothing else."""
    ids = {case.id for case in cases(tmp_path, base={"steps": 4, "model": "moe_tiny"})}
    assert {"dp8-attn", "dp8_ep2_etp2-attn", "dp2_tp2_cp2_ep8_sequence_parallel-attn"} <= ids
    (alone,) = cases(
        tmp_path, axes={"parallel": {"legal_layouts": 1}, "graph": ["eager", ["attn"]]}
    )
    assert (alone.id, alone.candidate.world_size) == ("dp1-attn", 1)


def test_overrides_of_the_model_count(tmp_path: Path) -> None:
    """Legal is what is legal for the model as it is, `--set` over the file included."""
    wide = Overrides(sets=("model={kv_heads: 4}",))
    assert max(p.tp for p in layouts(cases(tmp_path))) == 2
    assert max(p.tp for p in layouts(cases(tmp_path, wide))) == 4


def test_keys_beside_it_restrict_it(tmp_path: Path) -> None:
    """A field with a value, or a list of them, has no other; the rest stays free."""
    axis = {"legal_layouts": 8, "tp": [1, 2], "dp_outer": 1, "sequence_parallel": False}
    found = layouts(cases(tmp_path, axes={"parallel": axis, "graph": ["eager", ["attn"]]}))
    whole = legal_layouts(8, model_from_preset("dense_tiny"))
    assert found == [p for p in whole if p.dp_outer == 1 and not p.sequence_parallel]


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ([1, 2], {(1, 2)}),
        ([[1, 2], [1, 2, 4, 8]], {(1, 2), (1, 2, 4, 8)}),
        ([[], [2]], {(), (2,)}),
        ([], {()}),
    ],
)
def test_dynamic_sizes_are_one_list_or_several(
    written: list[Any], sizes: set[tuple[int, ...]], tmp_path: Path
) -> None:
    """`dynamic_cp` is a list as it stands; a list of lists gives each of them."""
    axis = {"legal_layouts": 8, "tp": 1, "pp": 1, "dp_outer": 1, "dynamic_cp": written}
    found = cases(tmp_path, axes={"parallel": axis, "graph": ["eager", ["attn"]]})
    assert {layout.dynamic_cp for layout in layouts(found)} == sizes
    if [] in written:
        assert {"dp8-attn", "dp8_dynamic_cp_2-attn"} <= {case.id for case in found}


def test_microbatches_of_base_decide_interleaving(tmp_path: Path) -> None:
    """Two chunks a rank need rounds of pp microbatches: with 2 of them pp is 2."""
    axes = {"parallel": {"legal_layouts": 8, "pp_chunks": [1, 2]}, "graph": ["eager", ["attn"]]}
    base = {"steps": 4, "model": {"layers": 8}, "microbatches": 2}
    found = layouts(cases(tmp_path, axes=axes, base=base))
    assert {p.pp for p in found if p.pp_chunks == 2} == {2}
    assert {p.pp for p in found if p.pp_chunks == 1} == {1, 2, 4, 8}


def test_the_command_line_can_ask_for_it(tmp_path: Path) -> None:
    """`--axis` puts the list in place of an axis of the file."""
    option = Overrides(axes=("parallel={legal_layouts: 4, dp_outer: 1, cp: 1}",))
    axes = {"parallel": [{"dp": 2}], "graph": ["eager", ["attn"]]}
    ids = [case.id for case in cases(tmp_path, option, axes=axes)]
    assert ids == [
        "dp4-attn", "dp2_tp2-attn", "dp2_tp2_sequence_parallel-attn", "dp2_pp2-attn",
        "tp2_pp2-attn", "tp2_pp2_sequence_parallel-attn",
    ]  # fmt: skip


def test_layouts_can_be_what_is_compared(tmp_path: Path) -> None:
    """Every other layout against one of them, which is named as the ids name it."""
    axes = {"parallel": {"legal_layouts": 4}}
    compare = {"axis": "parallel", "reference": {"dp": 4}, "expect": "bitwise"}
    found = cases(tmp_path, axes=axes, compare=compare)
    assert {case.reference.config["parallel"]["dp"] for case in found} == {4}
    assert ParallelConfig(dp=4) not in layouts(found)
    assert len(found) == sum(1 for _ in legal_layouts(4, model_from_preset("dense_tiny"))) - 1


def test_exclude_and_include_name_its_values(tmp_path: Path) -> None:
    """Values of the list are excluded and extended like values that are written."""
    found = cases(
        tmp_path,
        exclude=[{"parallel": {"dp": 8}}],
        include=[{"parallel": {"dp": 4, "tp": 2}, "seed": 7}],
    )
    assert "dp8-attn" not in {case.id for case in found}
    assert [case.id for case in found if case.candidate.config["seed"] == 7] == [
        "dp4_tp2-seed7-attn"
    ]


def test_too_many_layouts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is cut short before it fills the memory, and the limit is said."""
    monkeypatch.setattr("harness.scenario.settings.MAX_LAYOUTS", 34)
    assert len(cases(tmp_path)) == 34
    monkeypatch.setattr("harness.scenario.settings.MAX_LAYOUTS", 33)
    with pytest.raises(ScenarioError, match=r"axes\.parallel: expected at most 33 layouts"):
        cases(tmp_path)


def test_a_bad_model_is_reported_where_it_is_written(tmp_path: Path) -> None:
    """The model is needed before the axes can be read: its own error comes first."""
    with pytest.raises(
        ScenarioError, match=r"model\.heads: expected a divisor of hidden=64, got 3"
    ):
        cases(tmp_path, base={"steps": 4, "model": {"heads": 3}})


NIGHTLY = Path(__file__).parents[4] / "scenarios" / "nightly"
ABOUT: dict[str, tuple[str, set[str]]] = {
    # file: (model, scopes that none of its layouts can have)
    "layouts_dense": ("qwen3_8b", {"moe_router", "moe_preprocess", "moe"}),
    "layouts_dense_llama3": ("llama3_8b", {"moe_router", "moe_preprocess", "moe"}),
    "layouts_dynamic_cp": ("moonlight_16b_a3b", {"full_iteration"}),
    "layouts_mla_moe": ("moonlight_16b_a3b", set()),
    "layouts_moe": ("qwen3_30b_a3b", {"mlp"}),
    "layouts_moe_dropless": ("qwen3_30b_a3b", {"mlp", "moe", "layer", "full_iteration"}),
}


def test_sixty_four_ranks_and_all_scopes_list_at_once_without_torch() -> None:
    """A laptop lists the nightly files, 95,284 cases of 64 ranks, and torch is not imported."""
    code = (
        "import sys\n"
        "from harness.cli import main\n"
        "from tests.pace import in_paces\n"
        "codes = []\n"
        "work = lambda: codes.append(main(['list', '--count', *sys.argv[1:]]))\n"
        "paces = in_paces(work, times=1)\n"
        "print(codes[0], paces, 'torch' in sys.modules)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[4])}
    paths = [str(NIGHTLY / f"{name}.yaml") for name in ABOUT]
    command = [sys.executable, "-c", code, *paths]
    said = subprocess.check_output(command, text=True, env=environment).splitlines()
    exit_code, paces, torch = said[-1].split()
    assert (exit_code, torch) == ("0", "False")
    numbers = [1525, 1525, 8142, 37_400, 31_128, 15_564]
    rows = [line.split() for line in said[:-2]]
    assert rows == [[f"{n:,}", p] for p, n in zip(paths, numbers, strict=True)]
    assert said[-2].startswith(f"{sum(numbers)} cases in 6 files")
    assert float(paces) < 20


@pytest.mark.parametrize("name", ABOUT)
def test_nightly_files_have_every_layout_and_scope(name: str) -> None:
    """A nightly file is all legal layouts of its model times each scope that the model can have."""
    (path,) = NIGHTLY.glob(f"{name}.yaml")
    dynamic = ", cp: 1, dynamic_cp: [1, 2]" if "dynamic" in name else ""
    option = Overrides(axes=(f"parallel={{legal_layouts: 8{dynamic}}}",))
    found = expand(load_scenario(path, overrides=option), "cpu")
    preset, impossible = ABOUT[name]
    model = found[0].candidate.config["model"]
    assert model["preset"] == preset
    scopes = {scope for case in found for scope in case.candidate.config["graph"]}
    assert scopes == set(SCOPES) - impossible
    if not dynamic:
        own = model_from_preset(preset)
        assert dict.fromkeys(layouts(found)) == dict.fromkeys(legal_layouts(8, own))


def test_all_nightly_files_of_layouts_are_known() -> None:
    """A new file of 64 ranks is counted too; small ones, which are run, are small."""
    small = {path.stem for path in NIGHTLY.glob("layouts_of_*.yaml")}
    assert {path.stem for path in NIGHTLY.glob("layouts_*.yaml")} == small | ABOUT.keys()
    assert small == {
        "layouts_of_4_moe",
        "layouts_of_4_te",
        "layouts_of_8_dense",
        "layouts_of_8_mla_moe",
    }
    for name in small:
        cases = expand(load_scenario(NIGHTLY / f"{name}.yaml"), "cpu")
        assert {case.candidate.world_size for case in cases} <= {4, 8}
        assert len(cases) < 200

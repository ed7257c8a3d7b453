"""Who may import what: layers, torch-free rooms, heavy libraries, declared dependencies."""

import re
import subprocess
import sys

import pytest

from tests.arch.tree import PACKAGES, ROOT, Import, code_files, imports, module_name, settings

TORCH_FREE = (
    "fsdp_core.config",
    "fsdp_core.parallel.pipeline_schedule",
)
REPORT_LIBRARIES = {"matplotlib"}
OPTIONAL = {"triton", "transformer_engine", "megatron_fsdp"}  # used where installed, never required
PLUGIN_ROOM = "harness.pytest_plugin"  # what pytest loads, so nobody else needs pytest
PLUGIN_USES = {"pytest"}  # of whoever runs it under it
pytestmark = pytest.mark.xdist_group("imports")  # one worker reads all files, once
DISTRIBUTION_OF = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}


def all_imports() -> list[Import]:
    """Every import of the three packages."""
    return [entry for path in code_files(*PACKAGES) for entry in imports(path)]


def may_use_torch(module: str) -> bool:
    """The engine but its configuration, the worker, and what records other programs."""
    inside = module.startswith(("fsdp_core.", "harness.worker.", "harness.recorder."))
    free = any(module == name or module.startswith(f"{name}.") for name in TORCH_FREE)
    return inside and not free


def test_torch_is_imported_only_where_it_may_be() -> None:
    """torch belongs to the engine and the worker, not even inside a function elsewhere."""
    wrong = [e for e in all_imports() if e.top == "torch" and not may_use_torch(e.module)]
    assert wrong == []


def test_report_libraries_stay_in_reports() -> None:
    """matplotlib costs a second to import: only reports pay it."""
    wrong = [
        entry
        for entry in all_imports()
        if entry.top in REPORT_LIBRARIES and not entry.module.startswith("reports.")
    ]
    assert wrong == []


def test_only_the_command_line_imports_reports_and_only_when_asked() -> None:
    """`harness list` must not load plotting code."""
    users = [e for e in all_imports() if e.top == "reports" and not e.module.startswith("reports")]
    assert users, "somebody has to ask for reports"
    assert [e for e in users if e.module != "harness.cli.run" or not e.nested] == []


def test_optional_packages_are_imported_late() -> None:
    """transformer-engine and Triton are no requirement: no module but the kernel's needs them."""
    early = {e.module for e in all_imports() if e.top in OPTIONAL and not e.nested}
    assert early == {"fsdp_core.graph.digest_triton"}
    users = [e for e in all_imports() if e.name.startswith("fsdp_core.graph.digest_triton")]
    assert users
    assert all(e.nested for e in users)


def test_only_its_plugin_imports_pytest() -> None:
    """pytest is no requirement: nothing outside of the plugin's room needs it."""
    users = {e.module.rpartition(".")[0] for e in all_imports() if e.top == "pytest"}
    assert users == {PLUGIN_ROOM}
    outside = [e for e in all_imports() if e.name.startswith(PLUGIN_ROOM)]
    assert [e for e in outside if not e.module.startswith(PLUGIN_ROOM)] == []


def test_the_pytest_plugin_costs_nothing_where_it_is_not_asked_for() -> None:
    """Every pytest of an environment imports it: pytest and pure data, the rest when enabled."""
    (room,) = [p for p in code_files("harness") if module_name(p) == f"{PLUGIN_ROOM}.plugin"]
    assert {e.top for e in imports(room) if not e.nested} == {"pytest"}
    registered = settings()["project"]["entry-points"]["pytest11"]
    assert list(registered.values()) == [f"{PLUGIN_ROOM}.plugin"]


def test_torch_free_modules_load_no_torch() -> None:
    """Importing all torch-free modules, in a process of its own, loads no torch and no plotting."""
    modules = [module_name(path) for path in code_files("harness")]
    with_torch = ("harness.worker", "harness.recorder.")
    modules = [m for m in modules if not m.startswith(with_torch) and "__main__" not in m]
    modules += ["harness.recorder.session"]  # it waits for the program's own import of torch
    modules += TORCH_FREE
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & { ({'torch', 'reports'} | REPORT_LIBRARIES)!r}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_dependencies_are_what_is_imported() -> None:
    """Each third-party import is declared, and nothing is declared that nobody imports."""
    third_party = {e.top for e in all_imports()} - set(sys.stdlib_module_names) - set(PACKAGES)
    used = {DISTRIBUTION_OF.get(name, name) for name in third_party - OPTIONAL - PLUGIN_USES}
    declared = {
        re.match(r"[\w-]+", text).group()  # type: ignore[union-attr]
        for text in settings()["project"]["dependencies"]
    }
    assert used == declared

"""What would leave tests out, or alone, without a word: folders, groups, limits in seconds."""

from fnmatch import fnmatch

import pytest
from hypothesis import HealthCheck, settings

from tests.arch.tree import ROOT


def test_no_folder_of_tests_is_passed_by(pytestconfig: pytest.Config) -> None:
    """pytest goes into every folder that holds tests, whatever the folder is called."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    patterns = pytestconfig.getini("norecursedirs")
    passed_by = {
        str(folder)
        for folder in folders
        if any(fnmatch(part, pattern) for part in folder.parts for pattern in patterns)
    }
    assert passed_by == set()
    assert len(folders) > 20


@pytest.mark.xdist_group("arch")
def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """Where tests are shared out by groups, a test says its group in its id, as xdist needs it."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@arch")


def test_no_example_has_a_limit_in_seconds() -> None:
    """Hypothesis asks nothing of the speed of the machine."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check

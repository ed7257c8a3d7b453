"""Which code ran: the commit of the program under test, and a hash of what lies on top of it.

    3f1c0a9...            as committed
    3f1c0a9...+5d0e12ab   with changes; equal hashes mean equal changes
    ""                    not in a repository, or git does not say

Only the packages that a run executes count: a changed README is the same code.
"""

import hashlib
import os
import subprocess
from pathlib import Path

PACKAGES = ("fsdp_core", "harness")
TIMEOUT_S = 30.0
HASH_CHARS = 8
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


def describe(root: Path | None = None) -> str:
    """The code under `root`, by default where this package lies; never an exception."""
    root = root or Path(__file__).parents[1]
    folders = [name for name in PACKAGES if (root / name).is_dir()]
    try:
        commit = git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        # A package in site-packages may lie inside somebody's repository without being part of it.
        if not folders or not git(root, "ls-files", "--", *folders):
            return ""
        changed = git(
            root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--", *folders
        )
        added = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *folders)
        if not changed and not added:
            return commit
        digest = hashlib.sha256(changed)
        for name in sorted(filter(None, added.split(b"\0"))):
            digest.update(name + b"\0" + (root / name.decode()).read_bytes())
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return f"{commit}+{digest.hexdigest()[:HASH_CHARS]}"


def git(root: Path, *arguments: str) -> bytes:
    """What git prints about the repository at `root`.

    Raises:
        OSError, subprocess.SubprocessError: there is no git, or it says no.
    """
    # --no-optional-locks: looking must not get in the way of whoever works in the repository.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    # Within a hook of git, variables name the repository that the hook is of, whatever -C says.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    return subprocess.run(
        command, check=True, capture_output=True, timeout=TIMEOUT_S, env=environment
    ).stdout

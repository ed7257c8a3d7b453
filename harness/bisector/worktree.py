"""A second checkout of a repository, in a temporary folder, that goes away with its maker.

The user's checkout, its index and a bisection that the user has begun stay as they are: a worktree
has its own `HEAD`, and its own `refs/bisect`.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.errors import Infrastructure, UsageError, shown
from harness.store.files import FolderLock

TIMEOUT_S = 120.0
PREFIX = "bisect-commits-"
GIVEN_UP_S = 60.0
"""Between the making of a folder and that of the worktree in it are milliseconds."""
OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


class Git:
    """git in one folder, with its errors in one line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, legal: Sequence[int] = (0,)) -> str:
        """What git prints.

        Args:
            arguments: after `git -C FOLDER`.
            legal: exit codes that are no error.

        Raises:
            UsageError: git is not there, says no, or does not end.
        """
        # No hooks: those of the user's checkout are not for this one.
        command = ["git", "-C", str(self.folder), "-c", f"core.hooksPath={os.devnull}", *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                env=environment(), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except FileNotFoundError:
            raise UsageError("searching commits takes git, which is not on PATH") from None
        except subprocess.TimeoutExpired:
            raise UsageError(f"git {arguments[0]} did not end in {TIMEOUT_S:g} s") from None
        if done.returncode not in legal:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
            # The first line says what is wrong; what follows is advice.
            raise UsageError(f"git {arguments[0]} in {self.folder}: {said[0]}")
        return done.stdout.rstrip("\n")

    def resolve(self, name: str) -> str:
        """The full hash of a commit.

        Raises:
            UsageError: there is no such commit.
        """
        try:
            return self(
                "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
            )
        except UsageError:
            raise UsageError(
                f"--commits: expected a commit of {self.folder}, got {shown(name)}"
            ) from None


def environment() -> dict[str, str]:
    """Of git, whatever hook or language we run in."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true"}


def top_level(folder: Path) -> Path:
    """The root of the repository that a folder is in.

    Raises:
        UsageError: in none.
    """
    return Path(Git(folder)("rev-parse", "--show-toplevel"))


@contextmanager
def temporary_worktree(root: Path, commit: str) -> Iterator["Worktree"]:
    """A detached worktree of the repository at `root`, removed whatever happens.

    Raises:
        UsageError: git says no.
    """
    git = Git(root)
    _remove_abandoned(git)
    holder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = FolderLock(holder / "lock")
    try:
        lock.acquire()
        place = holder / "worktree"
        git("worktree", "add", "--quiet", "--detach", str(place), commit)
        yield Worktree(place)
    finally:
        _remove(git, holder)
        lock.release()


def _remove(git: Git, holder: Path) -> None:
    # By hand: git refuses to remove what holds submodules, or what is half made.
    shutil.rmtree(holder, ignore_errors=True)
    with suppress(UsageError):
        git("worktree", "prune")


def _remove_abandoned(git: Git) -> None:
    """Worktrees whose makers were killed; the lock of one that works is held."""
    lines = git("worktree", "list", "--porcelain").splitlines()
    trees = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    holders = [tree.parent for tree in trees if tree.parent.name.startswith(PREFIX)]
    for holder in dict.fromkeys((*holders, *_unused())):
        lock = FolderLock(holder / "lock")
        with suppress(UsageError, Infrastructure):
            if holder.is_dir():
                lock.acquire()
            _remove(git, holder)
            lock.release()


def _unused() -> Iterator[Path]:
    """Folders whose makers were killed before git knew of them; not of one that is at it now."""
    for holder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            now_unix_s = time.time()
            is_old = now_unix_s - holder.stat().st_mtime > GIVEN_UP_S
            if is_old and not (holder / "worktree").exists():
                yield holder


class Worktree:
    """A checkout that may be changed at will."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git = Git(folder)

    def check_out(self, commit: str) -> None:
        """The files of a commit, and no others: no compiled module of another commit stays behind.

        Raises:
            UsageError: git says no.
        """
        self.git("checkout", "--quiet", "--force", "--detach", commit)
        self.git("clean", "-ffdxq")

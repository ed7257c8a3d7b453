"""A range of commits, one of them, and what a run is given of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.bisector.questions import Reply
from harness.bisector.worktree import Git, top_level
from harness.codec import Json
from harness.errors import UsageError, shown

HASH_CHARS = 10
LEFT_OUT, PUT_IN = "left_out", "put_in"
"""Of a reply's detail: settings of a case that the commit did not know, and that it alone knew."""


@dataclass(frozen=True)
class CommitRange:
    """Where to search.

    Attributes:
        root: anywhere in the repository; nothing of it is changed.
        commits: `good..bad`.
        paths: all that decides an answer; empty for every file of a commit.
    """

    root: Path
    commits: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One try of one commit.

    Attributes:
        folder: worktree with the commit's files.
        repository: the user's checkout, of which nothing must come into the run.
        commit: its full hash.
        attempt: tries of it before this one.
    """

    folder: Path
    repository: Path
    commit: str
    attempt: int


Run = Callable[[Checkout], Reply]
"""Makes one run; its reply has an answer."""


@dataclass(frozen=True, kw_only=True)
class Commit(Json):
    """A commit as people name it."""

    hash: str
    subject: str

    def __str__(self) -> str:
        """Short hash and subject."""
        return f"{self.hash[:HASH_CHARS]} {self.subject}"


def parse_range(text: str) -> tuple[str, str]:
    """Good and bad of `good..bad`; no bad is HEAD.

    Raises:
        UsageError: it is no such range.
    """
    good, dots, bad = text.partition("..")
    if not good or not dots or bad.startswith(".") or good.startswith("-"):
        raise UsageError(f"--commits: expected GOOD..BAD, got {shown(text)}")
    return good, bad or "HEAD"


def resolve_range(where: CommitRange) -> tuple[Path, str, str]:
    """The repository's root, and the full hashes of good and bad.

    Raises:
        UsageError: no repository, no range, no such commit, or bad does not descend from good.
    """
    top = top_level(where.root)
    good, bad = (Git(top).resolve(end) for end in parse_range(where.commits))
    if good == bad or Git(top)("merge-base", good, bad, legal=(0, 1)) != good:
        raise UsageError(
            "--commits: expected a good commit that the bad one descends from, got "
            f"{shown(where.commits)}"
        )
    return top, good, bad

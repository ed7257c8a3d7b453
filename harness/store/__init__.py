"""The run folder, which is trusted once its checksums fit: written, read once, verified, merged."""

from harness.store.folder import *  # noqa: F403 - what it lists

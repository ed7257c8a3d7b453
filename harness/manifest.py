"""What of a manifest is kept: variables from a list, and texts for people without secrets."""

import re
from collections.abc import Mapping
from typing import Any

from harness.codec import Json
from harness.masking import Masker, is_telling

ENVIRONMENT_KEY = "variables"
"""Key of the manifest under which environment variables are stored, filtered."""

_FOR_PEOPLE = ("why", "notes", "command")
"""Keys of texts that only people read: nothing is made from them again."""
_STORED_VARIABLE = re.compile(
    r"CUDA_VISIBLE_DEVICES|NCCL_\w+|TORCH_\w+|NVTE_\w+|OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG"
    r"|PYTHONHASHSEED"
)


def stored_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may be stored: those known to change results, no secrets."""
    masker = Masker(environ)
    return {
        name: masker.text(value)
        for name, value in sorted(environ.items())
        if _STORED_VARIABLE.fullmatch(name) and not is_telling(name)
    }


def without_secrets(manifest: Mapping[str, Any], masker: Masker) -> dict[str, Any]:
    """A manifest as it is stored.

    Args:
        manifest: plain values, or records.
        masker: knows the secrets of this process.
    """
    return {key: _kept(key, value, masker) for key, value in manifest.items()}


def _kept(key: str, value: Any, masker: Masker) -> Any:
    if isinstance(value, Json):
        return value.to_json()
    if isinstance(value, Mapping):
        filtered = key == ENVIRONMENT_KEY
        return stored_environment(value) if filtered else without_secrets(value, masker)
    if isinstance(value, list):
        return [_kept(key, entry, masker) for entry in value]
    return masker.text(value) if isinstance(value, str) and key in _FOR_PEOPLE else value

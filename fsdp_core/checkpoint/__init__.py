"""Checkpoints of model and optimizer, bit for bit, into any layout. `save_load` says how."""

from fsdp_core.checkpoint.files import CheckpointError
from fsdp_core.checkpoint.save_load import Loaded, PendingSave, latest, load, save, save_async

__all__ = ["CheckpointError", "Loaded", "PendingSave", "latest", "load", "save", "save_async"]

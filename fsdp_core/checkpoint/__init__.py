"""Checkpoints of model and optimizer, bit for bit, into any layout. `save_load` says how."""

from fsdp_core.checkpoint.files import CheckpointError
from fsdp_core.checkpoint.save_load import Loaded, latest, load, save

__all__ = ["CheckpointError", "Loaded", "latest", "load", "save"]

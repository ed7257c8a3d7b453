"""Every switch that decides whether two runs of one program give the same bits, in one place.

`prepare_environment` must run before CUDA starts (cuBLAS reads its workspace setting once);
`make_deterministic` after torch is imported and before the model is built.
"""

import os
import random

import numpy as np
import torch

CUBLAS_WORKSPACE_CONFIG = ":4096:8"


def prepare_environment() -> None:
    """Set the variables that libraries read once; a value that the user set is kept."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE_CONFIG)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def make_deterministic(seed: int) -> None:
    """Ask for deterministic kernels and seed every default generator with `seed`."""
    torch.use_deterministic_algorithms(True)
    # Filling new memory would hide what a graph leaves in it and costs a kernel an allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and every torch generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

"""The run folder, which is trusted once its checksums fit: written, read once, verified, merged."""

from harness.store.folder import (
    CASE_FILE,
    CASES_FILE,
    LEGS,
    MANIFEST_FILE,
    OUTCOME_FILE,
    OWN_FOLDERS,
    SEARCH_FILE,
    SHARDS_FILE,
    SPEC_FILE,
    VERDICT_FILE,
    CaseRuns,
    RunFolder,
    begin_run,
    find_verdict,
    kept_folder,
    load_case,
    load_run_folder,
    num_kept,
    read_outcome,
    read_verdict,
    save_outcome,
    sealed_outcome,
    set_aside,
)

__all__ = [
    "CASES_FILE", "CASE_FILE", "LEGS", "MANIFEST_FILE", "OUTCOME_FILE", "OWN_FOLDERS",
    "SEARCH_FILE", "SHARDS_FILE", "SPEC_FILE", "VERDICT_FILE", "CaseRuns", "RunFolder", "begin_run",
    "find_verdict", "kept_folder", "load_case", "load_run_folder", "num_kept", "read_outcome",
    "read_verdict", "save_outcome", "sealed_outcome", "set_aside",
]  # fmt: skip

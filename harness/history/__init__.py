"""The history: what ran, on what, with which answer; what was recorded is never changed."""

"""Step time and memory of graph scopes beside eager: `python -m benchmarks.scopes`."""

"""From a red cell to its answer: `python -m benchmarks.red_to_answer`."""

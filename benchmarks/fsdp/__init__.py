"""Step time and memory of sharded training beside its peers: `python -m benchmarks.fsdp --help`.

__main__  the command          launch   a measurement in fresh processes, and what became of it
workloads models and data      measure  one rank of a measurement
engines   who shards them      report   tables and JSON
                               trace    what a profiler's trace says about overlap
"""

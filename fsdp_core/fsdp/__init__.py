"""Fully sharded data parallelism over flat, row-aligned buffers."""

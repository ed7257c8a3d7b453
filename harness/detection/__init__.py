"""The detection matrix: every planted fault and many clean cells, through the harness itself."""

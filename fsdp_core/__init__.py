"""A compact FSDP2 and CUDA-graph engine for training steps that can be compared bit for bit."""

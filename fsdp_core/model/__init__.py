"""The model: a dense pre-norm decoder on torch or on TransformerEngine modules."""

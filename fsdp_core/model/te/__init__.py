"""The decoder's parts by TransformerEngine, chosen in `fsdp_core.model.decoder`."""

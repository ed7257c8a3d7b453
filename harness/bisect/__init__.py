"""From a failed case to its cause: place, tensor, rank, element, configuration, commit."""

"""From a red cell to its cause: place, tensor, rank, element, configuration, commit."""

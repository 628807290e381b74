"""A second, slow implementation of PTX, and random programs that both must execute alike."""

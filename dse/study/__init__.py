"""A study: planned, searched, recorded and summed up."""

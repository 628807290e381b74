"""Parts of the long campaigns of tests: broken input, faults, clusters, stale results."""

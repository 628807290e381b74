"""Models held against measured tables and published values; `benchmarks.validity` and others are made of them."""

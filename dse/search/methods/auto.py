"""The most efficient method in benchmarks on spaces known point by point: see docs/search.md."""

from dse.search.methods.portfolio import make

METHOD = make

"""The method that finds most with the fewest points on spaces that are known point by point: see docs/search.md."""

from dse.search.methods.portfolio import make

METHOD = make

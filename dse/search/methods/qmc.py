"""Quasi-Monte Carlo: Sobol points, evenly spread."""

from dse.search.sampled import sampler

METHOD = sampler("QMCSampler", whole=True, scramble=True, warn_independent_sampling=False)

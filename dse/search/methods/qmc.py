"""Quasi-Monte Carlo: Sobol points, evenly spread."""

from dse.search.sampled import sampler

METHOD = sampler("QMCSampler", all_knobs=True, scramble=True, warn_independent_sampling=False)

"""NSGA-II (Deb et al. 2002), as Optuna has it."""

from dse.search.sampled import sampler

METHOD = sampler("NSGAIISampler")

"""NSGA-III (Deb and Jain 2014), as Optuna has it, for three and more objectives."""

from dse.search.sampled import sampler

METHOD = sampler("NSGAIIISampler")

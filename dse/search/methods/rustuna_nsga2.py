"""NSGA-II of rustuna, by Optuna's makers, in Rust."""

from dse.search.sampled import sampler

METHOD = sampler("NSGAIISampler", library="rustuna")

"""Independent even draws."""

from dse.search.sampled import sampler

METHOD = sampler("RandomSampler")

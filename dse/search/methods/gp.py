"""Gaussian process (needs torch): slow, for simulators that take far longer."""

from dse.search.sampled import sampler

METHOD = sampler("GPSampler", needs="torch")

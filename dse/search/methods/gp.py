"""Gaussian process (needs torch): some seconds a point, for simulators that take far longer."""

from dse.search.sampled import sampler

METHOD = sampler("GPSampler", needs="torch")

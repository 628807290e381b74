"""Tree-structured Parzen estimator of rustuna, in Rust."""

from dse.search.sampled import sampler

METHOD = sampler("TPESampler", library="rustuna")

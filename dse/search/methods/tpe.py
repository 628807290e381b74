"""Tree-structured Parzen estimator (Bergstra et al. 2011), multivariate and grouped: better on several objectives."""

from dse.search.sampled import sampler

METHOD = sampler("TPESampler", multivariate=True, group=True, constant_liar=True)

"""External programs as simulators, run and supervised point by point."""

BACKENDS = {"external": "simulators.external.backend:ExternalBackend"}

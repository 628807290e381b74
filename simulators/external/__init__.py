"""Programs of the user as simulators, run point by point."""

BACKENDS = {"external": "simulators.external.backend:ExternalBackend"}

"""Simulators of the user: any program, run and supervised point by point."""

BACKENDS = {"external": "simulators.external.backend:ExternalBackend"}

"""Programs and Python functions of the user as simulators, run point by point."""

BACKENDS = {
    "external": "simulators.external.backend:ExternalBackend",
    "function": "simulators.external.function:FunctionBackend",
}

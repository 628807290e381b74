"""Evaluation of designs by a backend, in this process or in worker processes, or by whom a plug-in offers."""

EVALUATORS = {"local": "dse.evaluation.evaluators:LOCAL"}
CHECKS = {"machine": "dse.evaluation.workers:check_machine"}

"""What a plan of a step may choose, and what is known of its answer.

choices: values that a plan tries, and those without overlap. layouts: degrees of parallelism for the GPUs at hand.
given_plan: a plan that is judged as it is. scenarios: models, machines and modes of a question. drawn_errors: factors
on the times of parts, from which intervals come.
"""

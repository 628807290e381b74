"""Serving: deployments of models that batch continuously, under traffic: what users see, and what it costs.

A design is a machine, a model in its formats, how an engine splits it, serving software, engines and traffic. The times
of steps are those of `simulators.steps`, tabled once (`step_times`); a compiled loop (`compiled`), equal to a reference
in SimPy (`reference`), serves the traffic.
"""

from dse.plugins import Command

GROUPS = {"server": "Serving software"}
BACKENDS = {"serving": "dse_serving.backend:ServingBackend"}
WORDS = {
    "goodput_per_s": "requests within the limits",
    "attained": "share of requests within the limits",
    "tokens_per_s_per_gpu": "tokens/s a GPU",
    "tokens_per_s_per_user": "tokens/s a user",
    "tokens_per_usd": "tokens a dollar",
    "ttft_s": "time to the first token",
    "tpot_s": "time of a later token",
}
"""Metric -> words for it."""
COMMANDS = {
    "serve-plan": Command(
        "dse_serving.command:serve_plan",
        "serve-plan model=<name> system=<name> [traffic.<key>=... slo.ttft_s=... slo.tpot_s=...] [...]",
        "find the engines that serve a model within a latency with the most tokens a GPU and a dollar",
        {
            "slo.ttft_s": "most time to the first token, at slo.percentile",
            "slo.tpot_s": "most time of a later token, at slo.percentile",
            "traffic.<key>": "arrivals, rate_per_s, concurrency, input.tokens, output.tokens, trace, ...",
            "plan": "a deployment to judge as it is: plan.yaml of a run, or of settings import serving=true",
            "server": "vllm, sglang or tensorrt_llm",
        },
        (
            "serve-plan model=llama3_70b system=h100_8 slo.ttft_s=2 slo.tpot_s=0.05",
            "serve-plan model=qwen3_32b system=h200_8 traffic.arrivals=trace traffic.trace=my.csv slo.tpot_s=0.04",
        ),
        study="serving",
    ),
}

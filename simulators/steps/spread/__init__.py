"""How a step is spread over GPUs, and what that may be.

groups: which GPUs exchange with one another. pipelines: schedules of stages. sharded_states: exchange of states that
replicas split (ZeRO, FSDP). parallel_rules: what does not divide, or is not modelled. framework_rules: what a framework
asserts when it starts.
"""

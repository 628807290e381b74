"""Settings of frameworks and libraries: a plan of a step written as these, and read back as a plan.

What a tool calls a choice, what it means there and where that is documented is in
`conf/data/framework_settings.yaml`;
user buffers of Transformer Engine, which are set layer by layer, are in `user_buffers`.
"""

from dse.plugins import Command

COMMANDS = {
    "settings import": Command(
        "dse_deploy.serving_import:settings_import",
        "settings import settings=<file> from=<tool> [serving=true] [out=plan.yaml]",
        "settings of a tool as a plan, which `plan plan=<file>` then judges",
        {
            "settings": "file of the tool, or a folder that `export` wrote",
            "from": "the tool, as in `settings export to=`",
            "serving": "true for engines that serve: a plan that `serve-plan plan=` judges",
            "launch": "which of several launches of a script, from 1, where they differ",
            "out": "file to write (plan.yaml)",
            "model": "of the command that is printed, which judges the plan; of the step whose collectives a file of "
            "sizes sets",
            "system": "likewise",
            "parallel.<knob>": "a value that the settings leave open, such as parallel.tp=8",
        },
        ("settings import settings=ub_cfgs.yaml from=transformer_engine parallel.tp=8 out=theirs.yaml",),
    ),
    "settings export": Command(
        "dse_deploy.export:export",
        "settings export plan=<plan.yaml> to=<tool> [out=<folder>] [model=<name> system=<name> parallel.tp=8 ...]",
        "a plan of a step as settings of a framework or library: Megatron-LM, PyTorch, vLLM, NCCL, ...",
        {
            "plan": "plan.yaml of `plan` or `serve-plan`, or the folder of its run; for MSCCL the schedule of a "
            "collective (YAML or XML)",
            "to": "megatron, transformer_engine, torch, deepspeed, vllm, vllm_env, sglang, tensorrt_llm, deepep, nccl, "
            "rccl, nccl_tuner, rccl_tuner, communicators, process_groups, iris or msccl",
            "out": "folder to write to",
            "parallel.<knob>": "a value on top of the plan, such as parallel.tp=8",
            "config_dir": "folder of your own configurations",
            "...": "the step, where the plan is not in the folder of its run: overrides of study=plan",
        },
        (
            "settings export plan=outputs/plan/latest/plan.yaml to=megatron",
            "settings export plan=outputs/plan/latest/plan.yaml to=nccl",
            "settings export plan=outputs/plan/latest to=nccl_tuner",
        ),
    ),
}

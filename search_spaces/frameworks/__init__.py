"""Settings of frameworks and libraries: a plan of a step written as these, and read back as a plan.

What a tool calls a choice, what it means there and where that is documented is in `conf/data/framework_settings.yaml`;
user buffers of Transformer Engine, which are set layer by layer, are in `user_buffers`.
"""

from dse.plugins import Command

COMMANDS = {
    "settings-import": Command(
        "search_spaces.frameworks.command:settings_import",
        "settings-import settings=<file> from=<tool> [out=plan.yaml]",
        "settings of a tool as a plan, which `plan plan=<file>` then judges",
        {
            "settings": "file of the tool, or a folder that `export` wrote",
            "from": "the tool, as in `export to=`",
            "launch": "which of several launches of a script, from 1, where they differ",
            "out": "file to write (plan.yaml)",
            "parallel.<knob>": "a value that the settings leave open, such as parallel.tp=8",
        },
        ("settings-import settings=ub_cfgs.yaml from=transformer_engine parallel.tp=8 out=theirs.yaml",),
    ),
}

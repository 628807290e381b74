"""Models as model hubs describe them: the `config.json` of a folder of weights, and what its keys mean by type."""

from pathlib import Path

DATA = Path(__file__).with_name("conf") / "data"
"""Tables that ship with this plug-in."""

FORMATS = {"config.json": "dse_hub.model_file:hub_tree"}

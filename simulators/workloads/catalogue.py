"""The catalogue of the group `model`: public models by name, and files of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulators.workloads.public_models import aliases, public


class _Catalogue:
    """Public models, and files of one's own, as options of the group `model` (`dse.config.options`)."""

    def names(self) -> Mapping[str, str]:
        """Public models and what they are."""
        described = {name: _describe(widths) for name, widths in public().items()}
        also = {name: f"the same as {formal}" for name, formal in aliases().items()}
        return dict(sorted({**described, **also}.items()))

    def tree(self, name: str) -> dict[str, Any]:
        """Tree of a model by name, or of a file. Raises ConfigError."""
        from simulators.workloads.model_zoo import model_tree  # not needed to list names, and slow to import

        return model_tree(name, "model")


CATALOGUE = _Catalogue()


def _describe(widths: Mapping[str, Any]) -> str:
    """Say what a public model is."""
    text = f"{widths['layers']} layers of {widths['hidden']}, {widths['heads']} heads"
    if "experts" in widths:
        text += f", {widths['experts_per_token']} of {widths['experts']} experts for each token"
    kinds = {"latent": "latent attention", "compressed": "attention over compressed tokens"}
    text += "".join(f", {words}" for name, words in kinds.items() if name in widths)
    return f"{text} ({widths['provenance']})"

"""Plan."""
from studies.plain import Plain

class PlanStudy(Plain):
    """Plan."""

STUDY = PlanStudy()

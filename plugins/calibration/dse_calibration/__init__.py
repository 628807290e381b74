"""Comparison of costs with measurements: errors, and the fit of a few efficiency constants."""

from dse.plugins import Command

BACKENDS = {"measured": "dse_calibration.backend:MeasuredBackend"}
COMMANDS = {
    "machine calibrate": Command(
        "dse_calibration.calibrate:calibrate",
        "machine calibrate system=<name or YAML> data=<csv> out=<folder>",
        "fit a GPU's efficiency constants on a few measured operators, test them on the rest",
        {"system": "name of a system, or a YAML file", "data": "CSV of measured times", "out": "folder to write to"},
        ("machine calibrate system=my_gpu.yaml data=my_times.csv out=fitted",),
    ),
}

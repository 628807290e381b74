"""`python -m dse`."""

import sys

_OLDEST, _NEWEST = (3, 11), (3, 13)
_ENVIRONMENT = 4
_WAY = "run `make setup` once, then `.venv/bin/python -m dse ...`, or `. .venv/bin/activate` first"


def _refuse(reason: str) -> int:
    print(f"{sys.executable} cannot run dse: {reason}\n{_WAY}", file=sys.stderr)
    return _ENVIRONMENT


def _run() -> int:
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        return _refuse(f"it is Python {sys.version_info[0]}.{sys.version_info[1]}, and 3.11, 3.12 or 3.13 is needed")
    try:
        from dse.cli import main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dse", "simulators", "search_spaces", "studies"):
            raise
        return _refuse(f"it has no package {error.name}")
    return main()


if __name__ == "__main__":
    sys.exit(_run())

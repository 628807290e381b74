"""The tests of security as another user: `python -m tests.campaigns.other_user [tests ...]`, typed by root.

The user is `nobody`: the checkout and its environment are there to be read alone, and the home and all folders of
tests are a new one's. Where Python lies in a home that others may not read, as pyenv's, it is shown to them in a mount
namespace of its own, of which nobody else sees anything. The exit code is that of pytest, and 1 where a user other than
root types it, who needs no campaign: pytest itself runs the tests as such a user.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    *("tests/test_security.py", "tests/test_security_doors.py", "tests/test_traps.py", "tests/test_named_files.py"),
    *("tests/test_folders.py", "tests/test_shared_views.py", "plugins/cluster/tests/test_cluster_doors.py"),
    "plugins/ptx/tests/test_hostile_ptx.py",
)
"""Files with tests of what strangers' files, links, ports, folders of modules and users beside one may do."""
NOBODY = 65534
_AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
_PYTEST = ("-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-profile", "ci", "-q")


def hidden_home() -> Path | None:
    """The folder above Python that others may not enter; None where there is none."""
    above = reversed(Path(sys.executable).resolve().parents)
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


def shown(folder: Path, scratch: Path) -> str:
    """Commands of a shell that let others read Python alone in a folder that they may not enter."""
    python = Path(sys.base_prefix).resolve()
    place, inside = shlex.quote(str(scratch / "python")), shlex.quote(str(python))
    return (
        f"mkdir {place} && mount --bind {inside} {place} && "
        f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))} && mkdir -p {inside} && "
        f"mount --bind {place} {inside}"
    )


def command(words: Sequence[str], scratch: Path) -> list[str]:
    """The command that runs tests as nobody."""
    tests = [*_AS_NOBODY, sys.executable, *_PYTEST, *words]
    folder = hidden_home()
    if folder is None:
        return tests
    return ["unshare", "--mount", "sh", "-c", f"{shown(folder, scratch)} && exec {shlex.join(tests)}"]


def main(words: Sequence[str]) -> int:
    """Run the tests."""
    if os.getuid() != 0:
        print("only root can become another user: run pytest itself", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="dse-other-user-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        home = scratch / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        environment = {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        typed = command(words or TESTS, scratch)
        return subprocess.run(typed, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

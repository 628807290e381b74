"""Doors of a cluster: what a file may say of it, who is let in, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dse.cli import main
from dse.config.compose import request
from dse_cluster import connection
from dse_cluster.connection import connected
from dse_cluster.settings import SETTINGS_OF_FILES, ClusterExecutor
from tests.support import REPOSITORY, write_certificates
from tests.test_security_doors import QUIET, SMALL, command, said

DASK = REPOSITORY / "plugins" / "cluster" / "dse_cluster" / "conf" / "executor" / "dask.yaml"


pytestmark = pytest.mark.usefixtures("elsewhere")


def executor_of(folder: Path, text: str) -> list[str]:
    """A user's folder with an option of the group executor; the words of a study that takes it."""
    (folder / "executor").mkdir(parents=True)
    shipped = DASK.read_text("utf-8")
    lines = [line for line in shipped.splitlines() if line.partition(":")[0] not in re.findall(r"^\w+", text, re.M)]
    (folder / "executor" / "mine.yaml").write_text("\n".join(lines).replace("name: dask", "name: mine") + f"\n{text}\n")
    return [*SMALL, f"--config-dir={folder}", "executor=mine"]


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:99999", "tls://host:0", "tcp://127.0.0.1:port", "tcp://127.0.0.1:²", f"tcp://h:{'9' * 5000}"],
)
def test_a_scheduler_at_a_port_that_no_computer_has_is_refused_in_a_sentence(address: str) -> None:
    code, text = said([*SMALL, "executor=dask", f"executor.address='{address}'"])
    assert (code, "has a port that is no number from 1 to 65535" in text) == (2, True), text
    assert "executor.address" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("settings: {preload: ['import os; os.mkdir(\"pwned\")']}", "executor.settings.preload"),
        ("settings: {host: 0.0.0.0}", "executor.settings.host"),
        ("settings: {dashboard_address: ':8787'}", "executor.settings.dashboard_address"),
        ("settings: {security: {}}", "executor.settings.security"),
        ("settings: {worker_class: os.system}", "executor.settings.worker_class"),
        ("settings: {env: {LD_PRELOAD: x.so}}", "executor.settings.env"),
        ("settings: {n_workers: {a: b}}", "executor.settings.n_workers"),
        ("cluster: slurm\nsettings: {job_script_prologue: [touch pwned]}", "executor.settings.job_script_prologue"),
        ("cluster: slurm\nsettings: {python: ./evil}", "executor.settings.python"),
        ('cluster: slurm\nsettings: {queue: "a\\ntouch pwned"}', "executor.settings.queue"),
        ("cluster: pbs\nsettings: {queue: 'a; touch pwned'}", "executor.settings.queue"),
        ("cluster: lsf\nsettings: {shebang: '#!./evil'}", "executor.settings.shebang"),
        ("cluster: ssh\nsettings: {hosts: [evil]}", "executor.settings.hosts"),
        ("cluster: kubernetes\nsettings: {image: evil}", "executor.settings.image"),
        ("address: tcp://127.0.0.1:9", "executor.address"),
        ("plain: true", "executor.plain"),
        ("tls: theirs", "executor.tls"),
    ],
)
def test_a_file_gives_the_executor_data_and_nothing_that_runs(
    text: str, path: str, tmp_path: Path, elsewhere: Path
) -> None:
    code, output = said(executor_of(tmp_path / "conf", text))
    assert code == 2, output
    assert path in output
    assert "take it out of the file" in output
    assert not list(elsewhere.iterdir())


def test_what_a_file_may_say_of_a_cluster_composes_and_all_else_may_be_typed(tmp_path: Path) -> None:
    words = executor_of(
        tmp_path / "conf", "cluster: slurm\nsettings: {queue: gpu, cores: 8, memory: 16 GB, walltime: '01:00:00'}"
    )
    folder = tmp_path / "conf"
    plan_request = request([word for word in words if not word.startswith("--")], folder)
    assert plan_request.problems == ()
    typed = request([*SMALL, "executor=dask", "executor.settings={preload: [mine]}", "executor.plain=true"])
    assert typed.problems == ()
    assert typed.tree["executor"]["settings"] == {"preload": ["mine"]}
    assert all(not {"preload", "host", "security", "env"} & keys.keys() for keys in SETTINGS_OF_FILES.values())


@pytest.mark.slow
def test_a_recorded_command_gives_the_executor_no_settings_that_run(elsewhere: Path) -> None:
    assert main([*SMALL, "store=none"]) == 0
    file = next(elsewhere.glob("outputs/ficco_sweep/2*/provenance.json"))
    provenance = json.loads(file.read_text())
    provenance["overrides"] += ["executor=dask", "executor.settings={preload: [evil]}"]
    file.write_text(json.dumps(provenance))
    import dse

    key = str(dse.load("ficco_sweep")["key"].iloc[0])
    code, text = said(["results", "timeline", "study=ficco_sweep", f"key={key}"])
    assert code == 2
    assert "executor.settings.preload" in text


INTRUDER = """
import socket, ssl, sys
for port in map(int, sys.argv[1:]):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for wrap in (context.wrap_socket, lambda plain: plain):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as plain, wrap(plain) as channel:
                channel.settimeout(5)
                channel.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
                answer = channel.recv(4096)
                if answer and b" 404 " not in answer[:40]:
                    print(port, "answers", answer[:40])
        except OSError:
            pass
print("tried")
"""


def ports_of(pids: set[int]) -> set[int]:
    """Ports that processes listen on, by the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.usefixtures("dask")
@pytest.mark.more
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_is_let_into_no_port_of_a_cluster(tmp_path: Path) -> None:
    before = ports_of({os.getpid()})
    script = tmp_path / "intruder.py"
    script.write_text(INTRUDER)
    with connected(ClusterExecutor(name="x", cluster="local", jobs=1)) as client:
        client.wait_for_workers(1)
        assert client.scheduler.address.startswith("tls://127.0.0.1:")
        workers = set(client.run(os.getpid).values())
        ports = ports_of({os.getpid(), *workers}) - before
        assert len(ports) >= 3
        user = {"user": 65534, "group": 65534, "extra_groups": []}
        text = script.read_text()
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        command: list[str] = [python, "-c", text, *map(str, ports)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120, check=False, **user)  # type: ignore[call-overload]
    if done.returncode and "ermission" in done.stderr:
        pytest.skip("another user may not run Python here")
    assert done.stdout == "tried\n", done.stdout + done.stderr


@pytest.mark.usefixtures("dask")
@pytest.mark.slow
def test_without_the_certificate_nobody_speaks_to_the_scheduler() -> None:
    from distributed import Client, Security

    with connected(ClusterExecutor(name="x", cluster="local", jobs=1)) as client:
        address = client.scheduler.address.removeprefix("tls://")
        for place, security in ((f"tcp://{address}", None), (f"tls://{address}", Security.temporary())):
            with pytest.raises((OSError, TypeError)):
                Client(place, security=security, timeout=2, set_as_default=False)


@pytest.mark.usefixtures("dask")
@pytest.mark.slow
def test_certificates_that_have_ended_say_so_and_how_to_make_new_ones(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import datetime as real

    class Later(real):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.now(tz) + timedelta(days=4000)

    write_certificates(Path("old"))
    monkeypatch.setattr(connection, "datetime", Later)
    code, text = said([*SMALL, "executor=dask", "executor.tls=old"])
    assert code == 2
    assert "holds certificates that were valid until" in text
    assert "make new ones, and name their folder: executor.tls=<folder>" in text


def _until(stream: Any, sign: bytes) -> Iterator[bytes]:
    for line in stream:
        yield line
        if sign in line:
            return


@pytest.mark.usefixtures("dask")
@pytest.mark.more
def test_ctrl_c_on_a_cluster_prints_no_traceback_of_its_workers() -> None:
    words = [*QUIET, "budget.trials=1000000", "+space.system.gpu.num_cus=range(64,304,1)", "executor=dask"]
    with command(*words, "executor.jobs=2", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        lines = list(_until(run.stderr, b"Dask:"))
        os.killpg(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=120)
    assert b"Traceback" not in b"".join(lines) + errors
    assert b"interrupted" in errors
    assert run.returncode == 130

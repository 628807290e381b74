"""A simulator that goes wrong in the way its design asks for. Run as a program: menu.py [input [output]]."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

CASE: dict[str, Any] = {}
ANSWERS = {
    "not a number": '{"time_s": NaN}',
    "inf": '{"time_s": Infinity}',
    "negative": '{"time_s": -1}',
    "above": '{"time_s": 1e7}',
    "huge": f'{{"time_s": {"9" * 5000}}}',
    "null": '{"time_s": null}',
    "missing": "{}",
    "extra": '{"time_s": 1, "speed": 2}',
    "text": '{"time_s": "1.0"}',
    "true": '{"time_s": true}',
    "list": '{"time_s": [[1.0]]}',
    "twice": '{"time_s": 1, "time_s": 2}',
    "deep": "[" * 200_000,
    "array": "[1, 2]",
    "words": "time is 3",
    "log line first": 'starting\n{"time_s": 1}',
    "bytes": "\udcff\udcfe",
    "long text": json.dumps({"time_s": "x" * 5000}),
    "long name": json.dumps({"time_s": 1, "x" * 5000: 1}),
    "surrogate": r'{"time_s": 1, "\ud800": 1}',
    "infeasible": '{"status": "infeasible", "reason": "the tile does not fit"}',
    "infeasible, silently": '{"status": "infeasible"}',
    "unsupported": '{"status": "unsupported", "reason": "no such collective"}',
    "status": '{"status": "great"}',
    "status ok": '{"status": "ok", "time_s": 4}',
    "blank": "  \n",
}


def spawn(script: str, **how: Any) -> subprocess.Popen[bytes]:
    """A child of this interpreter, with our own streams."""
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", script], **how)


def sleep() -> None:
    open("sleeps", "w").close()
    time.sleep(600)


def busy() -> NoReturn:
    while True:
        pass


def stubborn() -> None:
    """Neither it nor its child minds being asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spawn("import time; time.sleep(600)")
    sleep()


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def child() -> None:
    """Its answer is there, but a child keeps the pipes open."""
    spawn("import time; time.sleep(600)")
    answer(3)


def daemon() -> None:
    """A child in a session of its own, whose parent is gone."""
    spawn("import os, time; os.fork() and os._exit(0); time.sleep(600)", start_new_session=True)
    time.sleep(0.2)
    answer(3)


def memory() -> None:
    blocks = [bytearray(1 << 26) for _ in range(64)]
    answer(len(blocks))


def supervisor() -> None:
    """Who watches over it is killed."""
    spawn("import time; time.sleep(600)")
    os.kill(os.getppid(), signal.SIGKILL)
    sleep()


def unguarded() -> None:
    """Who watches over it is killed, the first time that its point comes."""
    try:
        open(os.path.join(CASE["folder"], f"met-{CASE['x']}"), "x").close()
    except FileExistsError:
        answer(3.0)
        return
    os.kill(os.getppid(), signal.SIGKILL)
    sleep()


def talk() -> NoReturn:
    """10 MB of complaints."""
    for _ in range(160):
        os.write(2, b"x" * 65535 + b"\n")
    os.write(2, b"the end\n")
    sys.exit(7)


def flood() -> NoReturn:
    while True:
        os.write(1, b" " * 65536)


def file() -> None:
    with open("large", "wb") as out:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        out.write(b"x" * (1 << 22))


def fifo() -> None:
    os.mkfifo(sys.argv[2])


def leak() -> NoReturn:
    """What it knows, and what it should not say."""
    print(f"licence {os.environ['LICENCE']}, api_key = hunter2, in {os.getcwd()}", "\x1b[31mred", file=sys.stderr)
    sys.exit(1)


def told() -> NoReturn:
    """What it was started with."""
    names = ("AS", "CPU", "FSIZE", "CORE")
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names}
    report = {
        "env": dict(os.environ),
        "here": os.listdir("."),
        "argv": sys.argv[1:],
        "limits": limits,
        "ppid": os.getppid(),
    }
    report |= {"alone": os.getsid(0) == os.getpid() == os.getpgrp(), "stdin": sys.stdin.read()}
    print(json.dumps(report), file=sys.stderr)
    sys.exit(1)


def answer(time_s: float) -> None:
    text = json.dumps({"time_s": time_s})
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w") as out:
            out.write(text)
    else:
        print(text)


def main() -> None:
    design = json.load(open(sys.argv[1]) if len(sys.argv) > 1 else sys.stdin)
    CASE.update(design["case"])
    fault = CASE["fault"]
    if fault in ANSWERS:
        os.write(1, ANSWERS[fault].encode(errors="surrogateescape"))
    elif fault.startswith("exit "):
        print("no licence", file=sys.stderr)
        sys.exit(int(fault.split()[1]))
    elif fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault in globals():
        globals()[fault]()
    elif fault != "silent":
        answer(design["case"]["x"])


if __name__ == "__main__":
    main()

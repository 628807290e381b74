"""Outcome of a run of an external program: its metrics, or the reason of its failure and the end of its error output.

The first line of a reason is one of a few texts (`EXIT 3`, `CRASH SIGSEGV`, `TIMEOUT after 2 s`, ...), the same for the
same failure, so that failures can be counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dse.backend import Metric, Result, Status
from dse.errors import ConfigError
from dse.errors.parsing import parse_json
from dse.evaluation.workers import Lost
from simulators.external.process import Limits, ProcessEnd

_MOST_LINES = 20  # of standard error
_MOST_REASON = 500  # characters of a reason given by a program
_MOST_VALUE = 80  # characters of a name, or of a string in place of a number
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|Cannot allocate memory|memory allocation of \d+ bytes failed|out ?of ?memory",
    re.IGNORECASE,
)
_SECRET = re.compile(r"(?i)((?:token|secret|password|passwd|api_?key)\w*[\"']?\s*[:=]\s*)\S+")


def judge_run(
    ended: ProcessEnd, limits: Limits, answer: bytes | None, *, metrics: Mapping[str, Metric], starved: bool
) -> Result:
    """Judge a run, without checking the values of its metrics.

    answer: output of the program, at most one byte over `limits.output_bytes`; None if nothing could be read. starved:
    the kernel killed some process for lack of memory meanwhile. Raises Lost if the supervisor was killed, so that the
    end of the program is not known.
    """
    if failure := _failure(ended, limits, starved):
        return Result("failed", reason=failure)
    if not (answer or b"").strip():
        return Result("failed", reason="NO OUTPUT")
    assert answer is not None  # empty and missing answers are gone by now
    if len(answer) > limits.output_bytes:
        return Result("failed", reason=f"OUTPUT over {limits.output_bytes} B")
    return _read(answer, metrics)


def _failure(ended: ProcessEnd, limits: Limits, starved: bool) -> str:
    """Reason of a failed run, or "" for a successful one."""
    if ended.error:
        return f"NOT STARTED: {ended.error}"
    if ended.cut:  # before the exit code, which is that of the signal it was ended by
        timeout, output = f"TIMEOUT after {limits.timeout_s:g} s", f"OUTPUT over {limits.output_bytes} B"
        return timeout if ended.cut == "time" else output
    if ended.code is None:
        raise Lost("what watches over the program was killed")
    if ended.code == 0:
        return ""
    if _wants_memory(ended, starved):
        return "OUT OF MEMORY"
    return f"EXIT {ended.code}" if ended.code > 0 else _crash(-ended.code, limits)


def _crash(number: int, limits: Limits) -> str:
    if number == signal.SIGXCPU and limits.cpu_s is not None:  # the kernel's signal for this limit
        return f"CPU TIME over {limits.cpu_s} s"
    if number == signal.SIGXFSZ and limits.file_bytes is not None:
        return f"FILE SIZE over {limits.file_bytes} B"
    with contextlib.suppress(ValueError):
        return f"CRASH {signal.Signals(number).name}"  # real-time signals have no name
    return f"CRASH signal {number}"


def _wants_memory(ended: ProcessEnd, starved: bool) -> bool:
    """Return whether a run failed for lack of memory, by its last messages or the kernel's kills.

    A crash alone, such as from an unchecked null pointer, is not taken as a sign.
    """
    killed = ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second: reported by a shell
    # earlier messages may be of errors that the program survived
    last = ended.stderr.decode(errors="replace").strip().splitlines()[-3:]
    return (killed and starved) or any(_NO_MEMORY.search(line) for line in last)


def kills_for_memory() -> int:
    """Number of processes killed by the kernel for lack of memory: in this control group, else on this machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # the unified hierarchy of cgroup 2
        (group,) = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        events = Path(f"/sys/fs/cgroup{group.removeprefix('0::')}/memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    with contextlib.suppress(OSError):  # no control group of its own: the whole machine's count
        return sum(int(n) for n in re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE))
    return 0


def read_output(path: Path, most: int) -> bytes | None:
    """Read up to `most` bytes of a program's output file; None if it is not a readable plain file."""
    with contextlib.suppress(OSError):
        # a pipe in its place must not block, nor a link lead elsewhere
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(opened, "rb") as file:
            return file.read(most) if stat.S_ISREG(os.fstat(opened).st_mode) else None
    return None


def _read(answer: bytes, metrics: Mapping[str, Metric]) -> Result:
    """Parse the answer, one JSON object: metrics, or a status with its reason."""
    try:
        # a key that comes twice has no certain value
        content = parse_json(answer, "OUTPUT", distinct=True, lenient=True)
    except ConfigError as error:
        begins = sanitize_text(answer[: 4 * _MOST_VALUE].decode(errors="replace").strip())
        what = f"OUTPUT is no JSON\n{sanitize_text(error.problems[0].rule)}; it begins: {begins}"
        return Result("failed", reason=what)
    if not isinstance(content, dict):
        return Result("failed", reason="OUTPUT is no JSON object")
    return judge_answer(content, metrics)


def judge_answer(content: Mapping[str, Any], metrics: Mapping[str, Metric]) -> Result:
    """Judge an answer, metrics by name or a status with its reason, without checking the values of its metrics."""
    content = dict(content)
    status = content.pop("status", "ok")
    if status == "ok":
        unknown = [name for name in content if name not in metrics][:1]  # one unknown metric is enough for the message
        return Result(
            "ok", {sanitize_text(name): _number(content[name]) for name in (*metrics, *unknown) if name in content}
        )
    outcome: Status | None = next((name for name in ("infeasible", "unsupported", "failed") if name == status), None)
    if outcome is None:
        way = "give ok, infeasible, unsupported or failed"
        return Result("failed", reason=f"OUTPUT has an unknown status\n{sanitize_text(str(_number(status)))}: {way}")
    reason = content.get("reason")
    return Result(
        outcome,
        reason=sanitize_text(reason, _MOST_REASON) if isinstance(reason, str) and reason.strip() else "no reason given",
    )


def _number(value: Any) -> Any:
    """Return the value of a metric unchanged, but shorten strings and describe lists and objects."""
    if isinstance(value, str):
        return sanitize_text(value)
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else value


def sanitize_text(text: str, most: int = _MOST_VALUE) -> str:
    """Make a text safe for terminals and tables: no control characters but newlines, at most `most` characters."""
    # control characters could change what a terminal shows
    plain = "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text[: most + 1].expandtabs(4))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def complaint(ended: ProcessEnd, most: int, *, folder: Path, secrets: Mapping[str, str]) -> str:
    """Return the last `most` characters of standard error, without the name of the scratch folder and without secrets.

    secrets: name -> value of variables passed on from the environment.
    """
    text = ended.stderr.decode(errors="replace").strip()
    text = text.replace(str(folder), "<scratch>")
    for name, value in _longest_first(secrets):
        text = text.replace(value, f"<{name}>")
    text = _SECRET.sub(r"\1<hidden>", text)  # values that look like secrets by their names
    tail = "\n".join(text.splitlines()[-_MOST_LINES:])[-most:] if most else ""
    if not tail:
        return ""
    complete = len(tail) == len(text) and ended.error_size <= len(ended.stderr)
    title = "stderr" if complete else f"the end of {ended.error_size} B of stderr"
    return f"{title}:\n{sanitize_text(tail, len(tail) * 4)}"


def _longest_first(secrets: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Secrets of at least 4 characters, longest first, so that a secret inside another does not break its removal."""
    return sorted(((name, value) for name, value in secrets.items() if len(value) >= 4), key=lambda pair: -len(pair[1]))

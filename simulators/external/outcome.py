"""What a run of somebody's program says: its metrics, or what went wrong and the end of what it complained.

The first line of a reason is one of few (`EXIT 3`, `CRASH SIGSEGV`, `TIMEOUT after 2 s`, ...), the same for the same
failure, so that failures can be counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dse.backend import Metric, Result, Status
from dse.evaluation.workers import Lost
from simulators.external.process import Ended, Limits

_MOST_LINES = 20  # of standard error
_MOST_TOLD = 500  # characters of a reason that a program gives
_MOST_SHOWN = 80  # characters of a name or text where a number belongs
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|Cannot allocate memory|memory allocation of \d+ bytes failed|out ?of ?memory",
    re.IGNORECASE,
)
_SECRET = re.compile(r"(?i)((?:token|secret|password|passwd|api_?key)\w*[\"']?\s*[:=]\s*)\S+")


def judge_run(
    ended: Ended, limits: Limits, answer: bytes | None, *, metrics: Mapping[str, Metric], starved: bool
) -> Result:
    """The result of a run, without a look at the values of its metrics.

    answer: what it wrote where its output was expected, one byte over `limits.output_bytes` at most; None if nothing
    could be read. starved: the kernel killed some process for want of memory meanwhile. Raises Lost where nobody knows
    how the program ended, as its supervisor was killed.
    """
    if failure := _failure(ended, limits, starved):
        return Result("failed", reason=failure)
    if not (answer or b"").strip():
        return Result("failed", reason="NO OUTPUT")
    assert answer is not None
    if len(answer) > limits.output_bytes:
        return Result("failed", reason=f"OUTPUT over {limits.output_bytes} B")
    return _read(answer, metrics)


def _failure(ended: Ended, limits: Limits, starved: bool) -> str:
    """How a run failed, or "" if it ended well."""
    if ended.error:
        return f"NOT STARTED: {ended.error}"
    if ended.cut:
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
    if number == signal.SIGXCPU and limits.cpu_s is not None:
        return f"CPU TIME over {limits.cpu_s} s"
    if number == signal.SIGXFSZ and limits.file_bytes is not None:
        return f"FILE SIZE over {limits.file_bytes} B"
    with contextlib.suppress(ValueError):
        return f"CRASH {signal.Signals(number).name}"
    return f"CRASH signal {number}"


def _wants_memory(ended: Ended, starved: bool) -> bool:
    """Whether a program said so in the end, or the kernel did; a pointer that was not checked tells nothing."""
    killed = ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second: told by a shell
    last = ended.stderr.decode(errors="replace").strip().splitlines()[-3:]
    return (killed and starved) or any(_NO_MEMORY.search(line) for line in last)


def kills_for_memory() -> int:
    """How many processes the kernel killed for want of memory so far: in this control group, else on this machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        (own,) = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        events = Path(f"/sys/fs/cgroup{own.removeprefix('0::')}/memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    with contextlib.suppress(OSError):
        return sum(int(n) for n in re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE))
    return 0


def read_output(path: Path, most: int) -> bytes | None:
    """What a program wrote to a file, `most` bytes; None where it is no plain file that can be read."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(opened, "rb") as file:
            return file.read(most) if stat.S_ISREG(os.fstat(opened).st_mode) else None
    return None


def _read(answer: bytes, metrics: Mapping[str, Metric]) -> Result:
    """One JSON object: metrics, or a status with its reason."""
    try:
        found = json.loads(answer, parse_int=float, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        begins = sanitize_text(answer[: 4 * _MOST_SHOWN].decode(errors="replace").strip())
        return Result("failed", reason=f"OUTPUT is no JSON\n{sanitize_text(str(error))}; it begins: {begins}")
    if not isinstance(found, dict):
        return Result("failed", reason="OUTPUT is no JSON object")
    status = found.pop("status", "ok")
    if status == "ok":
        unknown = [name for name in found if name not in metrics][:1]
        return Result(
            "ok", {sanitize_text(name): _number(found[name]) for name in (*metrics, *unknown) if name in found}
        )
    said: Status | None = next((one for one in ("infeasible", "unsupported", "failed") if one == status), None)
    if said is None:
        way = "give ok, infeasible, unsupported or failed"
        return Result("failed", reason=f"OUTPUT has an unknown status\n{sanitize_text(str(_number(status)))}: {way}")
    reason = found.get("reason")
    return Result(
        said,
        reason=sanitize_text(reason, _MOST_TOLD) if isinstance(reason, str) and reason.strip() else "no reason given",
    )


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return found


def _number(value: Any) -> Any:
    """A metric as it was given, if that is short."""
    if isinstance(value, str):
        return sanitize_text(value)
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else value


def sanitize_text(text: str, most: int = _MOST_SHOWN) -> str:
    """A text that may go to a terminal and a table: no control characters but newlines, not too long."""
    plain = "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text[: most + 1].expandtabs(4))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def complaint(ended: Ended, most: int, *, folder: Path, secrets: Mapping[str, str]) -> str:
    """The end of standard error, `most` characters: without the name of the scratch folder and without secrets.

    secrets: name -> value of what was passed on from the environment.
    """
    text = ended.stderr.decode(errors="replace").strip()
    text = text.replace(str(folder), "<scratch>")
    for name, value in _longest_first(secrets):
        text = text.replace(value, f"<{name}>")
    text = _SECRET.sub(r"\1<hidden>", text)
    kept = "\n".join(text.splitlines()[-_MOST_LINES:])[-most:] if most else ""
    if not kept:
        return ""
    whole = len(kept) == len(text) and ended.error_size <= len(ended.stderr)
    return (
        f"{'stderr' if whole else f'the end of {ended.error_size} B of stderr'}:\n{sanitize_text(kept, len(kept) * 4)}"
    )


def _longest_first(secrets: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Those long enough to be one, so that one which is part of another does not spoil it."""
    return sorted(((name, value) for name, value in secrets.items() if len(value) >= 4), key=lambda one: -len(one[1]))

"""Views of finished study runs, MLflow and Optuna's storage: what shows them, and the commands `sync` and `ui`.

A view is written from the folder of a study run alone. Deleted, it is written again; a failure is told and passed
over.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dse.config.compose import request
from dse.errors import ConfigError, Problem, Problems, hidden, pairs
from dse.progress import bar
from dse.space import get_path
from dse.study.settings import Tracking
from dse.tracking.database import DamagedError, TrackingError, open_store, repair
from dse.tracking.server import serve
from dse.tracking.study import StudyFolder
from dse.tracking.sync import reap
from dse.tracking.sync import sync as write

Seen = Callable[[int], None]


@dataclass(frozen=True)
class News:
    """What is told of a view being written.

    seen: of progress, in points. tell: a sentence, and whether it is about a failure. whole: asked before files are
    shown; it waits until they are all there.
    """

    seen: Seen
    tell: Callable[[str, bool], None]
    whole: Callable[[], object] = lambda: None


_DEFAULT = "sqlite:///mlflow.db"


def warm(wanted: Tracking) -> None:
    """Import, open and tidy while there is time; what fails here fails again, and is told, when it is needed."""
    if wanted.uri is not None:
        with suppress(TrackingError):
            reap(open_store(wanted.uri))


def total(study: StudyFolder, wanted: Tracking) -> int:
    """Points shown in all views."""
    return wanted.rule.bound(study.num_rows) * sum(place is not None for place in (wanted.uri, wanted.optuna))


def show(study: StudyFolder, wanted: Tracking, news: News) -> Counter[str]:
    """Show a study run where it is wanted; how many views were `written`, `up to date` or `failed`."""
    found: Counter[str] = Counter()
    if wanted.uri is not None:
        found[_show_in_mlflow(study, wanted, news)] += 1
    if wanted.optuna is not None:
        found[_show_in_optuna(study, wanted, news)] += 1
    return found


def _show_in_mlflow(study: StudyFolder, wanted: Tracking, news: News) -> str:
    try:
        store = open_store(wanted.uri or _DEFAULT)
        done = write(study.folder, store, wanted.rule, seen=news.seen, whole=news.whole)
    except TrackingError as error:
        extra = " repair=true" if isinstance(error, DamagedError) else ""
        news.tell(f"MLflow was passed over: {error}; {way_out(study.folder, wanted)}{extra}", True)
        return "failed"
    if not done.how:
        return "up to date"
    if done.reason:
        unknown = "points were written one by one, as the bulk writer does not know this MLflow"
        news.tell(f"{unknown} ({done.reason})", False)
    which = "" if done.amount == "all" else f" of {study.num_rows:,} points (tracking.points=all shows every one)"
    look = "look at them with: python -m dse ui" + ("" if wanted.uri == _DEFAULT else f" uri={done.uri}")
    news.tell(f"{done.num_points:,} runs{which} of {study.name} in MLflow at {done.uri}; {look}", False)
    return "written"


def _show_in_optuna(study: StudyFolder, wanted: Tracking, news: News) -> str:
    from dse.tracking import optuna_storage

    try:
        count = optuna_storage.show(study.folder, wanted.optuna or "", wanted.rule, news.seen)
    except optuna_storage.StorageError as error:
        news.tell(f"Optuna's storage was passed over: {error}; {way_out(study.folder, wanted)}", True)
        return "failed"
    if count:
        news.tell(f"{count:,} trials of {study.name} in Optuna's storage at {hidden(wanted.optuna or '')}", False)
    return "written" if count else "up to date"


def way_out(folder: Path, wanted: Tracking) -> str:
    """The command that shows a study run after all, where it was wanted."""
    root = folder.parent.parent
    where = "" if root.resolve() == Path("outputs").resolve() else f" output_dir={root}"
    views = {name: place for name, place in (("uri", wanted.uri), ("optuna", wanted.optuna)) if place is not None}
    if not all(_is_below(place, Path.cwd()) for place in views.values()):  # a record of it is not followed by itself
        where += "".join(f" {name}={hidden(place).replace(':***@', '@')}" for name, place in views.items())
    return f"catch up with: python -m dse sync study={folder.parent.name}{where}"


# ---------------------------------------------------------------- commands


def sync(words: Sequence[str]) -> int:
    """`sync [study=<name>] [uri=...] [optuna=...] [output_dir=outputs] [points=auto|all|none] [repair=true]`
    `[config_dir=...]`.

    Every finished run of one study, or of all, in the views its own configuration names, or in those given here. A
    folder may be somebody else's: what it names counts where it is a file below the working folder, or what the present
    configuration (config_dir: of the user's own) names as well. 0, or 4 if a view failed. Raises ConfigError.
    """
    known = {"study": "*", "output_dir": "outputs", "repair": "false"}
    given = pairs(words, known, optional=("uri", "optuna", "points", "config_dir"))
    everyone = StudyFolder.all(Path(given["output_dir"]), given["study"])
    studies = [one for one in everyone if _is_sound(one)]
    if not studies:
        way = "run python -m dse study=<name> first"
        raise ConfigError([Problem("study", f"has no finished run below {given['output_dir']}/", given["study"], way)])
    wanted = [_wanted(study, given) for study in studies]
    uris = dict.fromkeys(views.uri for views in wanted if views.uri is not None)
    if given["repair"] == "true":
        _repair(uris)
    for uri in uris:
        with suppress(TrackingError):  # told below, for the studies it holds
            reap(open_store(uri))
    found: Counter[str] = Counter()
    with bar("sync", sum(map(total, studies, wanted))) as advance:
        for study, views in zip(studies, wanted, strict=True):
            found += show(study, views, News(advance, _print))
    print(", ".join(f"{count} {what}" for what, count in sorted(found.items())))
    return 4 if found["failed"] else 0


def _is_sound(study: StudyFolder) -> bool:
    """Whether the files of a study run can be shown; what is wrong with them is told."""
    try:
        study.check()
    except ConfigError as error:
        _print(f"{study.folder} is left out: {error.problems[0]}", True)
        return False
    return True


def _wanted(study: StudyFolder, given: Mapping[str, str]) -> Tracking:
    """The views of a study run: those given, else its own where they may be followed, else MLflow's usual place."""
    own = {key: value for key, value in study.config["tracking"].items() if key in Tracking.model_fields}
    if "uri" in given or "optuna" in given:
        own |= {"uri": given.get("uri"), "optuna": given.get("optuna")}
    else:
        own |= {name: _followed(study, name, own.get(name), given) for name in ("uri", "optuna")}
        if own["uri"] is None and own["optuna"] is None:
            own["uri"] = _DEFAULT
    check = Problems()
    known = {"name": str(own.pop("name", "")), "description": str(own.pop("description", "")), **own}
    known |= {key: given[key] for key in ("points",) if key in given}
    found = check.model(Tracking, known, path="")
    check.done()
    return found  # type: ignore[return-value]


def _followed(study: StudyFolder, name: str, recorded: object, given: Mapping[str, str]) -> str | None:
    """A recorded place of a view, if it may be written to. Raises ConfigError where only the recorded file names it."""
    if recorded is None:
        return None
    if isinstance(recorded, str) and _is_below(recorded, Path.cwd()):
        return recorded
    for present in _configured(study, name, given):
        # Without the password that was not written down, PGPASSWORD or ~/.pgpass counts.
        if recorded in (present, hidden(present)):
            return present
    where, told = study.folder / "config.yaml", hidden(str(recorded))
    rule = "is neither a file below this folder nor what the present configuration names"
    way = f"look at it, and if it is yours type {name}={told.replace(':***@', '@')}; else name a place of your own"
    raise ConfigError([Problem(f"{where}: tracking.{name}", rule, told, way)])


def _is_below(place: str, here: Path) -> bool:
    """Whether a URI (or the path of a journal) is a file below a folder, links followed."""
    match = re.fullmatch(r"sqlite:///([^?%]+)|([^?%:]+\.log)", place)
    path = "" if match is None else match[1] or match[2]
    return not path.startswith((":", "file:")) and here.resolve() in Path(path).resolve().parents


def _configured(study: StudyFolder, name: str, given: Mapping[str, str]) -> Iterator[str]:
    """What the present configuration names for such a study: by itself, and with the option that was recorded."""
    option = study.config["tracking"].get("name")
    folder = Path(given["config_dir"]) if "config_dir" in given else None
    for words in ([], [f"tracking={option}"] if re.fullmatch(r"[\w-]{1,80}", str(option)) else []):
        present = get_path(request([f"study={study.study}", *words], folder).tree, f"tracking.{name}")
        if isinstance(present, str):
            yield present


def _repair(uris: Iterable[str]) -> None:
    for uri in uris:
        try:
            aside = repair(uri)
        except TrackingError as error:
            _print(str(error), True)
        else:
            _print(f"the damaged database is kept as {aside}" if aside else f"{hidden(uri)} is sound", False)


def _print(told: str, failed: bool) -> None:
    print(told, file=sys.stderr if failed else sys.stdout)


def ui(words: Sequence[str]) -> int:
    """`ui [uri=<tracking uri>] [port=5000]`: the MLflow UI on 127.0.0.1, one worker."""
    given = pairs(words, {"uri": _DEFAULT, "port": "5000"})
    if not given["port"].isdigit() or not 0 < int(given["port"]) < 65536:
        raise ConfigError([Problem("port", "must be a number from 1 to 65535", given["port"])])
    return serve(given["uri"], port=int(given["port"]))

"""Views of finished study runs in MLflow and in Optuna's storage, and the command `store sync`.

A view is written from the folder of a study run alone, so a deleted view can be written again. A failure is reported
and ignored.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dse.errors import ConfigError, Problem, hidden, pairs, validate_as
from dse.errors.terminal import bar
from dse.results import output_files
from dse.study.plan_again import present_value
from dse.study.settings import TrackingSettings
from dse.tracking.database import DEFAULT_URI, DamagedTrackingError, TrackingError, open_store, repair
from dse.tracking.study import StudyFolder
from dse.tracking.sync import reap
from dse.tracking.sync import sync as write

Seen = Callable[[int], None]


@dataclass(frozen=True)
class News:
    """Callbacks of writing a view.

    seen: progress, in points. tell: a sentence, and whether it is about a failure. whole: called before files are
    logged; it returns once all are written.
    """

    seen: Seen
    tell: Callable[[str, bool], None]
    whole: Callable[[], object] = lambda: None


def warm(wanted: TrackingSettings) -> None:
    """Import, open and tidy while there is time; a failure is ignored, as it recurs and is reported later."""
    if wanted.uri is not None:
        with suppress(TrackingError):
            reap(open_store(wanted.uri))


def total(study: StudyFolder, wanted: TrackingSettings) -> int:
    """Upper bound on the number of points to write, over all views."""
    return wanted.rule.bound(study.num_rows) * sum(place is not None for place in (wanted.uri, wanted.optuna))


def show(study: StudyFolder, wanted: TrackingSettings, news: News) -> Counter[str]:
    """Write a study run into its views, and count the views that were `written`, `up to date` or `failed`."""
    counts: Counter[str] = Counter()
    if wanted.uri is not None:
        counts[_show_in_mlflow(study, wanted, news)] += 1
    if wanted.optuna is not None:
        counts[_show_in_optuna(study, wanted, news)] += 1
    return counts


def _show_in_mlflow(study: StudyFolder, wanted: TrackingSettings, news: News) -> str:
    try:
        store = open_store(wanted.uri or DEFAULT_URI)
        done = write(study.folder, store, wanted.rule, seen=news.seen, wait_for_files=news.whole)
    except TrackingError as error:
        extra = " repair=true" if isinstance(error, DamagedTrackingError) else ""
        news.tell(f"MLflow was passed over: {error}; {way_out(study.folder, wanted)}{extra}", True)
        return "failed"
    if not done.how:
        return "up to date"
    if done.reason:
        unknown = "points were written one by one, as the bulk writer does not know this MLflow"
        news.tell(f"{unknown} ({done.reason})", False)
    which = "" if done.amount == "all" else f" of {study.num_rows:,} points (tracking.points=all shows every one)"
    look = "look at them with: python -m dse ui" + ("" if wanted.uri == DEFAULT_URI else f" uri={done.uri}")
    news.tell(f"{done.num_points:,} runs{which} of {study.name} in MLflow at {done.uri}; {look}", False)
    return "written"


def _show_in_optuna(study: StudyFolder, wanted: TrackingSettings, news: News) -> str:
    from dse.tracking import optuna_storage

    try:
        count = optuna_storage.show(study.folder, wanted.optuna or "", wanted.rule, news.seen)
    except optuna_storage.StorageError as error:
        news.tell(f"Optuna's storage was passed over: {error}; {way_out(study.folder, wanted)}", True)
        return "failed"
    if count:
        news.tell(f"{count:,} trials of {study.name} in Optuna's storage at {hidden(wanted.optuna or '')}", False)
    return "written" if count else "up to date"


def way_out(folder: Path, wanted: TrackingSettings) -> str:
    """Build the advice with the command that writes the views of a study run later."""
    root = folder.parent.parent
    where = "" if root.resolve() == Path("outputs").resolve() else f" output_dir={root}"  # the default of the command
    views = {name: place for name, place in (("uri", wanted.uri), ("optuna", wanted.optuna)) if place is not None}
    if not all(
        _is_below(place, Path.cwd()) for place in views.values()
    ):  # because a recorded place elsewhere is not trusted
        where += "".join(f" {name}={hidden(place).replace(':***@', '@')}" for name, place in views.items())
    return f"catch up with: python -m dse store sync study={folder.parent.name}{where}"


# ---------------------------------------------------------------- commands


@output_files.working_on_folders
def sync(words: Sequence[str]) -> int:
    """`store sync [study=<name>] [uri=...] [optuna=...] [output_dir=outputs] [points=auto|all|none] [repair=true]`
    `[config_dir=...]`.

    Write every finished run of one study, or of all, into the views that its own configuration names, or into those
    given here. A folder may be somebody else's, so a view that it names is written only if it is a file below the
    working folder, or if the present configuration (config_dir: the user's own) names it, too. Returns 0, or 4 if a
    view failed. Raises ConfigError.
    """
    defaults = {"study": "*", "output_dir": "outputs", "repair": "false"}
    arguments = pairs(words, defaults, optional=("uri", "optuna", "points", "config_dir"))
    everyone = StudyFolder.all(Path(arguments["output_dir"]), arguments["study"])
    studies = [study for study in everyone if _is_sound(study)]
    if not studies:
        way = "run `python -m dse study=<name>` first"
        rule = f"has no finished run below {arguments['output_dir']}/"
        raise ConfigError([Problem("study", rule, arguments["study"], way)])
    wanted = [_views_of(study, arguments) for study in studies]
    uris = dict.fromkeys(views.uri for views in wanted if views.uri is not None)
    if arguments["repair"] == "true":
        _repair(uris)
    for uri in uris:
        with suppress(TrackingError):  # told below, for the studies it holds
            reap(open_store(uri))
    counts: Counter[str] = Counter()
    with bar("sync", sum(map(total, studies, wanted))) as advance:
        for study, views in zip(studies, wanted, strict=True):
            counts += show(study, views, News(advance, _print))
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return 4 if counts["failed"] else 0


def _is_sound(study: StudyFolder) -> bool:
    """Return whether the files of a study run are valid; print the first problem if not."""
    try:
        study.check()
    except ConfigError as error:
        _print(f"{study.folder} is left out: {error.problems[0]}", True)
        return False
    return True


def _views_of(study: StudyFolder, arguments: Mapping[str, str]) -> TrackingSettings:
    """Settings of the views of a study run: those typed, else the recorded ones if trusted, else MLflow's default."""
    recorded = {key: value for key, value in study.config["tracking"].items() if key in TrackingSettings.model_fields}
    if "uri" in arguments or "optuna" in arguments:  # typed ones replace both: a recorded place may not be meant
        recorded |= {"uri": arguments.get("uri"), "optuna": arguments.get("optuna")}
    else:
        recorded |= {name: _trusted_place(study, name, recorded.get(name), arguments) for name in ("uri", "optuna")}
        if recorded["uri"] is None and recorded["optuna"] is None:
            recorded["uri"] = DEFAULT_URI
    fields = {"name": str(recorded.pop("name", "")), "description": str(recorded.pop("description", "")), **recorded}
    fields |= {key: arguments[key] for key in ("points",) if key in arguments}
    return validate_as(TrackingSettings, fields, path="")


def _trusted_place(study: StudyFolder, name: str, recorded: object, arguments: Mapping[str, str]) -> str | None:
    """Return a recorded place of a view if it may be written to. Raises ConfigError if only the record names it."""
    if recorded is None:
        return None
    if isinstance(recorded, str) and _is_below(recorded, Path.cwd()):
        return recorded
    for present in _configured_places(study, name, arguments):
        # Without the password that was not written down, PGPASSWORD or ~/.pgpass counts.
        if recorded in (present, hidden(present)):
            return present
    where, text = study.folder / "config.yaml", hidden(str(recorded))
    rule = "is neither a file below this folder nor what the present configuration names"
    way = f"look at it, and if it is yours type {name}={text.replace(':***@', '@')}; else name a place of your own"
    raise ConfigError([Problem(f"{where}: tracking.{name}", rule, text, way)])


def _is_below(place: str, here: Path) -> bool:
    """Return whether a URI (or the path of a journal) is a file below a folder, after following links."""
    # no parameters and no escapes, which could lead elsewhere
    match = re.fullmatch(r"sqlite:///([^?%]+)|([^?%:]+\.log)", place)
    path = "" if match is None else match[1] or match[2]
    return not path.startswith((":", "file:")) and here.resolve() in Path(path).resolve().parents


def _configured_places(study: StudyFolder, name: str, arguments: Mapping[str, str]) -> Iterator[str]:
    """Yield the places that the present configuration names for a study, by default and with the recorded option."""
    option = study.config["tracking"].get("name")
    folder = Path(arguments["config_dir"]) if "config_dir" in arguments else None
    for words in ([], [f"tracking={option}"] if re.fullmatch(r"[\w-]{1,80}", str(option)) else []):
        present = present_value([f"study={study.study}", *words], folder, f"tracking.{name}")
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


def _print(sentence: str, failed: bool) -> None:
    print(sentence, file=sys.stderr if failed else sys.stdout)

"""The house measured: lines, modules, arrows between rooms, circles, classes, names, comments, words, dependencies.

`python -m benchmarks.house --json`. A room is a module at the root of a package, or a package below it with all its
modules; an arrow is an import of one room by another, those for type checking counted. Figures whose names end in _all
or begin with total are of core and plug-ins, others of the core. Totals are a trend, which no test holds: `--record`
keeps those of today in `benchmarks/records/house.json`, and each run prints how they have changed since. Nothing is
installed or changed; `--times` runs the tests twice, the quick half and all of them, with the interpreter at hand.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PACKAGES = ("dse", "simulators", "search_spaces", "studies")
PLUGINS = tuple(sorted(path.name for path in ROOT.glob("plugins/*/dse_*") if path.is_dir()))
_PROOFS = ("benchmarks", "validation", "tests/campaigns")
LONG_FILE, LONG_FUNCTION, LONG_CLASS = 500, 60, 200
PAGES = ("docs/**/*.md", "*.md", "plugins/*/README.md")
"""Documentation outside of docstrings."""
RECORD = ROOT / "benchmarks" / "records" / "house.json"
STREETS = {"steps_top_rooms": "simulators.steps", "traces_top_rooms": "dse_traces"}
"""Packages that are rooms of rooms: what stands directly in them."""
SHELLS = ("Block", "KeyedBlock", "ScenarioRows", "Part", "Piece", "Batch", "Grid", "Results", "Fresh", "Points")
"""Classes that hold points on their way from a space to the store."""
DIALECT = re.compile(
    r"\b(beside|of which|those of|says?|tells?|told)\b|\bwhere (there|it|nothing|none)\b", re.IGNORECASE
)
"""Turns of phrase that are ours and not the field's."""
SYSTEMS = ("a100_8", "h100_8", "mi300x_8", "mi355x_8", "b200_8")
"""Machines whose doors are asked; `python -m benchmarks.doors` asks those of all."""
DRAWN = ("simulators", "dse")
PICTURE = ROOT / "docs" / "images" / "architecture.png"
PRONOUNS = frozenset(
    "found told one own held said made asked took given kept known some each many whole rest others".split()  # noqa: SIM905
)
"""Names that do not say what they hold."""
QUESTIONS = frozenset(["what", "whether", "of", "how", "which", "who", "whose", "where", "when", "that", "those"])
"""First words of docstrings without a subject."""
_PARTICIPLE = re.compile(r"[a-z]{2,}(ed|ing)")
_IRREGULAR = frozenset(
    "built cut drawn found given held kept known laid left made said seen sent shown spent told taken written".split()  # noqa: SIM905
)
_NO_PARTICIPLES = frozenset(
    ["embed", "embedding", "feed", "need", "seed", "setting", "shed", "speed", "string", "timing"]
)
_ADVERBS = frozenset("alone almost along apart away before beside between beyond forgetful here later there".split())  # noqa: SIM905
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|mypy:|pragma)")
_IMPORTED = """
import sys
from dse.cli import main
try:
    main(["results", "compare"])
finally:
    roots = ("dse", "simulators", "search_spaces", "studies")
    print(sum(name.partition(".")[0] in roots for name in sys.modules))
"""


@functools.cache
def modules(package: str) -> dict[str, ast.Module]:
    """Dotted name -> syntax of every module of a package, of a plug-in too."""
    trees, root = {}, ROOT if package in PACKAGES else next(ROOT.glob(f"plugins/*/{package}")).parent
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text("utf-8"))
    return trees


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the modules of `trees` that it imports, anywhere in it, or loads by a name in its text."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        graph[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    graph[name].add(inner if inner in trees else node.module)
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                graph[name] |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
        graph[name] = {target for target in graph[name] if target in trees and target != name}
    return graph


def room(module: str) -> str:
    """The room that a module belongs to: its first two names."""
    return ".".join(module.split(".")[:2])


def arrows(package: str) -> set[tuple[str, str]]:
    """(importer, imported) between the rooms of a package."""
    graph = imports(modules(package))
    pairs = {(room(source), room(target)) for source, targets in graph.items() for target in targets}
    return {pair for pair in pairs if pair[0] != pair[1] and package not in pair}


def street(package: str) -> dict[str, set[str]]:
    """Room of a package -> the rooms of it that it imports: what stands directly in it, with all below."""
    depth = package.count(".") + 2
    graph = imports(modules(package.partition(".")[0]))
    rooms: dict[str, set[str]] = {}
    for source, targets in graph.items():
        if source.startswith(f"{package}."):
            room_of_source = ".".join(source.split(".")[:depth])
            inside = {".".join(name.split(".")[:depth]) for name in targets if name.startswith(f"{package}.")}
            rooms[room_of_source] = rooms.get(room_of_source, set()) | (inside - {room_of_source})
    return rooms


def cycles(graph: Mapping[str, set[str]]) -> int:
    """Groups of modules that import one another: strongly connected components of more than one module."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    place = {name: index for index, name in enumerate(graph)}
    edges = [(place[source], place[target]) for source, targets in graph.items() for target in targets]
    rows, columns = zip(*edges, strict=True)
    matrix = coo_matrix(([True] * len(edges), (rows, columns)), shape=(len(graph), len(graph)))
    _, labels = connected_components(matrix, connection="strong")
    members = labels.tolist()
    return sum(members.count(label) > 1 for label in set(members))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Names that are bound to values: assigned, looped over, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def is_participle(name: str) -> bool:
    """Whether the name of a function is one participle and nothing else, such as `checked` or `told`."""
    word = name.strip("_")
    if "_" in word or word in _NO_PARTICIPLES:
        return False
    return word in _IRREGULAR or _PARTICIPLE.fullmatch(word) is not None


def has_no_subject(docstring: str) -> bool:
    """Whether a docstring begins with a question word instead of a noun or a verb."""
    return re.split(r"\W", docstring.strip().lower(), maxsplit=1)[0] in QUESTIONS


def _percent(flags: Sequence[bool]) -> float:
    return round(100 * sum(flags) / max(1, len(flags)), 2)


def language(trees: Mapping[str, ast.Module]) -> dict[str, float]:
    """Shares of names and docstrings that are not the field's [%]."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, documented)]
    names = [function.name for tree in trees.values() for function in _functions(tree)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return {
        "participle_names_pct": _percent([is_participle(name) for name in names]),
        "pronoun_bindings_pct": _percent([name in PRONOUNS for tree in trees.values() for name in _bindings(tree)]),
        "docstrings_without_subject_pct": _percent([has_no_subject(text) for text in texts]),
    }


def long_functions() -> list[str]:
    """`module.function` of the functions of more than `LONG_FUNCTION` lines."""
    trees = {name: tree for package in (*PACKAGES, *PLUGINS) for name, tree in modules(package).items()}
    return [
        f"{name}.{each.name}"
        for name, tree in trees.items()
        for each in _functions(tree)
        if lines_of_code(each) > LONG_FUNCTION
    ]


def long_files() -> list[str]:
    """Files of more than `LONG_FILE` lines."""
    folders = [*(ROOT / package for package in PACKAGES), *sorted(ROOT.glob("plugins/*/dse_*"))]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in paths if len(path.read_text("utf-8").splitlines()) > LONG_FILE]


def root_modules(package: str) -> list[str]:
    """Modules at the root of a package, `__init__` not counted."""
    return sorted(path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__")


def class_homonyms() -> dict[str, list[str]]:
    """Backend -> names of classes that two of the modules which it imports define; plug-ins of its own count."""
    from dse import plugins

    packages = ("simulators", "search_spaces", *PLUGINS)
    trees = {name: tree for package in packages for name, tree in modules(package).items()}
    graph, own = imports(trees), {"overlap": ("search_spaces.", "simulators.engines.")}
    homonyms = {}
    for backend, target in plugins.declarations("BACKENDS").items():
        closure, stack = set[str](), [target.partition(":")[0]]
        stack += [name for name in trees if name.startswith(own.get(backend, "-"))]
        while stack:
            name = stack.pop()
            if name in graph and name not in closure:
                closure.add(name)
                stack += graph[name]
        classes = Counter(node.name for name in closure for node in trees[name].body if isinstance(node, ast.ClassDef))
        homonyms[backend] = sorted(name for name, times in classes.items() if times > 1)
    return homonyms


def core() -> dict[str, ast.Module]:
    """Dotted name -> syntax of every module of the core."""
    return {name: tree for package in PACKAGES for name, tree in modules(package).items()}


def _classes(trees: Mapping[str, ast.Module]) -> Iterator[ast.ClassDef]:
    yield from (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def public_homonyms() -> list[str]:
    """Names that two public classes of the core share."""
    public = [
        node.name
        for name, tree in core().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "._" not in name
    ]
    return sorted(name for name, times in Counter(public).items() if times > 1)


def long_classes() -> list[str]:
    """Names of the core's classes of more than `LONG_CLASS` lines of code."""
    return sorted(each.name for each in _classes(core()) if lines_of_code(each) > LONG_CLASS)


def lines_of_code(node: ast.AST) -> int:
    """Lines of a function or class on which something begins or ends: neither docstrings nor comments."""
    documented = ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef
    docstrings = {
        id(part) for each in ast.walk(node) if isinstance(each, documented) for part in _docstring_nodes(each)
    }
    parts = [part for part in ast.walk(node) if hasattr(part, "lineno") and id(part) not in docstrings]
    return len({line for part in parts for line in (part.lineno, *_own_end(part))})


def _docstring_nodes(node: ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef) -> Iterator[ast.AST]:
    if ast.get_docstring(node) is not None:
        yield from ast.walk(node.body[0])


def _own_end(part: Any) -> Iterator[int]:
    """Yield the last line of an expression; that of a statement is one of its parts'."""
    if isinstance(part, ast.expr) and part.end_lineno is not None:
        yield part.end_lineno


def participle_classes() -> list[str]:
    """Classes of the core, of benchmarks, validation and campaigns whose name is one participle or adverb."""
    paths = [path for folder in _PROOFS for path in (ROOT / folder).rglob("*.py")]
    proofs = {str(path): ast.parse(path.read_text("utf-8")) for path in paths}
    names = {each.name for each in _classes({**core(), **proofs})}
    words = {name: re.sub("(?<!^)(?=[A-Z])", "_", name.strip("_")).lower() for name in names}
    return sorted(name for name, word in words.items() if is_participle(word) or word in _ADVERBS)


def gpu_classes() -> list[str]:
    """Classes of the core that describe a GPU."""
    return sorted(each.name for each in _classes(core()) if each.name == "Chip" or each.name.endswith("Gpu"))


def gemm_doors() -> list[str]:
    """Functions of `simulators.costs` that say what a GEMM, or any operator that multiplies, takes."""
    doors = {"gemm_cost", "operator_cost"}
    return sorted(
        f"{name}.{each.name}"
        for name, tree in modules("simulators").items()
        if name.startswith("simulators.costs")
        for each in _functions(tree)
        if each.name in doors
    )


def id_caches() -> int:
    """Calls of `id` in the core: caches that are keyed by where a value lies."""
    calls = (node for tree in core().values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(isinstance(call.func, ast.Name) and call.func.id == "id" for call in calls)


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def tests() -> dict[str, ast.Module]:
    """Path -> syntax of every file of tests, those of plug-ins too."""
    folders = ["tests", "validation/tests"]
    folders += [f"plugins/{path.parent.name}/tests" for path in sorted(ROOT.glob("plugins/*/tests"))]
    return {str(path): ast.parse(path.read_text("utf-8")) for path in _files(*folders)}


def _num_lines(files: Sequence[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


def tests_per_line() -> float:
    """Lines of the core's tests per line of the core."""
    return round(_num_lines(_files("tests")) / _num_lines(_files(*PACKAGES)), 3)


def comments_per_100(files: Sequence[Path]) -> float:
    """Comments per 100 lines of these files, instructions to tools not counted."""
    comments = 0
    for path in files:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                comments += token.type == tokenize.COMMENT and not _FOR_TOOLS.match(token.string)
    return round(100 * comments / _num_lines(files), 2)


def docs_words() -> int:
    """Words of the documentation outside of docstrings, code and tables included."""
    return sum(len(path.read_text("utf-8").split()) for pattern in PAGES for path in ROOT.glob(pattern))


def docstrings() -> list[str]:
    """Docstrings of core and plug-ins."""
    trees = [tree for package in (*PACKAGES, *PLUGINS) for tree in modules(package).values()]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def dialect_per_1000(texts: Sequence[str]) -> float:
    """Turns of phrase of our dialect in 1,000 words."""
    text = "\n".join(texts)
    return round(1000 * len(DIALECT.findall(text)) / max(1, len(text.split())), 2)


def top_rooms(package: str) -> list[str]:
    """Modules and packages that stand directly in a package."""
    depth = package.count(".") + 1
    names = [name.split(".") for name in modules(package.partition(".")[0]) if name.startswith(f"{package}.")]
    return sorted({parts[depth] for parts in names})


def shells() -> list[str]:
    """Classes of `SHELLS` that there are in `dse`."""
    return sorted(each.name for each in _classes(modules("dse")) if each.name in SHELLS)


def copied_gpu_lines() -> int:
    """Lines of files of GPUs that an earlier file has in the same order: of the file that shares most of them."""
    texts = [
        [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        for path in sorted(ROOT.glob("conf/gpu/*"))
    ]
    copied = 0
    for place, text in enumerate(texts):
        matches = [SequenceMatcher(None, other, text, autojunk=False).get_matching_blocks() for other in texts[:place]]
        copied += max((sum(match.size for match in blocks) for blocks in matches), default=0)
    return copied


def dependencies() -> list[str]:
    """Requirements of the core, without its extras."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])


def environment_mb() -> float:
    """Megabytes (10^6 bytes) of the installed files of the core's requirements and of theirs, compiled ones not."""
    from packaging.requirements import Requirement

    sizes, stack = dict[str, float](), [(Requirement(text).name, Requirement(text).extras) for text in dependencies()]
    while stack:
        name, extras = stack.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in sizes:
            continue
        distribution = importlib.metadata.distribution(name)
        files = [file.locate() for file in distribution.files or () if file.suffix != ".pyc"]
        sizes[key] = sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).is_file())
        for text in distribution.requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                stack.append((inner.name, inner.extras))
    return round(sum(sizes.values()) / 1e6)


def size() -> dict[str, float]:
    """Lines, classes and caches of the core, words of its pages, weight of what it needs."""
    plugins = [path for folder in sorted(ROOT.glob("plugins/*/dse_*")) for path in sorted(folder.rglob("*.py"))]
    texts, pages = docstrings(), [path.read_text("utf-8") for pattern in PAGES for path in ROOT.glob(pattern)]
    return {
        "total_lines": _num_lines([*_files(*PACKAGES), *plugins]),
        "core_lines": _num_lines(_files(*PACKAGES)),
        "docstring_words": sum(len(text.split()) for text in texts),
        "docstring_dialect_per_1000": dialect_per_1000(texts),
        "docs_dialect_per_1000": dialect_per_1000(pages),
        "comments_per_100_plugins": comments_per_100(plugins),
        **{name: len(top_rooms(package)) for name, package in STREETS.items()},
        "shells": len(shells()),
        "copied_gpu_lines": copied_gpu_lines(),
        "tests_per_line": tests_per_line(),
        "gpu_classes": len(gpu_classes()),
        "gemm_doors": len(gemm_doors()),
        "id_caches": id_caches(),
        "classes_over_200": len(long_classes()),
        "homonyms": len(public_homonyms()),
        "participle_classes": len(participle_classes()),
        "pronoun_bindings_tests_pct": language(tests())["pronoun_bindings_pct"],
        "comments_per_100": comments_per_100(_files(*PACKAGES)),
        "core_dependencies": len(dependencies()),
        "core_environment_mb": environment_mb(),
        "docs_words": docs_words(),
    }


def backend_members() -> int:
    """Members that a backend must have: those of the protocol `dse.backend.Simulator`."""
    tree = modules("dse")["dse.backend"]
    (protocol,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Simulator")
    return sum(isinstance(node, ast.AnnAssign | ast.FunctionDef) for node in protocol.body)


def modules_imported_by_compare() -> int:
    """Own modules that `compare` has imported when it refuses to compare nothing."""
    done = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout.split()[-1])


def measure() -> dict[str, float]:
    """All figures but times of tests."""
    from benchmarks.doors import disagreements
    from benchmarks.point_trip import point_trip

    trees = core()
    return {
        **size(),
        "root_modules_dse": len(root_modules("dse")),
        "root_modules_simulators": len(root_modules("simulators")),
        "arrows_dse": len(arrows("dse")),
        "arrows_simulators": len(arrows("simulators")),
        "cycles": cycles(imports(trees)),
        **language(trees),
        "files_over_500": len(long_files()),
        "functions_over_60": len(long_functions()),
        "class_homonyms": sum(map(len, class_homonyms().values())),
        "backend_members": backend_members(),
        "modules_imported_by_compare": modules_imported_by_compare(),
        "doors_disagree": sum(map(len, disagreements(SYSTEMS).values())),
        **point_trip(),
    }


def floors(package: str) -> list[list[str]]:
    """Names of rooms, from the highest floor to the lowest, as the import contract of the package says."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == package)
    return [[name.strip(" ()") for name in each.split("|")] for each in layers]


def drawing() -> str:
    """What the picture shows, as JSON: plug-ins, rooms with numbers of modules floor by floor, arrows."""
    shown: dict[str, Any] = {"plugins": list(PLUGINS)}
    for package in DRAWN:
        counts = Counter(room(name) for name in modules(package))
        rooms = [{name: counts[f"{package}.{name}"] for name in names} for names in floors(package)]
        shown[package] = {"floors": rooms, "arrows": sorted(map(list, arrows(package)))}
    return json.dumps(shown, sort_keys=True)


def drawn(file: Path) -> str:
    """What a picture says that it shows; "" where it says nothing."""
    from PIL import Image

    with Image.open(file) as image:
        return str(image.info.get("Description", ""))


def draw(file: Path) -> None:
    """Draw the rooms of `DRAWN` and their arrows; the file says in its metadata what it shows."""
    import matplotlib.pyplot as plt

    shown = json.loads(drawing())
    figure, panels = plt.subplots(1, 2, figsize=(15, 8.5), width_ratios=(1, 1.15), layout="constrained")
    for panel, package in zip(panels, DRAWN, strict=True):
        _draw_floors(panel, package, **shown[package])
    plugins = textwrap.fill(", ".join(name.removeprefix("dse_") for name in shown["plugins"]), 120)
    figure.suptitle(
        f"plug-ins  →  studies  →  search_spaces  →  simulators  →  dse\nplug-ins: {plugins}\n"
        "An arrow means: imports. A number counts the modules of a package.",
        fontsize=13,
    )
    figure.savefig(file, dpi=100, metadata={"Description": drawing()})


def _draw_floors(
    panel: Axes, package: str, *, floors: Sequence[Mapping[str, int]], arrows: Sequence[tuple[str, str]]
) -> None:
    """Draw rooms as boxes with the number of their modules, floors above one another, arrows behind them."""
    widest = max(map(len, floors))
    places = {}
    for height, names in enumerate(reversed(floors)):
        for index, name in enumerate(names):
            places[f"{package}.{name}"] = ((index - (len(names) - 1) / 2) * 1.25, height)
    for source, target in arrows:
        if source in places and target in places:
            style = {"arrowstyle": "-|>", "color": "#7f7f7f", "alpha": 0.45, "linewidth": 0.8}
            panel.annotate("", places[target], places[source], arrowprops={**style, "shrinkA": 14, "shrinkB": 14})
    for name, count in (item for names in floors for item in names.items()):
        label = name + (f" ({count})" if count > 1 else "")
        colours = {"facecolor": "#dce9f5" if count > 1 else "white", "edgecolor": "#4c72b0"}
        box = {"boxstyle": "round,pad=0.4", **colours}
        panel.text(*places[f"{package}.{name}"], label, ha="center", va="center", fontsize=9.5, bbox=box)
    panel.set(xlim=(-0.65 * widest - 0.2, 0.65 * widest + 0.2), ylim=(-0.6, len(floors) - 0.4), title=package)
    panel.axis("off")


def times() -> dict[str, float]:
    """Seconds of the quick half of the tests, and of all that `make test` runs."""
    run, seconds = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--hypothesis-profile", "ci"], {}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as `make`
    for name, choice in (("fast_s", ["-m", "not slow and not more and not nightly"]), ("test_s", [])):
        began = time.monotonic()
        subprocess.run([*run, *choice], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds[name] = round(time.monotonic() - began, 1)
    return seconds


def changes(figures: Mapping[str, float]) -> str:
    """Figures with what was recorded of each, and the difference."""
    recorded = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    lines = [f"{'figure':<34}{'now':>12}{'recorded':>12}{'change':>12}"]
    for name, value in figures.items():
        past = recorded.get(name)
        rest = "" if past is None else f"{past:>12g}" + (f"{value - past:>+12.4g}" if value != past else "")
        lines.append(f"{name:<34}{value:>12g}{rest}")
    return "\n".join(lines)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help="keep the figures, which later runs are compared with")
    parser.add_argument("--times", action="store_true", help="run the tests, and print how long they took too")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the rooms and their arrows")
    words = parser.parse_args()
    if words.draw:
        draw(words.draw)
        return 0
    figures = {**measure(), **(times() if words.times else {})}
    print(json.dumps(figures, indent=2) if words.json else changes(figures))
    if words.record:
        RECORD.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Mistakes of newcomers, as they are typed: each is refused in at most three lines, and what these suggest works."""

from __future__ import annotations

import ast
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dse import plugins
from dse.cli import main
from dse.config.compose import request
from dse.config.options import overrides, own_folder, plural
from dse.errors import ConfigError
from dse.shell.help import list_text
from dse.study.plan import plan
from tests.support import CONF, REPOSITORY

SOURCES = ("dse", "simulators", "search_spaces", "studies", "plugins")
FILES: dict[str, str | bytes] = {
    "my_gemms.csv": "name,m,n,k\nx,4096,8192,4096\n",
    "other_columns.csv": "nm,m,n,k\nx,4096,8192,4096\n",
    "empty.csv": "",
    "header.csv": "name,m,n,k\n",
    "no_header.csv": "x,4096,8192,4096\n",
    "semicolons.csv": "name;m;n;k\nx;4096;8192;4096\n",
    "tabs.csv": "name\tm\tn\tk\nx\t4096\t8192\t4096\n",
    "capitals.csv": "Name,M,N,K\nx,4096,8192,4096\n",
    "thousands.csv": 'name,m,n,k\nx,"4,096",8192,4096\n',
    "hole.csv": "name,m,n,k\nx,4096,8192,\n",
    "text.csv": "name,m,n,k\nx,4096,8192,many\n",
    "twice.csv": "name,m,n,k\nx,4096,8192,4096\nx,1,2,3\n",
    "more_columns.csv": "name,m,n,k,batch\nx,4096,8192,4096,2\n",
    "binary.csv": b"\xff\xfe\x00\x01",
    "no_database.db": b"no database" * 100,
    "folder/my.csv": "name,m,n,k\n",
    "own/system/here.yaml": "defaults: [mi300x_8, _self_]\nname: here\n",
    "tab/system/mine.yaml": "name: mine\ngpu:\n\tnum_cus: 3\n",
    "open/system/mine.yaml": "name: mine\nlist: [1, 2\n",
    "colon/system/mine.yaml": "name: mine\ndescription: one: two\n",
    "yes/system/mine.yaml": "name: mine\nnum_gpus: yes\n",
    "slash/system/mine.yaml": "defaults:\n  - gpu: mi300x\n  - _self_\nname: mine\n",
}
SYSTEM = (CONF / "system" / "mi300x_8.yaml").read_text("utf-8").replace("name: mi300x_8", "name: mine")
SYSTEMS = {
    "typo": SYSTEM.replace("cost_weights: {", "cost_weigths: {"),
    "part": SYSTEM.replace("/gpu: mi300x", "/gpu: mi300"),
    "lacks": SYSTEM.replace("  - /node: mi300x_mesh_8\n", ""),
    "named": SYSTEM.replace("name: mine", "name: other"),
    "good": SYSTEM,
}
S = "study=ficco_sweep"
CUS = f"{S} system.gpu.num_cus"
LINK = f"{S} system.node.link_bytes_per_s"
SPACE = f"{S} +space.system.gpu.num_cus"
Mistake = tuple[str, str] | tuple[str, str, str]
"""What is typed, what the message names, and, where nothing that can be typed is suggested, what it says instead."""

NO_STUDY: list[Mistake] = [
    ("ficco_sweep", "ficco_sweep"),
    ("ficco_swep", "ficco_swep"),
    ("ficco-sweep seed=3", "ficco-sweep"),
    ("study ficco_sweep", "study", "write study=<name>"),
    ("study = ficco_sweep", "study", "write study=<name>"),
    ("study= ficco_sweep", "study", "write `study=ficco_sweep`"),
    ("study==ficco_sweep", "study==ficco_sweep", "cannot be parsed"),
    ("study:ficco_sweep", "study:ficco_sweep"),
    ("study=ficco_sweep,", "study=ficco_sweep,", "cannot be parsed"),
    ("study=", "study", "known here: "),
    ("study", "study"),
    ("--study ficco_sweep", "--study", "write study=<value>"),
    ("--study=ficco_sweep", "--study=ficco_sweep"),
    ("studdy=ficco_sweep", "studdy"),
    ("Study=ficco_sweep", "Study"),
    ("study=Ficco_Sweep", "study"),
    ("study=ficco-sweep", "study"),
    ("study=ficco_sweep.yaml", "study"),
    ("study='ficco sweep'", "study"),
    ("study=fico_sweep", "study"),
    ("study=ficco_sweep,conccl", "study", "write one value"),
    ("study=ficco_sweep study=ficco", "study", "keep one of them"),
    ("dse study=ficco_sweep", "dse", "known here: run"),
    ("h100_8", "h100_8"),
    ("serve", "serve"),
]
PATHS: list[Mistake] = [
    (f"{S} num_cus=228", "num_cus"),
    (f"{S} gpu.num_cus=228", "gpu.num_cus"),
    (f"{S} system.num_cus=228", "system.num_cus"),
    (f"{S} system.gpu.cus=228", "system.gpu.cus"),
    (f"{S} system.gpu.num_cuz=228", "system.gpu.num_cuz"),
    (f"{S} system.gpu.num-cus=228", "system.gpu.num-cus"),
    (f"{S} System.GPU.num_cus=228", "System.GPU.num_cus"),
    (f"{S} system/gpu/num_cus=228", "system/gpu/num_cus"),
    (f"{S} +system.gpu.num_sms=228", "system.gpu.num_sms"),
    (f"{S} --system.gpu.num_cus=228", "--system.gpu.num_cus=228"),
    (f"{S} system.gpu.num_cus 228", "system.gpu.num_cus", "write <path>=<value>"),
    (f"{S} system.gpu.num_cus:228", "system.gpu.num_cus:228", "write <path>=<value>"),
    (f"{S} system.gpu.num_cus", "system.gpu.num_cus", "write <path>=<value>"),
    (
        f"{S} system.gpu.kernel_launch_us=3",
        "system.gpu.kernel_launch_us",
        "did you mean `system.gpu.kernel_launch_s=3`?",
    ),
    (f"{S} system.node.link_gbps=512", "system.node.link_gbps", "link_bytes_per_s"),
    (f"{S} system.node.link_bandwidth='64 GB/s'", "system.node.link_bandwidth", "link_bytes_per_s"),
    (f"{S} system.gpu=h100", "system.gpu"),
    (f"{S} trials=400", "trials"),
    (f"{S} budget=400", "budget"),
    (f"{S} budget.trial=400", "budget.trial"),
    (f"{S} jobs=4", "jobs"),
    (f"{S} objective=[makespan_s]", "objective"),
    (f"{S} config_dir=good", "config_dir"),
    (f"{S} --config_dir=good", "--config_dir", "did you mean `--config-dir`?"),
    (f"{S} '~schedule.prio'", "schedule.prio"),
    (f"{S} hydra.job.name=x", "hydra.job.name", "leave it out"),
    (f"{S} -x", "-x", "known here: --cfg"),
    ("plan --nonsense", "--nonsense", "known here: --cfg"),
    (f"{S} --dryrun", "--dryrun", "did you mean `--dry-run`?"),
    (f"{S} --verbose=true", "--verbose=true"),
    (f"{S} report", "report", "write <path>=<value>"),
]
VALUES: list[Mistake] = [
    (f"{CUS}=1,024", "system.gpu.num_cus", "is one value"),
    (f"{CUS}=64,128", "system.gpu.num_cus"),
    (f"{CUS}=[64,128]", "system.gpu.num_cus"),
    (f"{CUS}='range(64,304,16)'", "system.gpu.num_cus"),
    (f"{CUS}=228.5", "system.gpu.num_cus"),
    (f"{CUS}=\"'228'\"", "system.gpu.num_cus", "whole number"),
    (f"{CUS}=-4", "system.gpu.num_cus = -4"),
    (f"{CUS}=0", "system.gpu.num_cus = 0"),
    (f"{CUS}=1e9", "system.gpu.num_cus = 1000000000.0"),
    (f"{CUS}=10%", "system.gpu.num_cus = '10%'", "whole number"),
    (f"{CUS}=two", "system.gpu.num_cus = 'two'", "whole number"),
    (f"{CUS}=null", "system.gpu.num_cus", "whole number"),
    (f"{CUS}=yes", "system.gpu.num_cus = 'yes'", "YAML reads this otherwise"),
    (f"{CUS}=true", "system.gpu.num_cus = True", "whole number"),
    (f"{LINK}=64", "system.node.link_bytes_per_s = 64"),
    (f"{LINK}=64 GB/s", "GB/s", "without blanks or in quotes"),
    (f"{LINK}='64 GB'", "system.node.link_bytes_per_s = '64 GB'", "'1.5 GB/s' for example"),
    (f"{LINK}='64 GBps'", "system.node.link_bytes_per_s = '64 GBps'", "'1.5 GB/s' for example"),
    (f"{LINK}='64,5 GB/s'", "system.node.link_bytes_per_s = '64,5 GB/s'", "is one value"),
    (f"{LINK}='64 GHz'", "system.node.link_bytes_per_s = '64 GHz'", "wrong dimension"),
    (f"{LINK}=“64 GB/s”", "system.node.link_bytes_per_s=“64", "cannot be parsed"),
    (f"{S} system.gpu.hbm_bytes=192", "system.gpu.hbm_bytes = 192"),
    (f"{S} system.gpu.hbm_bytes=192G", "system.gpu.hbm_bytes = '192G'", "'1.5 GB' for example"),
    (f"{S} system.gpu.kernel_launch_s=3", "system.gpu.kernel_launch_s = 3"),
    (f"{S} system.gpu.kernel_launch_s='-3 us'", "system.gpu.kernel_launch_s = '-3 us'", "greater than or equal to 0"),
    (f"{S} system.gpu.gemm.cache_miss=50%", "system.gpu.gemm.cache_miss = '50%'", "without quotes or unit"),
    (f"{S} system.gpu.gemm.cache_miss=50", "system.gpu.gemm.cache_miss = 50"),
    (f"{S} system.gpu.gemm.cache_miss=0,5", "system.gpu.gemm.cache_miss", "is one value"),
    (f"{S} system.node.topology=Mesh", "system.node.topology = 'Mesh'"),
    (f"{S} system.node.topology=torus", "system.node.topology = 'torus'", "'mesh', 'switch', 'ring' or 'pcie'"),
    (f"{S} schedule.comm_engine=DMA", "schedule.comm_engine = 'DMA'"),
    (f"{S} budget.trials=10k", "budget.trials = '10k'", "whole number"),
    (f"{S} budget.trials=0", "budget.trials = 0"),
    (f"{S} budget.trials=1e12", "budget.trials"),
    (f"{S} seed=-1", "seed = -1"),
    (f"{S} seed=1,2", "seed = '1,2'", "write one value"),
    (f"{S} seed=random", "seed = 'random'", "whole number"),
    (f"{S} executor.jobs=0", "executor.jobs = 0", "-1 for one per core"),
    (f"{S} timeline=maybe", "timeline = 'maybe'"),
    (f"{S} resume=fork", "resume = 'fork'"),
    (f"{S} resume=true", "resume = True"),
    (f"{S} workload.only=g4", "workload.only = 'g4'"),
    (f"{S} workload.only=g1,g4", "workload.only = 'g1,g4'"),
    (f"{S} workload.only=[g44]", "workload.only = 'g44'"),
    (f"{S} workload.only=[g1, g4]", "workload.only=[g1,", "cannot be parsed"),
    (f"{S} study.objectives=makespan_s", "study.objectives = 'makespan_s'"),
    (f"{S} study.objectives=[makespan]", "study.objectives = 'makespan'"),
    (f"{S} study.objectives=[latency]", "study.objectives = 'latency'", "known here: cil"),
    (f"{S} study.baseline='{{schedule.name:sreial}}'", "study.baseline = 'sreial'"),
    (f"{S} store.url=results.db", "store.url = 'results.db'"),
    (f"{S} tracking.uri=mlflow.db", "tracking.uri = 'mlflow.db'"),
    (f"{S} tracking.uri=localhost:5000", "tracking.uri = 'localhost:5000'"),
]
GROUPS: list[Mistake] = [
    (f"{S} search=nsga", "search = 'nsga'"),
    (f"{S} search=NSGA2", "search = 'NSGA2'"),
    (f"{S} search=bayesian", "search = 'bayesian'", "known here: archive"),
    (f"{S} simulator=analytical", "simulator = 'analytical'"),
    (f"{S} simulator.name=evnt", "simulator = 'evnt'"),
    (f"{S} system=MI300X", "system = 'MI300X'"),
    (f"{S} system=h100", "system = 'h100'"),
    (f"{S} gpu=h100_8", "gpu = 'h100_8'"),
    (f"{S} gpu=tpu_v5", "gpu = 'tpu_v5'", "python -m dse gpus"),
    (f"{S} schedule=ficco", "schedule = 'ficco'", "another group: `study=ficco`"),
    (f"{S} tracking=off", "tracking = 'off'", "known here: mlflow, none"),
    (f"{S} figures=no", "figures"),
    (f"{S} store=sqllite", "store = 'sqllite'"),
    (f"{S} --config-dir=nowhere", "--config-dir = 'nowhere'", "is no folder"),
    (f"{S} --config-dir=good system=mein", "system = 'mein'"),
    (f"{S} system=mine", "system = 'mine'", "python -m dse systems"),
]
SPACES: list[Mistake] = [
    (f"{SPACE}=64:304:16", "space.system.gpu.num_cus = '64:304:16'", "whole number"),
    (f"{SPACE}=range(64, 304, 16)", "+space.system.gpu.num_cus=range(64,", "cannot be parsed"),
    (f"{SPACE}=“range(64,304,16)”", "+space.system.gpu.num_cus=“range(64,304,16)”", "other characters in quotes"),
    ("study=plan modle=llama3_8b", "modle", "model=llama3_8b"),
    (f"{S} space.schedule.num_chunks='range(1,3000)'", "num_chunks = '1027 to 2999'", "range(1,1025,1)"),
    (f"{SPACE}='range(304,64,16)'", "space.system.gpu.num_cus = 'range(304,64,16)'", "range(a,b,step)"),
    (f"{SPACE}='range(64,304,0)'", "space.system.gpu.num_cus = 'range(64,304,0)'", "a step other than 0"),
    (f"{SPACE}='range(64-304)'", "+space.system.gpu.num_cus=range(64-304)", "cannot be parsed"),
    (f"{SPACE}='choice[64,128]'", "+space.system.gpu.num_cus=choice[64,128]", "mismatched input '['"),
    (f"{SPACE}='(64,128)'", "+space.system.gpu.num_cus=(64,128)", "extraneous input '('"),
    (f"{SPACE}='linspace(64,304,5)'", "+space.system.gpu.num_cus=linspace(64,304,5)", "Unknown function 'linspace'"),
    (f"{SPACE}='choice(0,64)'", "space.system.gpu.num_cus = 0"),
    (f"{SPACE}=", "space.system.gpu.num_cus", "whole number"),
    (
        f"{S} +space.+system.gpu.num_cus='choice(64,128)'",
        "+space.+system.gpu.num_cus",
        "token recognition error at: '.'",
    ),
    (f"{S} +space.gpu.num_cus='choice(64,128)'", "space.gpu.num_cus"),
    (f"{S} +space.space.system.gpu.num_cus='choice(64,128)'", "space.space.system.gpu.num_cus"),
    (f"{S} +space.system='choice(mi300x_8,h100_8)'", "space.system"),
    (f"{S} +space.system.node.topology='choice(mesh,torus)'", "space.system.node.topology = 'torus'"),
    (f"{S} +space.system.gpu.hbm_bytes_per_s='choice(6e12,4 THz)'", "space.system.gpu.hbm_bytes_per_s = '4 THz'"),
    (f"{S} sweep.system.gpu.num_cus='choice(64,128)'", "sweep.system.gpu.num_cus"),
    (f"{S} +space.budget.trials='choice(1,2)'", "space.budget.trials", "leave it out"),
]
OF_FILES: list[Mistake] = [
    (f"{S} workload.shapes=my_gems.csv", "workload.shapes = 'my_gems.csv'"),
    (f"{S} workload.shapes=absent.parquet", "workload.shapes = 'absent.parquet'", "is no file"),
    (f"{S} 'workload.shapes=data\\gemms.csv'", "workload.shapes", "separate folders by /"),
    (f"{S} workload.shapes=~/nowhere.csv", "workload.shapes=~/nowhere.csv", "nowhere.csv"),
    (f"{S} workload.shapes=folder", "workload.shapes = 'folder'", "is no plain file but a folder"),
    (f"{S} workload.shapes=other_columns.csv", "other_columns.csv, line 2.nm", "is not a known key"),
    (f"{S} workload.shapes=empty.csv", "empty.csv, line 1", "its first line names the columns: m,n,k"),
    (f"{S} workload.shapes=header.csv", "workload.shapes = 'header.csv'", "holds no row"),
    (f"{S} workload.shapes=no_header.csv", "no_header.csv, line 1", "has no column m, n, k"),
    (f"{S} workload.shapes=semicolons.csv", "semicolons.csv, line 1", "separate columns by commas"),
    (f"{S} workload.shapes=tabs.csv", "tabs.csv, line 1", "separate columns by commas"),
    (f"{S} workload.shapes=capitals.csv", "capitals.csv, line 1", "rename `M`: m"),
    (f"{S} workload.shapes=thousands.csv", "thousands.csv, line 2.m", "whole number"),
    (f"{S} workload.shapes=hole.csv", "hole.csv, line 2.k", "is missing"),
    (f"{S} workload.shapes=text.csv", "text.csv, line 2.k = 'many'", "whole number"),
    (f"{S} workload.shapes=twice.csv", "workload.shapes = 'x'", "names a shape twice"),
    (f"{S} workload.shapes=more_columns.csv", "more_columns.csv, line 2.batch", "known here"),
    (f"{S} workload.shapes=binary.csv", "workload.shapes = 'binary.csv'", "save it as UTF-8"),
    (f"{S} system=here", "system = 'here'", "python -m dse systems"),
    (f"{S} --config-dir=tab system=mine", "tab/system/mine.yaml:3", "spaces, not tabs"),
    (f"{S} --config-dir=open system=mine", "open/system/mine.yaml:2", "a bracket is left open"),
    (f"{S} --config-dir=colon system=mine", "colon/system/mine.yaml:2", "is not YAML"),
    (f"{S} --config-dir=yes system=mine", "yes/system/mine.yaml:2", "would be read as true or false"),
    (f"{S} --config-dir=slash system=mine", "system/mine", "- /gpu: mi300x"),
    (f"{S} --config-dir=typo system=mine", "system.cost_weigths", "did you mean `system.cost_weights`?"),
    (f"{S} --config-dir=part system=mine", "system/mine", "names gpu/mi300"),
    (f"{S} --config-dir=lacks system=mine", "system.node", "is missing"),
    (f"{S} --config-dir=named system=mine", "system.name", "write name: mine"),
    (f"{S} tracking=none output_dir=my_gemms.csv", "my_gemms.csv", "environment failed"),
]
COMMANDS: list[Mistake] = [
    ("results report", "study", "write study=<name>"),
    ("results report ficco_sweep", "ficco_sweep", "known here: output_dir, study"),
    ("results report --study ficco_sweep", "--study", "write study=<value>"),
    ("results report stduy=ficco_sweep", "stduy=ficco_sweep"),
    ("results report study=ficco_swep", "study = 'ficco_swep'"),
    ("results report study=ficco_sweep", "study = 'ficco_sweep'", "python -m dse study=ficco_sweep"),
    ("reprot study=ficco_sweep", "reprot", "results report"),
    ("--dry_run study=ficco_sweep", "--dry_run"),
    ("--dry-run ficco_sweep", "ficco_sweep"),
    ("results compare ficco_sweep", "compare", "needs two runs"),
    ("results compare a b c", "compare", "needs two runs"),
    ("results timeline study=ficco_sweep", "key", "write key=<name>"),
    ("results timeline study=ficco_sweep ky=3a", "ky=3a"),
    ("results importance study=ficco_sweep method=shap", "method = 'shap'", "known here: fanova, ped_anova"),
    ("results rules study=ficco_sweep depht=3", "depht=3"),
    ("machine show h100", "system = 'h100'"),
    ("plan model=llama3_8b --sytem=h100_8", "--sytem=h100_8", "is no flag"),
    ("plan model=llama3_8b system=[h100_8,h20]", "system = 'h20'", "h20_8"),
    ("machine show tpu_v5", "system = 'tpu_v5'", "known here: a100_40gb_8"),
    ("ui 5001", "5001", "known here: open, port, uri"),
    ("ui port=abc", "port = 'abc'", "from 1 to 65535"),
    ("ui --port=5001", "--port=5001"),
    ("ui uri=sqlite:///absent.db", "absent.db", "run a study with tracking first"),
    ("ui uri=sqlite:///no_database.db", "no_database.db", "sync repair=true"),
    ("store check output_dir=nowhere", "output_dir = 'nowhere'", "run a study first"),
    ("profile memory data=other_columns.csv", "other_columns.csv, line 1", "has no column address"),
    ("profile memory data=folder", "data = 'folder'", "name a .parquet, .csv, .traceg"),
]
ALL = [*NO_STUDY, *PATHS, *VALUES, *GROUPS, *SPACES, *OF_FILES, *COMMANDS]
ABSENT = {"profile memory", "results importance", "results rules"} - set(plugins.names("command"))
_EVERY = 4  # of those that are composed, so many are tried in the quick half of the tests


def cases() -> Iterator[object]:
    """Every mistake; of those that take a composed configuration only some are quick enough for every run."""
    for place, mistake in enumerate(ALL):
        is_quick = not mistake[0].startswith("study=") or place % _EVERY == 0
        marks = [] if is_quick else [pytest.mark.slow]
        if " ".join(mistake[0].split()[:2]) in ABSENT:
            marks = [pytest.mark.skip("is a command of a plug-in that is not installed")]
        yield pytest.param(*mistake, *[""] * (3 - len(mistake)), marks=marks, id=mistake[0])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the mistakes name."""
    texts: dict[str, str | bytes] = {**FILES, **{f"{name}/system/mine.yaml": text for name, text in SYSTEMS.items()}}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.chdir(tmp_path)


def typed(line: str) -> list[str]:
    """The words of a command line; of the study with the schedule that is composed fastest, where none is chosen."""
    words = shlex.split(line)
    return [*words, "schedule=serial"] if line.startswith(f"{S} ") and "schedule" not in line else words


def suggestions(message: str) -> list[str]:
    """What a message suggests to type: texts in backticks, whole words before parts of words."""
    texts = re.findall(r"`([^`]+)`", message)
    return sorted(texts, key=lambda text: "=" not in text and not text.startswith("python -m dse"))


def corrected(words: Sequence[str], message: str, suggestion: str) -> list[str]:
    """The words of a command line with what a message suggests in place of what it names."""
    if suggestion.startswith("python -m dse"):
        return shlex.split(suggestion)[3:]
    named = re.split(r": (?=is |has |must |was |names |cannot |ends |deletes )", message.strip(), maxsplit=1)[0]
    path, _, value = named.partition(" = ")
    for count in range(len(words), 0, -1):
        for place in range(len(words) - count + 1):
            part = words[place : place + count]
            key = part[0].lstrip("+~").partition("=")[0].removesuffix(".name")
            is_named = " ".join(part) == named or (count == 1 and key in (path, path.lstrip("+~"), named))
            if is_named or (count == 1 and "=" not in suggestion and part[0] == value.strip("'")):
                old = path if path.lstrip("+~") in part[0] and "." in suggestion else value.strip("'") or named
                new = (
                    shlex.split(suggestion)
                    if "=" in suggestion or suggestion[0] == "'"
                    else [part[0].replace(old, suggestion)]
                )
                return [*words[:place], *new, *words[place + count :]]
    raise AssertionError(f"{named!r} is no part of {words}")


def refusal(words: Sequence[str]) -> str:
    """Why a command line is refused, short of evaluating anything; "" where it is not."""
    typed = [word for word in words if word != "--dry-run"]
    try:
        if any(plugins.target("command", " ".join(words[:count])) for count in (1, 2)):
            return ""
        if list_text(words[0], words[1:], None):
            return ""
        words = typed
        if not any(word.startswith("study=") for word in words):
            words = [S, *words]
        plan(request(overrides(words), own_folder(words)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.one_in(16)
@pytest.mark.parametrize(("line", "names", "says"), list(cases()))
def test_a_mistake_is_refused_in_three_lines_and_what_these_suggest_works(
    line: str, names: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = typed(line)
    assert main(words) in (2, 4)
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert names in message
    assert says in message
    problems = message.splitlines()[1:] or [message]
    for problem in problems:
        assert len(textwrap.wrap(problem, 100)) <= 3, problem
    problem = next(problem for problem in problems if names in problem)
    if not says:
        assert suggestions(problem), problem
        meant = corrected(words, problem, suggestions(problem)[0])
        assert refusal(meant) == "", meant


def test_sixty_mistakes_are_distinct() -> None:
    assert len({line for line, *_ in ALL}) == len(ALL) >= 60
    assert sum(len(mistake) == 2 for mistake in ALL) >= 60


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["ui", f"port={taken.getsockname()[1]}"]) == 2
    assert "choose another port" in capsys.readouterr().err


@pytest.mark.slow
def test_a_python_without_the_packages_says_which_one_has_them(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "dse", "study=ficco_sweep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert ".venv/bin/python -m dse" in done.stderr
    assert len(textwrap.wrap(done.stderr, 100)) <= 3


def _printed_commands() -> Iterator[str]:
    """What stands after `python -m dse` in texts of the program, with `?` for what is put in when it is printed."""
    files = (path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*.py") if "tests" not in path.parts)
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [str(part.value) if isinstance(part, ast.Constant) else "?" for part in parts]
        yield from re.findall(r"python -m dse ([^`\n;,()]+)", "".join(texts))


@pytest.mark.slow
def test_every_command_that_is_printed_is_one_and_examples_of_help_can_be_typed() -> None:
    commands = {*plugins.names("command"), "run"}
    verbs = {name.partition(" ")[0] for name in commands}
    lists = {plural(group) for group in plugins.declarations("GROUPS")} | {"options"}
    for text in set(_printed_commands()):
        words = text.split()
        is_named = " ".join(words[:2]) in commands or words[0] in (*commands, *lists)
        is_general = words[0][0] in "?<." or (words[0] in verbs and words[1:2] == ["?"])
        # a command stands first: after a study there are values and flags only
        is_study = words[0].startswith("study=") and not re.fullmatch("[a-z]+", "".join(words[1:2]))
        assert is_named or is_general or is_study, text
        assert not re.search(" (fits|shows|lists|saves|first|then) ", f"{text} "), f"{text}: quote the command"
    for name, command in plugins.declarations("COMMANDS").items():
        for example in command.examples or (command.usage,):
            assert example.startswith(name), example
            assert not re.search(r"<|\.\.\.|\[[^\]]*=", example), example


@pytest.mark.more
def test_folders_of_a_user_count_wherever_names_are_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "my_conf" / "system").mkdir(parents=True)
    (folder / "my_gpu.yaml").write_text("defaults: [h100_8, _self_]\nname: my_gpu\ngpu:\n  num_cus: 99\n")
    for words in ("show my_gpu", "list", "collective system=my_gpu pattern=all_gather"):
        for flag in ("--config-dir my_conf", "--config-dir=my_conf", "config_dir=my_conf"):
            assert main(["machine", *words.split(), *flag.split()]) == 0, capsys.readouterr().err
            assert "my_gpu" in capsys.readouterr().out
    assert main(["machine", "calibrate", "system=my_gpu", "data=none.csv", "out=x", "--config-dir", "my_conf"]) == 2
    assert "my_gpu" not in capsys.readouterr().err
    assert main(["machine", "show", "my_gpu"]) == 2
    assert main(["machine", "show", "my_gpu", "--config-dir=none"]) == 2
    assert "--config-dir = 'none': is no folder" in capsys.readouterr().err

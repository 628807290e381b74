"""Variants of GPUs: what a file inherits, where it is from, and that all doors read the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dse.cli import main
from dse.config.compose import request
from dse.config.options import list_options, own_options
from dse.config.variants import VARIANT_OF, compose_variant, load_option
from dse.errors import ConfigError
from dse.values import leaves
from simulators.hardware.machine import Gpu, System, tree_of, tree_of_gpu
from simulators.workloads.model_zoo import option_tree

MINE = """\
# @package system.gpu
name: my_gpu
description: an H100 with more memory, fewer CUs and no known clock under load
variant_of: h100
num_cus: 120
hbm_bytes: 144 GB
loaded: null
efficiency:
  bf16: {sustained: 0.7}
sources:
  num_cus: {provenance: vendor, source: data sheet}
  hbm_bytes: {provenance: vendor, source: data sheet}
  efficiency.bf16.sustained: {provenance: measured, source: a GEMM of 8192 x 8192 x 8192}
"""
SHIPPED = [name for name in list_options("gpu") if VARIANT_OF in (Path("conf/gpu") / f"{name}.yaml").read_text("utf-8")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with one variant."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "my_gpu.yaml").write_text(MINE)
    return tmp_path


def write(folder: Path, name: str, **keys: Any) -> None:
    """Write the file of a GPU."""
    (folder / "gpu" / f"{name}.yaml").write_text(f"# @package system.gpu\n{yaml.safe_dump({'name': name, **keys})}")


def gpu_of(folder: Path, name: str) -> Gpu:
    """The GPU of a machine of a user's folder."""
    words = ["study=ficco_sweep", "system=h100_8", f"gpu={name}", "system.node.link_bytes_per_s=50 GB/s"]
    composed = request(words, folder)
    composed.check()
    return System.model_validate(composed.tree["system"]).gpu


def test_a_gpu_of_a_user_is_one_file_under_40_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(MINE.splitlines()) < 40
    (folder / "system").mkdir()
    lines = ("defaults: [h100_8, {override /gpu: my_gpu}, _self_]", "name: my_machine", "description: eight of them")
    (folder / "system" / "my_machine.yaml").write_text("\n".join(lines))
    assert main(["machine", "show", "my_machine", "--config-dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "that of h100" in shown
    assert "system.gpu.loaded" not in shown


def test_a_constant_that_is_inherited_is_assumed_or_a_copy(folder: Path) -> None:
    mine, h100 = gpu_of(folder, "my_gpu"), Gpu.model_validate(tree_of_gpu("h100")["gpu"])
    assert (mine.num_cus, mine.hbm_bytes) == (120, 144e9)
    assert mine.loaded is None and mine.fitted_on is None
    written = {"num_cus", "hbm_bytes", "efficiency.bf16.sustained"}
    values = {path: value for path, value, _ in leaves(h100)}
    for path, value, _ in leaves(mine):
        source, origin = mine.source(path), h100.source(path)
        if path in written:
            assert source is not None
            assert source.provenance in ("vendor", "measured")
        elif source is not None and path not in ("name", "description"):
            assert value == values[path]
            assert source.provenance == "assumed"
            assert source == origin or (source.copy_of, source.source) == ("gpu/h100", "that of h100")
            assert origin is not None
            assert (source == origin) == (origin.provenance == "assumed")


@pytest.mark.parametrize("name", SHIPPED)
def test_all_doors_read_the_same_of_a_variant(name: str) -> None:
    tree = tree_of_gpu(name)["gpu"]
    assert load_option(Path("conf/gpu") / f"{name}.yaml") == tree == option_tree("gpu", name)
    assert VARIANT_OF not in tree
    composed = request(["study=ficco_sweep", f"gpu={name}"]).tree["system"]["gpu"]
    assert Gpu.model_validate(composed) == Gpu.model_validate(tree)
    assert composed["sources"] == tree["sources"]
    assert "*id" not in yaml.safe_dump(tree)


def test_a_variant_of_a_users_is_the_same_by_both_doors(folder: Path) -> None:
    (folder / "mine.yaml").write_text("defaults: [h100_8, {override /gpu: my_gpu}, _self_]\nname: mine\n")
    with own_options(folder):
        assert System.model_validate(tree_of(str(folder / "mine.yaml"))).gpu == gpu_of(folder, "my_gpu")


def test_a_variant_may_be_one_of_another_variant(folder: Path) -> None:
    source = {"provenance": "vendor", "source": "data sheet"}
    write(folder, "nearer", variant_of="my_gpu", hbm_bytes="150 GB", sources={"hbm_bytes": source})
    nearer, mine = gpu_of(folder, "nearer"), gpu_of(folder, "my_gpu")
    assert (nearer.num_cus, nearer.hbm_bytes, nearer.loaded) == (120, 150e9, None)
    cus, rate = nearer.source("num_cus"), nearer.source("peak_hbm_bytes_per_s")
    assert cus is not None
    assert (cus.copy_of, cus.source) == ("gpu/my_gpu", "that of my_gpu")
    assert rate == mine.source("peak_hbm_bytes_per_s")


REFUSED = [
    ({"a": "h1000"}, r"gpu/a.yaml: variant_of = 'h1000': names no option of gpu.*did you mean `h100`"),
    ({"a": "a"}, r"gpu/a.yaml: variant_of = 'a': makes a circle of variants: gpu/a, gpu/a "),
    ({"a": "b", "b": "c", "c": "b"}, r"gpu/c.yaml: variant_of = 'b': makes a circle of variants"),
    ({"a": "b", "b": "c", "c": "d", "d": "e", "e": "f", "f": "h100"}, r"makes a chain of more than 4 variants"),
    ({"a": 3}, r"gpu/a.yaml: variant_of = 3: must name an option of gpu"),
    ({"a": "../system/h100_8"}, r"gpu/a.yaml: variant_of = '../system/h100_8': must name an option of gpu"),
]


@pytest.mark.parametrize(("bases", "refusal"), REFUSED)
def test_a_base_that_is_none_is_refused_by_both_doors(bases: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    for name, base in bases.items():
        write(tmp_path, name, variant_of=base)
    with pytest.raises(ConfigError, match=refusal):
        gpu_of(tmp_path, "a")
    (tmp_path / "mine.yaml").write_text("defaults: [h100_8, {override /gpu: a}, _self_]\nname: mine\n")
    with own_options(tmp_path), pytest.raises(ConfigError, match=refusal):
        tree_of(str(tmp_path / "mine.yaml"))


def test_a_base_on_top_of_other_options_is_refused(folder: Path) -> None:
    write(folder, "base", defaults=["h100", "_self_"])
    write(folder, "upon", variant_of="base")
    with pytest.raises(ConfigError, match="names an option with `defaults`"):
        gpu_of(folder, "upon")


@pytest.mark.parametrize("sources", [5, ["a"], "text"])
def test_sources_that_are_no_mapping_are_refused(sources: Any, folder: Path) -> None:
    write(folder, "bad", variant_of="h100", sources=sources)
    with pytest.raises(ConfigError, match=r"gpu/bad.yaml: sources = .*must map constants to their sources"):
        gpu_of(folder, "bad")


def test_a_number_of_a_variant_without_a_source_is_refused(folder: Path) -> None:
    write(folder, "bare", variant_of="h100", hbm_bytes="150 GB", dma={"num_engines": 3})
    (folder / "mine.yaml").write_text("defaults: [h100_8, {override /gpu: bare}, _self_]\nname: mine\n")
    with own_options(folder), pytest.raises(ValueError, match=r"no entry in `sources` for") as refused:
        System.model_validate(tree_of(str(folder / "mine.yaml")))
    bare = str(refused.value).partition("`sources` for ")[2].partition(";")[0].split(", ")
    assert bare == ["gpu.hbm_bytes", "gpu.dma.num_engines"]


NAMES = st.sampled_from("abc")
TREES = st.recursive(
    st.integers(0, 3) | st.none(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=9
).filter(lambda tree: isinstance(tree, dict))


def below(tree: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def numbers(tree: dict[str, Any], path: str = "") -> dict[str, int]:
    """Dotted path -> number."""
    inner = [numbers(value, f"{path}{name}.") for name, value in tree.items() if isinstance(value, dict)]
    direct = {f"{path}{name}": value for name, value in tree.items() if isinstance(value, int)}
    return {**direct, **{place: value for part in inner for place, value in part.items()}}


@given(base=TREES, variant=TREES)
def test_each_number_is_the_variants_or_the_bases_and_its_source_says_so(
    base: dict[str, Any], variant: dict[str, Any]
) -> None:
    measured = {path: {"provenance": "measured", "source": "base"} for path in numbers(base)}
    files = {"gpu/base": {**base, "sources": measured}}
    composed = compose_variant("gpu/variant", {**variant, VARIANT_OF: "base"}, files.get)
    sources = composed.pop("sources")
    for path, number in numbers(composed).items():
        if path in numbers(variant):
            assert number == numbers(variant)[path]
            assert path not in sources  # nobody named one
        else:
            assert number == numbers(base)[path]
            assert sources[path]["copy_of"] == "gpu/base"
    assert all(below(composed, path) == number for path, number in numbers(variant).items())
    assert files == {"gpu/base": {**base, "sources": measured}}

"""htsim beside our flows through ports: what is given to it, what is read of it, and what ours says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from validation import packet_level
from validation.packet_level import TRANSPORTS, Link, Traffic, our_seconds, simulated_seconds

LINK = Link(bytes_per_s=50e9, hop_s=0.5e-6)
STAND_IN = """#!{python}
import json, pathlib, re, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
text = pathlib.Path(given["-tm"]).read_text()
pathlib.Path({seen!r}).write_text(json.dumps({{"options": given, "matrix": text}}))
flows = re.findall(r"(\\d+)->(\\d+) id (\\d+) start 0 size (\\d+)", text)
{what}
for sender, receiver, number, size in flows:
    print(f"Flow ndp_{{sender}}_{{receiver}} flow_id {{number}} finished at {{100 + int(sender)}} total bytes {{size}}")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Programs in htsim's place, which keep what they are given in a file."""

    def make(what: str = "") -> Path:
        seen = tmp_path / "seen.json"
        for transport in TRANSPORTS.values():
            place = tmp_path / transport.program
            place.write_text(STAND_IN.format(python=sys.executable, seen=str(seen), what=what))
            place.chmod(0o755)
        monkeypatch.setenv("HTSIM", str(tmp_path))
        return seen

    return make


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        ("ring", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0)]),
        ("permutation", [(0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3)]),
        ("incast", [(port, 0) for port in range(1, 8)]),
        ("all_to_all", [(port, other) for port in range(8) for other in range(8) if port != other]),
    ],
)
def test_a_matrix_has_a_line_for_each_flow(pattern: str, pairs: list[tuple[int, int]]) -> None:
    traffic = Traffic(pattern, 8, 1000)
    assert sorted(traffic.pairs) == pairs
    assert len(set(traffic.pairs)) == len(pairs)
    numbered = enumerate(traffic.pairs, 1)
    flows = [f"{sender}->{receiver} id {number} start 0 size 1000" for number, (sender, receiver) in numbered]
    assert traffic.matrix().splitlines() == ["Nodes 8", f"Connections {len(pairs)}", *flows]


def test_the_last_flow_counts_less_the_way_back(stand_in: Callable[..., Path]) -> None:
    seen = stand_in()
    seconds = simulated_seconds(TRANSPORTS["ndp"], Traffic("ring", 8, 1 << 16), LINK, seed=5)
    assert seconds == pytest.approx(107e-6 - 4 * 0.5e-6)  # the seventh port sends to the first one, below another leaf
    inputs = json.loads(seen.read_text())
    assert inputs["matrix"] == Traffic("ring", 8, 1 << 16).matrix()
    options = {"-nodes": "8", "-tiers": "2", "-linkspeed": "400000", "-hop_latency": "0.5", "-mtu": "4000"}
    assert {key: inputs["options"][key] for key in options} == options
    assert inputs["options"]["-seed"] == "5"
    assert int(inputs["options"]["-cwnd"]) * 4064 > LINK.bytes_per_s * 8 * LINK.hop_s
    simulated_seconds(TRANSPORTS["roce"], Traffic("incast", 8, 1 << 16), LINK)
    assert "-cwnd" not in json.loads(seen.read_text())["options"]


def test_a_program_that_fails_is_an_error_with_its_words(stand_in: Callable[..., Path]) -> None:
    stand_in("sys.exit('a matrix that it refuses')")
    with pytest.raises(RuntimeError, match="0 of 8 flows: a matrix that it refuses"):
        simulated_seconds(TRANSPORTS["roce"], Traffic("ring", 8, 1000), LINK)


@pytest.mark.slow
def test_a_run_that_fails_is_shown_and_no_number(
    stand_in: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("flows = flows[1:] if 'htsim_roce' in sys.argv[0] else flows")
    assert packet_level.main(["--ports", "8", "--bytes", "1000", "--packets", "10"]) == 0
    shown = capsys.readouterr()
    assert "ring, 8 ports, 1000 B: htsim_roce finished 7 of 8 flows" in shown.err
    assert shown.out.count("failed") == 3
    assert "left out: all_to_all, 8 ports, 0.976562 KiB: 56 packets" in shown.out


@pytest.mark.slow
def test_errors_are_ours_against_each_transport(
    stand_in: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in()
    assert packet_level.main(["--ports", "8", "--bytes", "1000", "2000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["pattern"] for row in figures["rows"]] == [name for name in packet_level.PATTERNS for _ in range(2)]
    row = figures["rows"][0]
    assert row["signed_error"]["roce"] == pytest.approx(row["ours_s"] / row["seconds"]["roce"] - 1)
    errors = [row["signed_error"]["ndp"] for row in figures["rows"][:2]]
    assert figures["median_signed_error"]["ring"]["ndp"] == pytest.approx(sum(errors) / 2)


def test_without_a_program_the_way_out_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTSIM", str(tmp_path))
    assert packet_level.main([]) == 2
    shown = capsys.readouterr().err
    assert "htsim_ndp and htsim_roce" in shown
    assert "git clone https://github.com/Broadcom/csg-htsim" in shown
    with pytest.raises(RuntimeError, match="htsim_ndp is not on the path"):
        simulated_seconds(TRANSPORTS["ndp"], Traffic("ring", 8, 1000), LINK)


@pytest.mark.parametrize("words", [["--rate", "0"], ["--hop", "-1"], ["--bytes", "0"], ["--ports", "9"]])
def test_options_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        packet_level.main(words)


@pytest.mark.parametrize(
    ("pattern", "ports"),
    [(pattern, ports) for pattern in packet_level.PATTERNS for ports in (8, 32)] + [("ring", 128), ("incast", 128)],
)
def test_ours_is_the_busiest_port_and_the_latency(pattern: str, ports: int) -> None:
    flows = ports - 1 if pattern in ("all_to_all", "incast") else 1
    expected = flows * (1 << 20) / LINK.bytes_per_s + 4 * LINK.hop_s
    assert our_seconds(Traffic(pattern, ports, 1 << 20), LINK) == pytest.approx(expected)

"""aiconfigurator as a witness, by a stand-in package that answers as its API does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dse_serving.measured import Point, Row
from dse_serving.witness import ask

_API = """
class Estimate:
    def __init__(self, ttft, tpot):
        self.ttft, self.tpot = ttft, tpot

def cli_estimate(model_path, system_name, *, backend_name, isl, osl, batch_size, tp_size=1, gemm_quant_mode=None, **_):
    print("a line that is no answer")
    if tp_size == 8:
        raise ValueError("no data for " + system_name)
    return Estimate(isl / tp_size, batch_size + osl / 1000)
"""


def rows() -> list[Row]:
    plain = dict.fromkeys(
        ("mode", "precision", "moe_ep_size", "attention_dp_size", "pp_size", "silicon_data_source"), ""
    )
    plain |= {"backend": "vllm", "model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "isl": "1000", "osl": "500"}
    return [Row({**plain, "id": tp, "tp_size": tp, "batch_size": "4"}, 0.5, 0.004) for tp in ("1", "2", "8")]


def test_predictions_of_the_witness_stand_beside_ours_or_have_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [Point(row, 0.5, 0.005) for row in rows()]
    monkeypatch.setenv("AICONFIGURATOR", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "aiconfigurator" in ask(rows()).beside(ours)["skipped"]
    package = tmp_path / "aiconfigurator" / "cli"
    package.mkdir(parents=True)
    (package / "api.py").write_text(_API)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    testimony = ask(rows())
    assert [(point.row.name, point.ttft_s, point.tpot_s) for point in testimony.points] == [
        ("1", 1.0, 0.0045),
        ("2", 0.5, 0.0045),
    ]
    both = testimony.beside(ours)
    assert both["refused"] == {"ValueError: no data for h100_sxm": 1}
    assert both["ours"]["rows"] == 2 and both["ours"]["tpot_median"] == pytest.approx(0.25)
    assert both["aiconfigurator"]["ttft_median"] == pytest.approx(0.5)
    monkeypatch.setenv("AICONFIGURATOR", str(tmp_path / "absent"))
    assert "does not answer" in str(ask(rows()).skipped)

"""Kernels in PTX that run, launch by launch: `study=gpgpusim`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dse.cli import main
from dse.errors import ConfigError
from dse_ptx.lenet import SHAPES, LeNet
from dse_ptx.networks import timed_launches
from dse_ptx.sms_backend import measured

pytestmark = pytest.mark.more


def test_launches_of_an_algorithm_are_its_kernels_and_add_up() -> None:
    launches = timed_launches("conv2", "winograd", 1, "gtx_1050", "none")
    names = ["winograd_filter", "winograd_input", "gemm", "winograd_output"]
    assert [launch.kernel for launch in launches] == names
    metrics = measured(launches)
    assert metrics["time_s"] == pytest.approx(sum(launch.time.seconds for launch in launches))
    assert 0 < metrics["launch_share"] < 1
    assert metrics["phases"] >= metrics["kernels"] == 4


def test_lenet_of_one_image_multiplies_vectors_and_has_the_probabilities_of_a_batch() -> None:
    names = [launch.kernel for launch in timed_launches("lenet", "implicit_gemm", 1, "gtx_1050", "none")]
    convolutions = ["conv_implicit_gemm", "max_pool"] * 2
    assert names == [*convolutions, "gemv", "relu", "lrn", "gemv", "softmax"]
    rng = np.random.default_rng(3)
    weights = {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    images, network = rng.random((2, 1, 28, 28), np.float32), LeNet(weights)
    of_batch = network.probabilities(images)
    alone = np.concatenate([network.probabilities(images[place : place + 1]) for place in range(2)])
    assert alone == pytest.approx(of_batch, abs=1e-5)
    assert alone.sum(1) == pytest.approx(1)


def test_columns_far_apart_camp_and_a_hash_spreads_them() -> None:
    plain, spread = (
        measured(timed_launches("transposed", "implicit_gemm", 1, "gtx_1050", way)) for way in ("none", "xor")
    )
    assert plain["camping"] > 1.5 * spread["camping"]
    assert spread["time_s"] < plain["time_s"]
    for algorithm, images in (("fft", 1), ("implicit_gemm", 2)):
        with pytest.raises(ConfigError, match="one product"):
            timed_launches("transposed", algorithm, images, "gtx_1050", "none")


@pytest.mark.nightly
def test_a_study_tells_what_each_launch_does_over_time(tmp_path: Path) -> None:
    words = ["works=[conv1]", "work.images=1", "figures=none", "executor.jobs=1", f"output_dir={tmp_path}"]
    assert main(["study=gpgpusim", *words]) == 0
    run = tmp_path / "gpgpusim" / "latest"
    launches, intervals = (pd.read_parquet(run / f"{name}.parquet") for name in ("launches", "intervals"))
    assert len(launches) == 2 * (1 + 1 + 4 + 4)
    assert set(launches["launch"]) == set(intervals["launch"])
    assert json.loads((run / "trace_conv1_fft.json").read_text("utf-8"))["traceEvents"]
    claims = {row["id"]: row for row in json.loads((run / "claims.json").read_text("utf-8"))}
    assert claims["gpgpusim.phases"]["ours"] is not None
    assert claims["gpgpusim.lenet_v1"]["ours"] is None


def test_works_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["study=gpgpusim", "works=[alexnet]", f"output_dir={tmp_path}"]) == 2
    assert "must list names of works" in capsys.readouterr().err

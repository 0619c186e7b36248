"""`bench gpu` says in one line why it can't measure, and holds each figure to its bar."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from moonpool.bench.gpu import BAR, check_gpu, gpu_rows
from moonpool.cli import app
from moonpool.errors import MoonpoolError

SIZES = ("2MB", "256KB", "64KB", "32KB")


def result(rate: float) -> dict[str, object]:
    by_size = dict.fromkeys(SIZES, rate)
    return {
        **{f"{name}_gpu_gbps": by_size for name in ("to", "from", "both_to", "both_from")},
        **{f"pinned_{name}_gpu_gbps": 50.0 for name in ("to", "from", "both_to", "both_from")},
        **{f"{kind}_{way}_gpu_gbps": rate for kind in ("border", "unregistered") for way in ("to", "from")},
        "frontier_to_gpu_gbps": 20.0,
        "registration_s": 0.3,
        "registration_gbps": 17.0,
        "load_submit_us": by_size,
        "store_submit_us": by_size,
        "poll_us": 2.0,
        "kernel_gbps": {"gather_64KB_32_programs": 700.0},
        "forward_slowdown": {"loads": 1.02},
    }


@pytest.mark.parametrize(("rate", "met"), [(BAR * 50, True), (BAR * 50 - 0.1, False)])
def test_pieces_of_64_kb_and_more_and_borders_are_held_to_nine_tenths_of_pinned_memory(rate: float, met: bool) -> None:
    rows = [row for row in gpu_rows(result(rate)) if row.limit is not None]
    assert len(rows) == 3 * 2 + 2
    assert {row.met for row in rows} == {met}
    assert not any("32KB" in row.name for row in rows)


def test_without_torch_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MoonpoolError, match="needs torch, built for CUDA"):
        check_gpu(0)


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = CliRunner().invoke(app, ["bench", "gpu"])
    assert answer.exit_code != 0
    assert "bench gpu needs a GPU, and torch sees none on this machine" in answer.output


def test_a_gpu_that_isnt_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpu(1)
    with pytest.raises(MoonpoolError, match="no GPU 2: this machine has 2"):
        check_gpu(2)

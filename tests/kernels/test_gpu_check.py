"""The check for machines with a GPU: what it says without one, and its logic on a stand-in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.fake_driver import FakeDriver
from unified_cache.copies import cupy_driver

pytestmark = pytest.mark.parallel

SCRIPT = Path(__file__).parents[2] / "benches" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def tiny(script: ModuleType, seed: int = 0, budget: float = 1e6, most: int = 300, requests: int = 25):
    sizes = script.Sizes(
        layers=3,
        heads=2,
        head_dim=8,
        latent_layers=2,
        latent_dim=24,
        page_size=4,
        pages=12,
        copied=6,
        rounds=1,
        blocks=(1, 2),
        register_bytes=1 << 12,
        hidden=8,
        requests=requests,
    )
    return script.Bench(FakeDriver(seed, lazy=0.1, most=most), "cpu", sizes, budget)


def test_help() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("--out", "--json", "--budget", "--wheel", "dist/"):
        assert word in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_one_line_without_a_gpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "gpu_check: there is no CUDA device on this machine (torch.cuda.is_available() is False)"
    ]


def test_all_sections_on_a_stand_in(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tiny(script)
    report = script.run(bench, [])
    assert report.wrong == [], capsys.readouterr().err
    assert report.left_out == []
    assert report.checked == 6 * 3 * 4 * 2 * 3 + 5
    report.machine = {"card": "a stand-in"}
    table = report.table()
    for what in (
        "pinned cudaMemcpy",
        "kernel, mha",
        "kernel, mla",
        "copy engines, runs of 6 pages",
        "staged",
        "the whole cache",
        "load under a forward",
        "forward beside a backup",
        "submitting a load",
        "wrong: 0",
    ):
        assert what in table, what
    assert max(len(line) for line in table.splitlines()) < 200
    json.dumps([row.__dict__ for row in report.rows])
    assert (bench.driver.events, bench.driver.allocations, len(bench.driver.streams)) == ({}, 0, 1)


def test_the_program(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # All of it but the GPU.
    card = SimpleNamespace(name="NVIDIA Stand-in (1)", total_memory=2**34, multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000)
    cupy = SimpleNamespace(__version__="14", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_driver, "CupyDriver", lambda device: FakeDriver(device))
    monkeypatch.setattr(script, "wheels", list)
    benches = [tiny(script) for _ in range(3)]
    monkeypatch.setattr(script, "Bench", lambda *arguments: benches.pop())
    assert script.main(["--only", "memcpy", "--only", "staged", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (kept,) = tmp_path.iterdir()
    assert kept.name.endswith("-gpu-check-nvidia-stand-in-1.txt")
    assert kept.read_text() == "$ python benches/gpu_check.py --only memcpy --only staged " + (
        f"--out {tmp_path}\n{printed.rstrip()}\n"
    )
    for text in (
        "card: NVIDIA Stand-in (1)",
        "driver of CUDA 13.0",
        "package: as it was installed",
        "16 GiB",
    ):
        assert text in printed
    assert script.main(["--only", "memcpy", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2

    def broken(bench: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setitem(script.SECTIONS, "memcpy", broken)
    assert script.main(["--only", "memcpy"]) == 1


def test_wrong_bytes_are_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = FakeDriver.launch

    def one_page_short(
        self, kernel: str, blocks: int, threads: int, argument: np.ndarray, stream: int
    ) -> None:
        short = argument.copy()
        short["pages"] -= 1
        launch(self, kernel, blocks, threads, short, stream)

    monkeypatch.setattr(FakeDriver, "launch", one_page_short)
    monkeypatch.setattr(script, "DEVICE_LAYOUTS", ["layer_first"])
    monkeypatch.setattr(script, "HOST_LAYOUTS", ["page_first"])
    report = script.run(tiny(script), ["checks"])
    assert len(report.wrong) >= report.checked // 2
    assert "the target's bytes" in report.wrong[0]


def test_what_a_cache_serves_too_early_is_found(script: ModuleType) -> None:
    bench = tiny(script, most=2, requests=80)
    bench.driver.ignore_waits = True
    script.serve(bench, {"host_layout": "page_first"}, "in a test")
    assert any("bytes that were served are not right" in text for text in bench.report.wrong)


def test_memory_that_the_device_does_not_reach_is_told(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DEVICE_LAYOUTS", ["layer_first"])
    monkeypatch.setattr(script, "HOST_LAYOUTS", ["page_first"])
    bench = tiny(script)
    bench.driver.registered = False
    with pytest.warns(RuntimeWarning, match="the device does not reach it"):
        script.serve(bench, {"host_layout": "page_first"}, "in a test")
    assert bench.report.wrong == ["the whole cache, in a test: staged is True"]
    with pytest.warns(RuntimeWarning, match="the device does not reach it"):
        report = script.run(bench, ["checks"])
    assert "registered memory is not reached by the device" in report.wrong


def test_what_was_found_is_kept_after_each_section(script: ModuleType) -> None:
    bench = tiny(script)
    kept: list[int] = []

    def keep(report: object) -> None:
        kept.append(len(report.rows))
        bench.driver.batched = False  # as if the driver had refused one

    report = script.run(bench, ["memcpy", "staged"], keep)
    assert len(kept) == 2
    assert 0 < kept[0] < kept[1]
    assert report.rows[-1].note == "REFUSED by the driver in staged"


def test_a_section_that_breaks_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setitem(script.SECTIONS, "memcpy", broken)
    report = script.run(tiny(script), ["memcpy", "staged"])
    assert report.wrong == ["section memcpy broke: RuntimeError: on purpose"]
    assert [row.what for row in report.rows] == ["staged, memory not registered"] * 2


def test_the_budget_is_kept(script: ModuleType) -> None:
    report = script.run(tiny(script, budget=0), [])
    assert report.checked == 0
    assert len(report.left_out) >= 5
    assert "no time left" in report.table()


def test_no_package_is_one_line(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.UnusableError, match="can not be installed"):
        script.find_package(tmp_path / "unified_cache-0-py3-none-any.whl")

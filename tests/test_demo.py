"""The demo: a real model, every tier, every answer checked."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unified_cache.cli import main
from unified_cache.demo.engine import Engine
from unified_cache.demo.serving import PAGE_SIZE

pytestmark = pytest.mark.parallel

SMALLEST = ["demo", "--quick", "--clients", "2", "--turns", "2"]


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it, and would leave it set
    # One thread: the models here are tiny, and the machine may have other work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_quick_json(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    stored = tmp_path / "tmp"
    stored.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "unified_cache", "demo", "--quick", "--json", "--out", str(figure)],
        env=os.environ | {"TMPDIR": str(stored), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["all_equal"] is True
    assert result["rounding"] < result["closest_lead"]
    assert result["requests"] == result["clients"] * result["turns"]
    runs = {run["name"]: run for run in result["runs"]}
    assert list(runs) == ["no cache", "device", "+ host", "+ storage"]
    for run in runs.values():
        assert (run["requests"], run["mismatches"]) == (result["requests"], 0)
        assert 0 < run["ttft_ms"]["median"] <= run["ttft_ms"]["p90"]
        assert run["tokens_per_second"] > 0
    rates = {name: run["hit_rate"] for name, run in runs.items()}
    # What was hit was not computed, and nothing else was spared.
    answered = result["requests"] * 5
    for run in runs.values():
        left = result["prompt_tokens"] * (1 - run["hit_rate"]["total"])
        assert run["computed_tokens"] == round(left) + answered
    assert rates["no cache"] == {"device": 0, "host": 0, "storage": 0, "total": 0}
    assert 0 < rates["device"]["total"] < rates["+ host"]["total"] < rates["+ storage"]["total"] < 1
    assert rates["device"]["host"] == rates["device"]["storage"] == 0
    assert rates["+ host"]["host"] > 0
    assert rates["+ host"]["storage"] == 0
    assert rates["+ storage"]["storage"] > 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 5000
    assert list(stored.iterdir()) == []


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figure.svg"
    assert main([*SMALLEST, "--seed", "3", "--device", "cpu", "--out", str(figure)]) == 0
    out, err = capsys.readouterr()
    for shown in (
        "no cache",
        "+ storage",
        "first token, p90",
        "16 answers of the engine, every one token for token",
        str(figure),
    ):
        assert shown in out
    assert err == ""
    assert "<svg" in figure.read_text()


def test_wrong_bytes_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = Engine._take_in

    def forget(self: Engine, sequence: Any) -> None:
        take_in(self, sequence)
        hit = sequence.held.pages[: sequence.computed // PAGE_SIZE]
        assert self._pool.data is not None
        self._pool.data[:, :, hit.astype("int64")] = 0

    monkeypatch.setattr(Engine, "_take_in", forget)
    assert main([*SMALLEST, "--json", "--out", str(tmp_path / "figure.png")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["all_equal"] is False
    assert err.startswith("unified-cache: device: ")
    assert "answers are not what the model gives without a cache" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("package", ["torch", "transformers", "matplotlib", "tqdm"])
def test_a_missing_package_is_one_line(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    assert main(["demo", "--quick", "--out", str(tmp_path / "figure.png")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"unified-cache: the demo needs {package}, ")
    assert err.endswith("pip install 'unified-cache[demo]'\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, named, status",
    [
        (["--seed", "9" * 23], "--seed must be an integer in 0..9223372036854775807, not 999", 2),
        (["--seed", "-1"], "--seed must be an integer in 0..9223372036854775807, not -1", 2),
        (["--clients", "0"], "--clients must be an integer >= 1, not 0", 2),
        (["--turns", "1"], "--turns must be an integer >= 2, not 1", 2),
        (["--clients", "100000000"], "--clients 100000000 and --turns 4 need", 2),
        (["--out", "no/such/folder/figure.png"], "--out: no/such/folder/figure.png can not be written", 1),
        (["--out", "figure.txt"], "--out: figure.txt must end in one of .png", 2),
        (["--out", "folder.png"], "--out: folder.png is a folder", 1),
        (["--device", "tpu"], "--device: 'tpu' must be cpu, cuda or cuda:N", 2),
        (["--device", "cuda:99"], "--device: there is no cuda:99 here", 2),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_can_not_be_done_is_one_line(
    arguments: list[str],
    named: str,
    status: int,
    form: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert main(["demo", "--quick", *form, *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"unified-cache: {named}")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]

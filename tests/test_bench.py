"""`unified-cache bench`: the same answers without and with the cache, and what it says of them."""

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
from unified_cache.demo.serving import PAGE_SIZE, Report
from unified_cache.demo.workload import NEAR_TIE, Clients, Traffic, Turn
from unified_cache.engines.transformers import Generation

pytestmark = pytest.mark.parallel

SMALLEST = ["bench", "--users=5", "--turns=3", "--system=40", "--question=20-40", "--answer=5"]
SMALLEST += ["--layers=2", "--hidden=64", "--concurrent=2", "--device=cpu"]


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it, and would leave it set
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the store is, and must not be afterwards
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not list(tmp_path.glob("unified-cache-*"))


def test_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "unified_cache",
            *SMALLEST,
            "--json",
            "--device-tokens=176",
            "--host-tokens=320",
        ],
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["all_equal"] is True
    assert (result["users"], result["turns"], result["question"]) == (5, 3, [20, 40])
    assert (result["device_tokens"], result["host_tokens"]) == (176, 320)
    without, cached = result["runs"]
    assert [run["name"] for run in result["runs"]] == ["without", "with"]
    for run in result["runs"]:
        assert (run["requests"], run["mismatches"]) == (15, 0)
        assert 0 < run["ttft_ms"]["median"] <= run["ttft_ms"]["p90"]
        assert run["tokens_per_second"] > 0
    assert without["hit_rate"] == {"device": 0, "host": 0, "storage": 0, "total": 0}
    assert min(cached["hit_rate"].values()) > 0, cached["hit_rate"]
    # What was hit was not computed, and nothing else was spared.
    prompts = without["computed_tokens"] - 15 * 4
    assert cached["computed_tokens"] - 15 * 4 == round(prompts * (1 - cached["hit_rate"]["total"]))


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALLEST, "--order=turning", "--host-tokens=0"]) == 0
    out, err = capsys.readouterr()
    for shown in (
        "turning, 2 at a time",
        "without",
        "first token, p90",
        "0 on host",
        "All answers are the same",
    ):
        assert shown in " ".join(out.split())
    assert err == ""


def test_an_answer_that_differs_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = Engine._take_in

    def garble(self: Engine, sequence: Any) -> None:
        take_in(self, sequence)
        hit = sequence.held.pages[: sequence.computed // PAGE_SIZE]
        assert self._pool.data is not None
        self._pool.data[:, :, hit.astype("int64")] = 0

    monkeypatch.setattr(Engine, "_take_in", garble)
    assert main([*SMALLEST, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["all_equal"] is False
    assert err.startswith("unified-cache: with: ")
    assert "answers are not what the engine gives without a cache" in err
    assert err.count("\n") == 1


def test_what_hangs_on_rounding_is_no_failure() -> None:
    def generation(tokens: list[int], margins: list[float]) -> Generation:
        return Generation(prompt_tokens=1, tokens=tokens, margins=margins, logprobs=[0.0] * len(tokens))

    report = Report("with")
    undecided = Turn(0, [0], generation([1, 2, 3], [0.5, NEAR_TIE / 2, 0.5]))
    report.add(undecided, generation([1, 4, 5], [0.5, 0.0, 0.25]))
    assert (report.ties, report.mismatches) == (1, [])
    assert report.drift == 0.0  # of what comes after it nothing is compared
    sure = Turn(1, [0], generation([1, 2, 3], [0.5, 0.5, 0.5]))
    report.add(sure, generation([1, 2, 3], [0.5, 0.25, 0.5]))
    report.add(sure, generation([1, 2, 4], [0.5, 0.5, 0.5]))
    assert report.ties == 1
    (wrong,) = report.mismatches
    assert (wrong.request, wrong.client, wrong.position, wrong.token, wrong.expected) == (2, 1, 2, 4, 3)
    assert report.drift == 0.25


@pytest.mark.parametrize(
    "order, rounds",
    [("same", [[0, 1, 2], [0, 1, 2], [0, 1, 2]]), ("turning", [[0, 1, 2], [2, 1, 0], [0, 1, 2]])],
)
def test_orders(order: str, rounds: list[list[int]]) -> None:
    clients = Clients(Traffic(3, 3, 4, (1, 2), 1), seed=1, order=order)
    assert [clients.round() for _ in rounds] == rounds
    shuffled = Clients(Traffic(30, 2, 4, (1, 2), 1), seed=1)
    one, other = shuffled.round(), shuffled.round()
    assert one != other
    assert sorted(one) == sorted(other) == list(range(30))


@pytest.mark.parametrize("package", ["torch", "transformers", "rich"])
def test_a_missing_package_is_one_line(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    assert main(SMALLEST) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"unified-cache: the benchmark needs {package}, ")
    assert err.endswith("pip install 'unified-cache[demo]'\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, named, status",
    [
        (["--users=0"], "--users must be an integer >= 1, not 0", 2),
        (["--system=-1"], "--system must be an integer >= 0, not -1", 2),
        (["--seed=-1"], "--seed must be an integer in 0..9223372036854775807, not -1", 2),
        (["--chunk=1"], "--chunk must be at least --concurrent, 2, not 1", 2),
        (["--order=best"], "--order must be one of shuffled, same, turning, not 'best'", 2),
        (
            ["--device-tokens=64"],
            "--device-tokens must be at least 176, so that one conversation fits, not 64",
            2,
        ),
        (["--host-tokens=1"], "--host-tokens must be an integer >= 16, not 1", 2),
        (["--storage-tokens=-1"], "--storage-tokens must be an integer >= 0, not -1", 2),
        (["--host-tokens=0", "--storage-tokens=9"], "--storage and --storage-tokens need a host tier", 2),
        (["--storage=nowhere://here"], "there is no storage backend nowhere://", 1),
        (["--storage=file:///a#b"], "storage 'file:///a#b' has a part after", 2),
        (["--users=100000000"], "--users, --turns, --question, --layers and the sizes of the tiers need", 2),
        (["--device=tpu"], "--device: 'tpu' must be cpu, cuda or cuda:N", 2),
    ],
)
def test_what_can_not_be_done_is_one_line(
    arguments: list[str], named: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALLEST, *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"unified-cache: {named}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["x", "0", "9-4", "1-", "1-2-3"])
def test_questions_of_no_length_are_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SMALLEST, f"--question={text}"])
    assert caught.value.code == 2
    assert "--question" in capsys.readouterr().err

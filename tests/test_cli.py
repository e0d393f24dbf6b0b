"""The command line: help, version, one clear line when something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unified_cache
from unified_cache.cli import main


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["demo", "--nonsense"], ["bench", "--seed", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: unified-cache" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, shown in (
        (["--help"], "demo"),
        (["demo", "--help"], "--json"),
        (["bench", "--help"], "--storage-tokens"),
        (["--version"], f"unified-cache {unified_cache.__version__}"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize("command", [[sys.executable, "-m", "unified_cache"], ["unified-cache"]])
def test_both_ways_to_call_it(command: list[str]) -> None:
    if command == ["unified-cache"]:
        command = [str(Path(sys.executable).with_name("unified-cache"))]
    good = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout == f"unified-cache {unified_cache.__version__}\n"
    bad = subprocess.run([*command, "demo", "--clients", "0"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("unified-cache: --clients")
    assert bad.stderr.count("\n") == 1


@pytest.fixture
def trace(tmp_path: Path) -> str:
    request = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(request) + "\n")
    return str(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_output_is_one_line(trace: str, unbuffered: str) -> None:
    for arguments in (["replay", trace], ["replay", trace, "--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "unified_cache", *arguments],
                env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr.startswith("unified-cache: ")
        assert done.stderr.endswith("No space left on device\n") or "(No space left" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_went_away_is_told_nothing(trace: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "unified_cache", "replay", trace],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_output_that_was_closed_before(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of it
    assert main(["replay", trace]) == 0


def test_one_rule_for_the_exit_status(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none" / "f.png")
    for arguments, status in (
        (["replay", trace], 0),
        (["replay", missing], 1),
        (["replay", trace, "--block-size", "1"], 1),  # the trace does not fit
        (["demo", "--out", missing], 1),
        (["replay"], 2),
        (["replay", trace, "--block-size", "0"], 2),
        (["replay", trace, "--device-blocks", "0"], 2),
        (["demo", "--clients", "0"], 2),
        (["demo", "--seed", "-1"], 2),
        (["demo", "--out", "f.txt"], 2),
    ):
        assert main(arguments) == status, arguments
        assert capsys.readouterr().err.count("\n") == (status != 0)


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, unified_cache.cli; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "matplotlib", "tqdm"} & set(done.stdout.split())

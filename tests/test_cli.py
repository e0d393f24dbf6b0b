"""The command line: help, version, one clear line when something is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

import unified_cache
from unified_cache.cli import main


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["demo", "--nonsense"], ["demo", "--seed", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: unified-cache" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, shown in (
        (["--help"], "demo"),
        (["demo", "--help"], "--json"),
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
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("unified-cache: --clients")
    assert bad.stderr.count("\n") == 1


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, unified_cache.cli; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "matplotlib", "tqdm"} & set(done.stdout.split())

"""The command line: text and JSON, help, one clear line when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import unified_cache
from unified_cache.cli import main

SMALL = ["--requests", "60", "--clients", "8", "--device-pages", "400", "--host-pages", "300"]


def test_demo_prints_a_table_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL]) == 0
    out = capsys.readouterr().out
    for policy in unified_cache.PrefixTree.eviction_policies():
        assert out.count(f"\n{policy} ") == 3
    assert "Nothing leaked" in out


def test_demo_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", *SMALL, "--policy", "lru"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["write_policy"] for run in report["runs"]] == [None, "write_through", "write_back"]
    for run in report["runs"]:
        assert run["requests"] == report["requests"] == 60
        assert run["verified"] > 0
        assert 0 < run["hit_rate"] <= report["bound"] <= 1
        assert run["hit_rate"] == pytest.approx(run["device_hit_rate"] + run["host_hit_rate"], abs=2e-4)
    alone = report["runs"][0]
    assert (alone["host_hit_rate"], alone["copied_to_host"], alone["copied_to_device"]) == (0, 0, 0)


def test_demo_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for seed in ("3", "3", "4"):
        assert main(["demo", "--json", *SMALL, "--policy", "lfu", "--seed", seed]) == 0
        report = json.loads(capsys.readouterr().out)
        for run in report["runs"]:
            del run["seconds"]
        reports.append(report)
    assert reports[0] == reports[1]
    assert reports[0]["runs"] != reports[2]["runs"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--policy", "nonsense"], "--policy: 'nonsense' is none of lru"),
        (["--requests", "0"], "--requests"),
        (["--device-pages", "-1"], "--device-pages"),
        (["--device-pages", "20"], "--device-pages: 20"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_demo_that_can_not_run_says_so_in_one_line(
    arguments: list[str], named: str, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *SMALL, *form, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"unified-cache: {named}")
    assert captured.err.count("\n") == 1
    assert not form or captured.out == ""


def test_a_page_that_is_not_what_was_written_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unified_cache.cli import demo

    def forgetful(self: demo.Pool, pages: list[int]) -> None:
        self._free.extend(pages)

    # A pool that hands the same page out twice: content gets overwritten under the tree.
    monkeypatch.setattr(demo.Pool, "alloc", lambda self, count: list(range(count)))
    monkeypatch.setattr(demo.Pool, "free", forgetful)
    assert main(["demo", *SMALL, "--policy", "lru"]) == 1
    assert "pages of other tokens" in capsys.readouterr().err


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
    good = subprocess.run(
        [*command, "demo", "--json", *SMALL, "--policy", "lru"], capture_output=True, text=True, check=False
    )
    assert (good.returncode, good.stderr) == (0, "")
    json.loads(good.stdout)
    bad = subprocess.run([*command, "demo", "--policy", "x"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr

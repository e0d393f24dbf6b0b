"""Replays: hit rates that are known for a public trace, reports, and the command around them."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unified_cache import ArgumentError
from unified_cache.cli import main
from unified_cache.replay import ReplayReport, Settings, Trace, read_trace, replay
from unified_cache.replay.run import token_ids

CONVERSATION = Path(__file__).parent / "data" / "conversation_trace.jsonl.xz"

# Block hit rates of one tier by an independent simulation of single blocks.
ONE_TIER = {
    ("lru", 1_000): 0.0445,
    ("lru", 5_000): 0.1118,
    ("lru", 10_000): 0.2116,
    ("lru", 20_000): 0.2878,
    ("slru", 1_000): 0.0481,
    ("slru", 5_000): 0.0923,
    ("slru", 10_000): 0.1317,
    ("slru", 20_000): 0.2100,
}

# The same for a device tier of 600 blocks over a host tier: hit rate, and copies to host per block asked for.
TWO_TIERS = {
    ("write_through", 4_800): (0.106, 0.894),
    ("write_through", 9_600): (0.204, 0.797),
    ("write_through", 19_200): (0.284, 0.716),
    ("write_through_selective", 4_800): (0.046, 0.001),
    ("write_through_selective", 19_200): (0.046, 0.001),
    ("write_back", 4_800): (0.122, 0.877),
    ("write_back", 9_600): (0.212, 0.786),
    ("write_back", 19_200): (0.286, 0.712),
}


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_trace(CONVERSATION)


@pytest.mark.parametrize("policy, blocks", ONE_TIER)
def test_one_tier_hits_what_is_known(conversation: Trace, policy: str, blocks: int) -> None:
    settings = Settings(device_blocks=blocks, eviction_policy=policy)
    report = replay([conversation], settings, check=True)
    assert report.hit_rate == pytest.approx(ONE_TIER[policy, blocks], abs=5e-4)
    assert (report.requests, report.blocks, report.bypassed) == (12_031, 288_500, 0)
    assert report.hit_rate == report.device_hit_rate
    assert (report.copied_to_host, report.host_evicted) == (0, 0)


@pytest.mark.parametrize("write_policy, host_blocks", TWO_TIERS)
def test_two_tiers_hit_and_copy_what_is_known(
    conversation: Trace, write_policy: Any, host_blocks: int
) -> None:
    threshold = 2 if write_policy == "write_through_selective" else None
    settings = Settings(
        device_blocks=600,
        host_blocks=host_blocks,
        write_policy=write_policy,
        write_through_threshold=threshold,
    )
    report = replay([conversation], settings, check=True)
    hit_rate, writes = TWO_TIERS[write_policy, host_blocks]
    assert report.hit_rate == pytest.approx(hit_rate, abs=2e-3)
    assert report.writes_per_block == pytest.approx(writes, abs=2e-3)
    assert report.copied_to_device == report.host_hit_blocks


def test_a_cache_without_limits_hits_what_came_before(conversation: Trace) -> None:
    report = replay([conversation], Settings(device_blocks=200_000))
    assert report.device_hit_blocks == 288_500 - 182_790
    assert report.token_hit_rate == pytest.approx(0.3736, abs=5e-5)


def test_token_by_token_is_close_to_block_by_block(conversation: Trace) -> None:
    report = replay([conversation], Settings(device_blocks=20_000, page_size=64), check=True)
    # Partial blocks take fewer pages here, and a victim loses pages instead of whole blocks.
    assert report.hit_rate == pytest.approx(0.2878, abs=6e-3)
    assert report.token_hit_rate == pytest.approx(report.hit_rate, abs=1e-2)
    assert report.tokens == 144_793_823


def test_host_order_decides_what_a_large_host_remembers(conversation: Trace) -> None:
    rates = {}
    for order in ("auto", "leaves_first", "copies_first"):
        settings = Settings(device_blocks=600, host_blocks=4_800, host_order=order)
        rates[order] = replay([conversation], settings).hit_rate
    assert rates["auto"] == rates["leaves_first"] > rates["copies_first"]


def small() -> Trace:
    return Trace.of([([1, 2, 3], 1300), ([1, 2, 4], 1536), ([1, 2, 3], 1300)])


def test_several_traces_go_through_one_cache() -> None:
    once = replay([small()])
    twice = replay([small(), small()])
    assert (once.requests, once.device_hit_blocks) == (3, 5)
    assert (twice.requests, twice.device_hit_blocks) == (6, 5 + 9)
    assert twice.device_hit_tokens == 1024 + 1300 + 1300 + 1536 + 1300


def test_slices_are_served_in_order() -> None:
    trace = Trace.of([([i, i + 1], 600) for i in range(0, 2000, 2)] * 2)
    told: list[int] = []
    report = replay([trace], Settings(device_blocks=10_000), progress=told.append)
    assert (report.device_hit_blocks, sum(told), max(told)) == (2000, 2000, 256)


def test_ids_of_any_size_are_numbered_alike_in_all_traces() -> None:
    large = Trace.of([([2**64 - 1, 5, 2**40], 1300)])
    other = Trace.of([([2**64 - 1, 5, 7], 1300)])
    first, second = token_ids([large, other])
    assert first.dtype == second.dtype == np.uint32
    assert first[:2].tolist() == second[:2].tolist()
    assert len({*first.tolist(), *second.tolist()}) == 4
    assert replay([large, other]).device_hit_blocks == 2
    assert token_ids([small()])[0].tolist() == small().hash_ids.tolist()


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"device_blocks": 0}, "device_blocks is 0, allowed is 1"),
        ({"host_blocks": -1}, "host_blocks is -1"),
        ({"device_blocks": 2**40}, "device_blocks is 1099511627776"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 257}, "page_size is 257"),
        ({"write_through_threshold": 0}, "write_through_threshold is 0"),
        ({"eviction_policy": "x"}, 'eviction_policy is "x", allowed are lru'),
        ({"policy_options": {"x": 1}}, "options of lru are: none"),
        ({"policy_options": {"x": 2**70}}, "out of range"),
        ({"write_policy": "x"}, 'write_policy is "x"'),
        ({"host_order": "x"}, 'host_order is "x", allowed are auto'),
        ({"device_blocks": 2**32 - 1, "page_size": 1}, "device_blocks is 4294967295"),
    ],
)
def test_settings_that_can_not_be_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        replay([small()], Settings(**settings))
    assert named in str(caught.value)


def test_traces_must_fit_together() -> None:
    with pytest.raises(ArgumentError, match="traces is empty"):
        replay([])
    with pytest.raises(ArgumentError, match=r"block sizes \[4, 512\]"):
        replay([small(), Trace.of([([1], 4)], block_size=4)])


# --- the command -------------------------------------------------------------------------------------


def lines(path: Path, *requests: str) -> str:
    path.write_text("".join(f"{request}\n" for request in requests))
    return str(path)


def request(ids: list[int], length: int) -> str:
    return json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids})


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return lines(tmp_path / "small.jsonl", request([1, 2], 600), request([1, 2], 600), request([1, 3], 700))


def test_json_is_one_object_with_every_number(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert {
        "requests": 3,
        "blocks": 6,
        "device_hit_rate": 0.5,
        "host_hit_rate": 0.0,
        "hit_rate": 0.5,
        "writes_per_block": 0.0,
        "bad_lines": 0,
    }.items() <= report.items()
    assert report["token_hit_rate"] == pytest.approx((600 + 512) / 1900, abs=1e-6)
    assert 0 < report["seconds"] < 1
    assert set(ReplayReport.__dataclass_fields__) <= set(report)
    assert report["settings"]["device_blocks"] == 20_000


def test_options_reach_the_cache(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--device-blocks 2 --host-blocks 9 --policy slru --policy-option protected_threshold=3"
    options += " --write-policy write_through_selective --write-through-threshold 1 --host-order copies_first"
    options += " --tokens --page-size 32 --block-size 512"
    assert main(["replay", trace, trace, "--json", *options.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 6
    assert report["settings"] == {
        "device_blocks": 2,
        "host_blocks": 9,
        "page_size": 32,
        "eviction_policy": "slru",
        "policy_options": {"protected_threshold": 3},
        "write_policy": "write_through_selective",
        "write_through_threshold": 1,
        "host_order": "copies_first",
    }
    assert report["writes_per_block"] > 0
    assert main(["replay", trace, trace, "--json", "--device-blocks", "2", "--host-blocks", "9"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["host_hit_rate"] > 0
    assert report["hit_rate"] == pytest.approx(report["device_hit_rate"] + report["host_hit_rate"])


def test_text_is_for_people(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--device-blocks", "2", "--host-blocks", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "3 requests, 6 blocks of 512 tokens" in captured.out
    assert "host 5 blocks, write_through" in captured.out
    assert "hit on host" in captured.out
    assert main(["replay", trace, "--device-blocks", "1", "--tokens"]) == 0
    out = capsys.readouterr().out
    assert "pages of 64; no host tier" not in out
    assert "3 requests were larger than the device tier" in out


def test_broken_lines_stop_the_replay_or_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "t.jsonl", request([1], 5), "{", request([1, 2], 5), request([1], 5))
    assert main(["replay", path]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"unified-cache: {path}, line 2: is not JSON")
    assert captured.err.count("\n") == 1
    assert main(["replay", path, "--skip-bad", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["bad_lines"]) == (2, 2)
    assert main(["replay", path, "--skip-bad"]) == 0
    assert "2 broken lines were left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, told, status",
    [
        ([], "replay needs a trace: unified-cache replay TRACE", 2),
        (["none.jsonl"], "No such file or directory: 'none.jsonl'", 1),
        (["."], "Is a directory: '.'", 1),
        (["TRACE", "--device-blocks", "0"], "device_blocks is 0", 2),
        (["TRACE", "--host-blocks", "-1"], "host_blocks is -1", 2),
        (["TRACE", "--device-blocks", "9" * 30], "device_blocks is 999", 2),
        (["TRACE", "--block-size", "0"], "--block-size is 0", 2),
        (["TRACE", "--block-size", "100"], "600 tokens make 6 blocks of 100", 1),
        (["TRACE", "--page-size", "64"], "--page-size: only a replay with --tokens has pages", 2),
        (["TRACE", "--tokens", "--page-size", "0"], "page_size is 0", 2),
        (["TRACE", "--policy-option", "x=1"], "options of lru are: none", 2),
        (["TRACE", "--policy", "slru", "--policy-option", "protected_threshold=0"], "is 0, allowed is 1", 2),
        (["TRACE", "--write-through-threshold", "0"], "write_through_threshold is 0", 2),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_can_not_be_replayed_is_one_line(
    arguments: list[str],
    told: str,
    status: int,
    form: list[str],
    trace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [trace if argument == "TRACE" else argument for argument in arguments]
    assert main(["replay", *given, *form]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("unified-cache: ")
    assert told in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--policy", "x"], ["--write-policy", "x"], ["--policy-option", "x"], ["--policy-option", "x=y"]],
)
def test_unknown_names_are_usage_errors(
    arguments: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", trace, *arguments])
    assert caught.value.code == 2
    assert "usage: unified-cache replay" in capsys.readouterr().err


class Terminal:
    """A standard error that says it is a terminal."""

    def __init__(self) -> None:
        self.shown = ""

    def write(self, text: str) -> int:
        self.shown += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_the_bar_is_for_terminals_and_needs_tqdm(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")

    def shown(*options: str) -> str:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["replay", trace, *options]) == 0
        return terminal.shown

    assert "3/3" in shown() or "0/3" in shown()
    assert shown("--quiet") == shown("--json") == ""
    capsys.readouterr()

    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "tqdm":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(builtins, "__import__", without)
    assert shown() == "unified-cache: pip install 'unified-cache[cli]' shows a progress bar here\n"
    assert shown("--quiet") == shown("--json") == ""
    assert "3 requests" in capsys.readouterr().out

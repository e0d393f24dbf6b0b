"""The commands `storage` and `doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage.support import BYTES, Pages, keys, make_guard
from unified_cache.cli import doctor, main
from unified_cache.errors import StorageError
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.inspect import ObjectReader
from unified_cache.storage.page_format import HEADER_BYTES
from unified_cache.storage.probe import probe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with 6 pages."""
    store = tmp_path / "store"
    guard, _ = make_guard(PagesBackend(store))
    pages = Pages(6)
    assert guard.set(keys(6), pages.views, pages.addresses) == [PageStatus.HIT] * 6
    guard.close()
    return store


def damage(folder: Path, at: int) -> None:
    path = next(folder.glob(f"??/??/{keys(1, at)[0]}"))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    """What a command prints, as JSON."""
    assert main(["storage", *map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--page-bytes", "4096", "--pages", "10", "--batch", "4", "--threads", "2")
    report = said(capsys, "check", tmp_path / "new", *sizes, "--prefill-rate", "1e-3")
    assert set(report["calls"]) == {"put", "exists", "get", "delete"}
    assert all(call["pages"] == 10 and call["seconds"] > 0 for call in report["calls"].values())
    assert report["calls"]["get"]["bytes_per_second"] > 0
    assert report["loading_beats_computing"] is True
    assert report["durable"] is True
    assert report["load_tokens_per_second"] == pytest.approx(640 / report["calls"]["get"]["seconds"])
    # Nothing is left behind.
    assert said(capsys, "stat", tmp_path / "new")["objects"] == 0
    assert main(["storage", "check", str(tmp_path / "new"), *sizes, "--prefill-rate", "1e15"]) == 0
    text = capsys.readouterr().out
    assert "computing is faster" in text
    assert re.search(r"^get +\d+ ", text, re.MULTILINE)


def test_check_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status, text in (
        (["--pages", "0"], 2, "--pages must be an integer >= 1, not 0"),
        (["--batch", "-1"], 2, "--batch must be an integer >= 1, not -1"),
        (["--prefill-rate", "0"], 2, "--prefill-rate must be a number > 0, not 0"),
        (["--timeout", "0"], 2, "--timeout must be a number > 0, not 0"),
        (["--pages", "1000000000"], 2, "GB of memory here"),
    ):
        assert main(["storage", "check", str(tmp_path), *arguments]) == status
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    (tmp_path / "file").write_text("")
    for url, text in ((tmp_path / "file", "file"), ("nothing://x", "no storage backend nothing://")):
        assert main(["storage", "check", str(url)]) == 1
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


class Faulty(MemoryBackend):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def get(self, batch: Any) -> list[PageStatus]:
        if self.fault == "error":
            return [PageStatus.ERROR] * len(batch)
        statuses = super().get(batch)
        if self.fault == "flip":
            batch.bodies[0][5] ^= 1
        return statuses

    def set(self, batch: Any) -> list[PageStatus]:
        return [PageStatus.FULL] * len(batch) if self.fault == "full" else super().set(batch)

    def exists(self, runs: Any) -> list[int]:
        return [0] * len(runs) if self.fault == "forgets" else super().exists(runs)


@pytest.mark.parametrize(
    "fault, text",
    [
        ("error", "does not answer"),
        ("flip", "damaged on the way"),
        ("full", "no room"),
        ("forgets", "were found"),
    ],
)
def test_a_storage_that_can_not_do_it(fault: str, text: str) -> None:
    backend = Faulty(fault)
    with pytest.raises(StorageError, match=text):
        probe(backend, page_bytes=512, pages=4, batch=2, threads=2, deadline=1.0)
    assert list(backend.keys()) == []
    backend.close()


def test_ls_and_stat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(said(capsys, "ls", folder)["keys"]) == keys(6)
    assert len(said(capsys, "ls", folder, "--limit", 2)["keys"]) == 2
    assert main(["storage", "ls", str(folder), "--limit", "-1"]) == 2
    capsys.readouterr()
    stat = said(capsys, "stat", folder)
    assert (stat["objects"], stat["bytes"]) == (6, 6 * (BYTES + HEADER_BYTES))
    assert main(["storage", "ls", str(folder)]) == 0
    assert sorted(capsys.readouterr().out.split()) == keys(6)


def test_verify_reads_every_checksum(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = said(capsys, "verify", folder)
    assert (sound["objects"], sound["hit"], sound["damaged"]) == (6, 6, {})
    assert sound["bytes"] == 6 * (BYTES + HEADER_BYTES)
    damage(folder, 3)
    found = said(capsys, "verify", folder, status=1)
    assert (found["hit"], found["corrupt"]) == (5, 1)
    assert found["damaged"] == {keys(1, 3)[0]: "checksum"}
    # Looking changes nothing.
    assert len(said(capsys, "ls", folder)["keys"]) == 6
    assert main(["storage", "verify", str(folder)]) == 1
    assert f"{keys(1, 3)[0]}: checksum" in capsys.readouterr().out


def test_gc_deletes_what_nobody_can_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder, 3)
    assert said(capsys, "gc", folder, "--dry-run") == {"objects": 6, "deleted": 1, "dry_run": True}
    assert said(capsys, "gc", folder)["deleted"] == 1
    assert sorted(said(capsys, "ls", folder)["keys"]) == keys(3) + keys(2, 4)
    assert said(capsys, "gc", folder, "--keep", "0" * 16)["deleted"] == 0
    assert said(capsys, "gc", folder, "--keep", "f" * 16)["deleted"] == 5
    assert said(capsys, "ls", folder)["keys"] == []


def test_clear_asks_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "clear", str(folder)]) == 2
    assert "say --yes" in capsys.readouterr().err
    assert len(said(capsys, "ls", folder)["keys"]) == 6
    assert said(capsys, "clear", folder, "--yes") == {"cleared": True}
    assert said(capsys, "ls", folder)["keys"] == []


def test_objects_of_all_sizes_are_read() -> None:
    backend = MemoryBackend()
    for at, size in enumerate((1000, 3 << 20, 1 << 20)):
        from unified_cache.storage.guard import StorageCounts, StorageGuard

        guard = StorageGuard(
            backend, object_bytes=size, deadline=1.0, clock=lambda: 0.0, counts=StorageCounts()
        )
        page = np.full((1, size), at, np.uint8)
        places = np.array([page.ctypes.data], np.uint64)
        assert guard.set(keys(1, at), [memoryview(page[0])], places) == [PageStatus.HIT]
    reader = ObjectReader(backend)
    found = list(reader.read(keys(4)))
    assert [one.status for one in found] == [PageStatus.HIT] * 3 + [PageStatus.MISS]
    assert [one.page_bytes for one in found] == [1000, 3 << 20, 1 << 20, 0]
    backend.close()


def test_the_flags_may_stand_on_either_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "--json", "stat", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == 6


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["storage"], ["storage", "nonsense", "x"], ["storage", "stat"], ["doctor", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err


def test_as_a_module(folder: Path) -> None:
    command = [sys.executable, "-m", "unified_cache", "storage", "verify", str(folder), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^hit +6$", done.stdout, re.MULTILINE)


# doctor


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    by_name = {finding["name"]: finding for finding in findings}
    assert {"python", "numpy", "torch", "memory", "memlock", "file://", "pages://"} <= set(by_name)
    assert by_name["numpy"]["state"] == by_name["pages://"]["state"] == "ok"
    assert all(finding["advice"] for finding in findings if finding["state"] == "error")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "Storage backends" in text
    assert re.search(r"^  ok +numpy +\d", text, re.MULTILINE)


def test_doctor_without_what_the_cache_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor.importlib.util.find_spec
    missing = ("numpy", "mooncake", "torch")
    monkeypatch.setattr(
        "unified_cache.cli.doctor.importlib.util.find_spec",
        lambda name: None if name in missing else real(name),
    )
    assert main(["doctor", "--json"]) == 1
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["numpy"] == {
        "group": "Packages",
        "name": "numpy",
        "state": "error",
        "value": "not installed",
        "advice": "pip install numpy",
    }
    assert findings["mooncake://"]["state"] == "missing"
    assert findings["gpu"]["state"] == "missing"


def test_prefixes_are_told_compacted_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cache.support import make_cache, serve, toks

    url = f"file://{tmp_path}/store?size=4MB"
    with make_cache(64, storage=url, prefetch_threshold=0) as cache:
        serve(cache, toks(33))
        serve(cache, toks(41, 1000))
    (said_of,) = said(capsys, "stat", url)["prefixes"]
    assert {name: said_of[name] for name in ("prefixes", "pages", "tokens", "gone_pages")} == {
        "prefixes": 2,
        "pages": 18,
        "tokens": 72,
        "gone_pages": 0,
    }
    log = tmp_path / "store" / "slab.prefixes"
    size = log.stat().st_size
    log.write_bytes(log.read_bytes() * 2)  # everything twice
    assert said(capsys, "gc", url, "--dry-run", "--quiet").keys() == {"objects", "deleted", "dry_run"}
    assert log.stat().st_size == 2 * size
    assert said(capsys, "gc", url, "--quiet")["prefix_log_bytes"] == log.stat().st_size == size
    assert main(["storage", "stat", url]) == 0
    assert "2 prefixes, 18 pages, 72 tokens; 0 pages are gone" in capsys.readouterr().out
    said(capsys, "gc", url, "--keep", "0" * 16, "--quiet")
    assert said(capsys, "stat", url)["prefixes"] == []
    said(capsys, "clear", url, "--yes")
    assert not log.exists()

"""Settings are refused before anything is allocated, by name, with what is allowed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unified_cache
from tests.cache.support import MemoryStore, make_cache, make_pool
from unified_cache import ArgumentError, CacheConfig, StorageError, UnifiedCache
from unified_cache.pools.device import MhaDevicePool


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"page_size": 0}, ["page_size", "1..256", "0"]),
        ({"page_size": 257}, ["page_size", "1..256", "257"]),
        ({"page_size": 4.0}, ["page_size", "4.0"]),
        ({"write_policy": "write_around"}, ["write_policy", "'write_back'", "None", "'write_around'"]),
        ({"write_through_threshold": 0}, ["write_through_threshold", "0"]),
        ({"hicache_ratio": 0}, ["hicache_ratio", "> 0"]),
        ({"hicache_ratio": float("nan")}, ["hicache_ratio", "nan"]),
        ({"hicache_size": -1}, ["hicache_size", "> 0", "-1"]),
        ({"host_layout": "rows"}, ["host_layout", "'page_first'", "'layer_first'", "'rows'"]),
        ({"eviction_policy": "clock"}, ["eviction_policy", "lru", "slru", "clock"]),
        ({"policy_options": {"speed": 1}}, ["speed"]),
        ({"load_back_threshold": -1}, ["load_back_threshold", ">= 0", "-1"]),
        ({"load_back_threshold": True}, ["load_back_threshold", "True"]),
        ({"prefetch_policy": "never"}, ["prefetch_policy", "'best_effort'", "'timeout'", "'wait_complete'"]),
        ({"prefetch_threshold": -1}, ["prefetch_threshold", ">= 0"]),
        ({"prefetch_timeout": -0.5}, ["prefetch_timeout", "-0.5"]),
        ({"prefetch_timeout_per_1024": "1"}, ["prefetch_timeout_per_1024", "'1'"]),
        ({"model": 7}, ["model", "7"]),
        ({"hicache_ratio": 10**400}, ["hicache_ratio", "> 0"]),
        ({"hicache_ratio": 1e308}, ["hicache_ratio", "1e+308"]),
        ({"hicache_ratio": 1e298}, ["hicache_ratio", "1e+298"]),
        ({"hicache_size": 1e308}, ["hicache_size", "1e+308"]),
        ({"hicache_size": 10**400}, ["hicache_size", "> 0"]),
        ({"prefetch_timeout": 10**400}, ["prefetch_timeout", ">= 0"]),
        ({"eviction_policy": None}, ["eviction_policy", "'lru'", "None"]),
        ({"storage": "", "model": "m"}, ["storage must be a URL or a folder's path", "''"]),
        ({"storage": 5, "model": "m"}, ["storage must be a URL, a folder's path or a Backend, not 5"]),
        ({"storage": b"/tmp/x", "model": "m"}, ["storage must be a URL", "b'/tmp/x'"]),
        ({"storage": "a\0b", "model": "m"}, ["storage must be a URL", "a\\x00b"]),
        ({"storage": "file://h:x/", "model": "m"}, ["'file://h:x/' is no URL"]),
        ({"storage_timeout": 0}, ["storage_timeout", "> 0"]),
        ({"storage_read_threads": 0}, ["storage_read_threads", "1..256"]),
        ({"storage_write_threads": 257}, ["storage_write_threads", "1..256"]),
        ({"storage_compression": "gzip"}, ["storage_compression", "None, 'zstd', 'lz4'", "'gzip'"]),
        ({"storage_head_groups": 0}, ["storage_head_groups", "1..65535"]),
        ({"storage_head_groups": [2, "2"]}, ["storage_head_groups", "1..65535", "'2'"]),
        ({"kv_heads": 0}, ["kv_heads", "1..65535"]),
        ({"kv_heads": True}, ["kv_heads", "True"]),
        ({"storage": "/tmp/x"}, ["storage needs model=...: it names whose pages these are"]),
        ({"storage": "/tmp/x", "write_policy": None}, ["storage", "write_policy", "write_through"]),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        CacheConfig(**settings)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_size_is_that_of_the_pool() -> None:
    with pytest.raises(ArgumentError, match=r"page_size must be that of the device pool, 4, not 64"):
        UnifiedCache(CacheConfig(), make_pool())


@pytest.mark.parametrize("settings", [{"hicache_size": 10**9}, {"hicache_ratio": 1e8}])
def test_a_host_pool_that_does_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=rf"{next(iter(settings))}=.*GB are available: make it smaller"):
        make_cache(**settings)


@pytest.mark.parametrize("settings", [{"hicache_size": 1e-9}, {"hicache_ratio": 0.01}])
def test_a_host_pool_of_less_than_a_page(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="less than one page"):
        make_cache(**settings)


def test_the_size_wins_over_the_ratio() -> None:
    page_bytes = make_pool().page_bytes
    with make_cache(hicache_size=5.5 * page_bytes / 1e9, hicache_ratio=3.0) as cache:
        assert cache.usage()["host_pages"] == 5
    with make_cache(hicache_ratio=3.0) as cache:
        assert cache.usage()["host_pages"] == 48


def test_storage_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="can not be used"):
        make_cache(storage=str(tmp_path / "file"))
    with pytest.raises(StorageError, match="no storage backend s4://: take one of"):
        make_cache(storage="s4://bucket/x")
    with make_cache(storage=tmp_path / "as a path"):
        assert (tmp_path / "as a path").is_dir()
    with make_cache(storage=f"pages://{tmp_path}/a%20b"):
        assert (tmp_path / "a b").is_dir()


def test_a_storage_is_closed_if_the_cache_can_not_be_made() -> None:
    class Refuses(MemoryStore):
        def register(self, memory: memoryview) -> None:
            raise StorageError("no")

    store = Refuses()
    with pytest.raises(StorageError, match="no"):
        make_cache(storage=store)
    assert store.closed == 1


@pytest.mark.parametrize("name", ["num_pages", "page_size", "layers", "heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_device_pools(name: str, value: object) -> None:
    sizes: dict[str, Any] = {"num_pages": 2, "page_size": 4, "layers": 1, "heads": 1, "head_dim": 1}
    with pytest.raises(ArgumentError, match=f"{name} must be an integer"):
        MhaDevicePool(**(sizes | {name: value}))
    with pytest.raises(ArgumentError, match=r"page_size must be an integer in 1\.\.256"):
        MhaDevicePool(1, 257, 1, 1, 1)


def test_a_missing_torch_is_one_line() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import unified_cache\n"
        "print(unified_cache.CacheConfig().page_size, unified_cache.UnifiedCache.__name__)\n"
        "try:\n"
        "    import unified_cache.pools.device\n"
        "except unified_cache.UnifiedCacheError as error:\n"
        "    print(isinstance(error, ImportError), error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "64 UnifiedCache"
    assert second.startswith("True ")
    assert second.endswith("pip install unified-cache[torch]")


def test_lazy_exports() -> None:
    assert unified_cache.UnifiedCache is UnifiedCache
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = unified_cache.no_such_name
    code = "import sys, unified_cache; unified_cache.UnifiedCache; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

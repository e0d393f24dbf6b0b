"""SGLang's flags as settings, and versions that are not known: without SGLang."""

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from unified_cache.config import CacheConfig
from unified_cache.engines import sglang, sglang_hooks, sglang_version
from unified_cache.engines.sglang import EngineError
from unified_cache.engines.sglang_settings import EXTRA, extra_config, make_config, storage_name
from unified_cache.engines.sglang_weights import WeightNames
from unified_cache.errors import ArgumentError


def _memory(**changed: Any) -> SimpleNamespace:
    """What SGLang's flags are if none was given."""
    return SimpleNamespace(
        **{
            "hicache_storage_backend_extra_config": None,
            "hicache_host_memory_mode": "cache",
            "hicache_storage_backend": None,
            "hicache_write_policy": "write_through",
            "hicache_ratio": 2.0,
            "hicache_size": 0,
            "hicache_mem_layout": "page_first",
            "hicache_storage_prefetch_policy": "timeout",
            "radix_eviction_policy": "lru",
            "radix_eviction_policy_config": None,
        }
        | changed
    )


def _config(*, tiers: bool = True, **changed: Any) -> CacheConfig:
    return make_config(_memory(**changed), page_size=16, model="llama", weight_version="2", tiers=tiers)


def _stored(**extra: Any) -> dict[str, Any]:
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def test_without_tiers_there_is_the_device_alone() -> None:
    config = _config(tiers=False)
    assert config.write_policy is None
    assert config.storage is None
    assert (config.page_size, config.model, config.weight_version) == (16, "llama", "2")


def test_flags_become_settings() -> None:
    config = _config(
        hicache_write_policy="write_back",
        hicache_size=3,
        hicache_mem_layout="page_head",
        hicache_storage_prefetch_policy="best_effort",
        radix_eviction_policy="slru",
        radix_eviction_policy_config={"protected_threshold": 4},
        **_stored(
            storage="/tmp/pages",
            storage_compression=None,
            prefetch_threshold=16,
            prefetch_timeout_base=2,
            prefetch_timeout_per_ki_token=0.5,
            backend_name="ignored",
        ),
    )
    assert config.write_policy == "write_back"
    assert config.hicache_size == 3.0
    assert config.host_layout == "page_head"
    assert config.prefetch_policy == "best_effort"
    assert (config.eviction_policy, config.policy_options) == ("slru", {"protected_threshold": 4})
    assert config.storage == "/tmp/pages"
    assert config.prefetch_threshold == 16
    assert (config.prefetch_timeout, config.prefetch_timeout_per_1024) == (2, 0.5)


def test_every_extra_setting_is_one_of_the_cache() -> None:
    assert set(EXTRA) <= set(CacheConfig.__dataclass_fields__)


def test_the_extra_settings_can_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "extra.json"
    file.write_text('{"storage": "/tmp/pages"}')
    assert extra_config(f"@{file}") == {"storage": "/tmp/pages"}


@pytest.mark.parametrize(
    "changed, said",
    [
        (_stored(), "needs a storage"),
        (_stored(storage=""), "needs a storage"),
        (_stored(storage=7), "needs a storage"),
        (_stored(storage="/tmp/x", storag="y"), "no setting 'storag'"),
        ({"hicache_storage_backend": "file"}, "file is SGLang's own"),
        ({"hicache_storage_backend_extra_config": '{"storage": "/tmp/x"}'}, "dynamic"),
        ({"hicache_storage_backend_extra_config": "{"}, "JSON"),
        ({"hicache_storage_backend_extra_config": "[]"}, "JSON object"),
        ({"hicache_storage_backend_extra_config": "@/nowhere"}, "nowhere"),
        ({"hicache_mem_layout": "page_first_kv_split"}, "page_first_kv_split"),
        ({"hicache_mem_layout": "layer_first"} | _stored(storage="/tmp/x"), "layer_first"),
        ({"radix_eviction_policy": "random"}, "random"),
    ],
)
def test_what_can_not_be_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as error:
        _config(**changed)
    assert "\n" not in str(error.value)


def test_storage_without_tiers_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--enable-hierarchical-cache"):
        _config(tiers=False, **_stored(storage="/tmp/x"))


def test_the_mode_without_a_host_tier_is_refused() -> None:
    with pytest.raises(EngineError, match="buffer_only"):
        _config(hicache_host_memory_mode="buffer_only")


def test_no_storage_where_none_is_asked_for() -> None:
    assert storage_name(None, {}) is None


# Versions: a package that looks like SGLang as far as that matters.


class _MatchResult(NamedTuple):
    device_prefix_len: int
    last_device_node: int
    last_host_node: int
    best_match_node: int


def _fields(*names: str) -> type:
    return NamedTuple("_Fields", [(name, int) for name in names])  # type: ignore[misc]


def _interface(*, abstract: tuple[str, ...] = (), without: str = "") -> types.ModuleType:
    """A module with the interface that we know; `abstract`: what it asks for besides."""
    module = types.ModuleType("sglang.srt.mem_cache.base_prefix_cache")
    names = sglang_version._ABSTRACT | sglang_version._DECLARED
    members: dict[str, Any] = {name: lambda self: None for name in names if name != without}
    members["checkpoint"] = lambda self, req, *, up_to: None
    base = type("BasePrefixCache", (), members)
    base.__abstractmethods__ = frozenset(sglang_version._ABSTRACT | set(abstract))  # type: ignore[attr-defined]
    module.BasePrefixCache = base  # type: ignore[attr-defined]
    for name, fields in sglang_version._FIELDS.items():
        setattr(module, name, _fields(*sorted(fields)))
    module.MatchResult = _MatchResult  # type: ignore[attr-defined]
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a module in the place of SGLang's."""
    monkeypatch.setattr(sglang_version, "version", lambda: "9.9.9")

    def install(module: types.ModuleType) -> None:
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)

    return install


def test_the_interface_that_we_know_is_taken(installed: Any) -> None:
    installed(_interface())
    sglang_version.check_version()


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"abstract": ("teleport",)}, "it asks for teleport"),
        ({"without": "init_load_back"}, "it has no init_load_back"),
    ],
)
def test_another_interface_is_refused_with_its_number(
    installed: Any, changed: dict[str, Any], said: str
) -> None:
    installed(_interface(**changed))
    with pytest.raises(EngineError, match=f"SGLang 9.9.9 .*{said}") as error:
        sglang_version.check_version()
    assert sglang_version.KNOWN in str(error.value)
    assert "\n" not in str(error.value)


def test_fields_that_have_other_names_are_a_difference(installed: Any) -> None:
    module = _interface()
    module.MatchResult = _fields("device_indices", "last_device_node")  # type: ignore[attr-defined]
    installed(module)
    with pytest.raises(EngineError, match="MatchResult has no best_match_node, device_prefix_len"):
        sglang_version.check_version()


def test_an_sglang_without_that_module_is_refused(installed: Any) -> None:
    installed(types.ModuleType("sglang.srt.mem_cache.radix_cache"))
    with pytest.raises(EngineError, match="can not be imported"):
        sglang_version.check_version()


def test_registering_twice_is_fine(installed: Any) -> None:
    module, factories = types.ModuleType("sglang.srt.mem_cache.registry"), dict[str, Any]()
    module.registered_radix_cache_backends = lambda: list(factories)  # type: ignore[attr-defined]
    module.register_radix_cache_backend = factories.__setitem__  # type: ignore[attr-defined]
    installed(module)
    sglang.register()
    sglang.register()
    assert factories == {"unified-cache": sglang.make_cache}


# Weights that change while it runs.


def test_weights_have_the_name_that_they_were_given() -> None:
    names = WeightNames()
    assert names.name(None) == ""
    assert names.name("1") == "1"
    names.change("1", "2")
    assert names.name("2") == "2"
    assert names.name("1") == "1"


def test_weights_that_nobody_names_share_nothing_with_the_old_ones() -> None:
    names, others = WeightNames(), WeightNames()
    names.change("1", None)
    own = names.name("1")
    assert own not in ("", "1")
    assert names.name("1") == own  # until they change again
    others.change("1", None)
    assert others.name("1") != own
    names.change("1", None)
    assert names.name("1") not in ("1", own)
    assert names.name("2") == "2"  # named afterwards, by /update_weight_version
    assert names.name("1") == "1"


def test_a_name_may_come_with_a_later_part_of_the_weights() -> None:
    names = WeightNames()
    names.change("1", None)
    names.change("1", "2")
    assert names.name("2") == "2"
    names.change("2", None)
    names.name("2")
    names.change("2", "2")
    assert names.name("2") == "2"  # who says so must know


class _Cache:
    """What the hooks call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def new_weights(self, version: str | None) -> None:
        self.calls.append(version)

    def settle(self) -> None:
        self.calls.append("settle")

    def flushed(self) -> None:
        self.calls.append("flushed")


def _scheduler(cache: Any, *, running: int = 0, waiting: int = 0, paused: bool = False) -> Any:
    return SimpleNamespace(
        tree_cache=cache,
        running_batch=SimpleNamespace(is_empty=lambda: not running),
        chunked_req=None,
        waiting_queue=[None] * waiting,
        _engine_paused=paused,
    )


def test_hooks_tell_of_new_weights() -> None:
    cache, storage = _Cache(), _Cache()
    theirs = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=storage))
    for tree in (cache, theirs):
        updater = SimpleNamespace(scheduler=_scheduler(tree))
        sglang_hooks._new_weights(updater, SimpleNamespace(weight_version="2"))
        sglang_hooks._new_weights(updater, SimpleNamespace())
    assert cache.calls == storage.calls == ["2", None]
    sglang_hooks._after_flush(False, _scheduler(theirs))
    sglang_hooks._after_flush(True, _scheduler(theirs))
    assert storage.calls[2:] == ["flushed"]


def test_hooks_wait_only_where_nothing_runs() -> None:
    cache = _Cache()
    for state in ({"running": 1}, {"waiting": 1}, {"running": 1, "paused": True}):
        sglang_hooks._before_flush(_scheduler(cache, **state))
    assert cache.calls == []
    sglang_hooks._before_flush(_scheduler(cache))
    sglang_hooks._before_flush(_scheduler(cache, waiting=1, paused=True))
    sglang_hooks._before_release(SimpleNamespace(scheduler=_scheduler(cache)))
    assert cache.calls == ["settle"] * 3
    for other in (None, object()):  # SGLang's own cache
        sglang_hooks._before_flush(_scheduler(other))


def test_an_sglang_without_what_is_hooked_is_refused(installed: Any) -> None:
    installed(types.ModuleType("sglang.srt.managers.scheduler"))
    module = types.ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = module.HookType = None  # type: ignore[attr-defined]
    installed(module)
    with pytest.raises(EngineError, match="another way to change weights and to flush") as error:
        sglang_hooks.register()
    assert "\n" not in str(error.value)

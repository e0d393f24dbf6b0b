"""Run by the engines' Python: `SglangStorage` on host pools that look like SGLang's, page by page.

An assertion that fails ends it with an error; else it prints "fine".
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from unified_cache.engines import sglang_storage
from unified_cache.engines.sglang_storage import SglangStorage

PAGE = 4
PAGES = 12


class HostPool:
    """Keys and values apart, as in SGLang's pools that are page_first."""

    layout, page_size = "page_first", PAGE

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.dtype = dtype
        self.k_buffer = torch.zeros(PAGES * PAGE, width, dtype=dtype)
        self.v_buffer = torch.zeros(PAGES * PAGE, width, dtype=dtype)
        self.on_device: list[Any] = []

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % PAGE == 0
        size = PAGE * self.k_buffer.shape[1] * self.dtype.itemsize
        pages = [int(index) // PAGE for index in indices[::PAGE]]
        buffers = (self.k_buffer, self.v_buffer)
        places = [buffer.data_ptr() + page * size for page in pages for buffer in buffers]
        return places, [size] * len(places)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in (self.k_buffer, self.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def pages(self, numbers: list[int]) -> torch.Tensor:
        both = torch.cat((self.k_buffer, self.v_buffer), 1).view(PAGES, -1)
        return both[numbers].clone()


def config(store: str, **changed: Any) -> Any:
    """A ``HiCacheStorageConfig``."""
    extra = {"storage": store, "storage_timeout": 2.0, "backend_name": "x"} | changed.pop("extra", {})
    about = {"model_name": "llama", "is_mla_model": False, "tp_rank": 0, "tp_size": 1, "pp_rank": 0}
    about |= {"pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1}
    return SimpleNamespace(**(about | changed), extra_config=extra)


def slots(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])


def keys(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def opened(store: str, pool: HostPool, **changed: Any) -> SglangStorage:
    storage = SglangStorage(config(store, **changed), {})
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


def check_pages(folder: Path) -> None:
    """What is written is what is read, into other pages, by another process's storage."""
    store = str(folder / "pages")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        pool = HostPool(dtype, 8)
        pool.fill(1)
        storage = opened(store, pool)
        expected = pool.pages([3, 1, 2]).view(torch.uint8)
        assert storage.batch_set_v1(keys(1, 2, 3), slots([3, 1, 2])) == [True] * 3
        assert storage.batch_exists(keys(1, 2, 3, 4)) == 3
        assert storage.batch_exists(keys(4, 1)) == 0
        storage.close()
        other = HostPool(dtype, 8)
        storage = opened(store, other)
        assert storage.batch_get_v1(keys(1, 9, 3, 2), slots([0, 4, 5, 6])) == [True, False, True, True]
        assert torch.equal(other.pages([0, 6, 5]).view(torch.uint8), expected[[0, 1, 2]])
        storage.close()


def check_names(folder: Path) -> None:
    """Whatever changes the bytes is another page."""
    store, pool = str(folder / "names"), HostPool(torch.float32, 8)
    storage = opened(store, pool)
    assert storage.batch_set_v1(keys(1), slots([0])) == [True]
    different: list[dict[str, Any]] = [
        {"model_name": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ]
    for changed in different:
        assert opened(store, pool, **changed).batch_exists(keys(1)) == 0, changed
    assert opened(store, HostPool(torch.bfloat16, 8)).batch_exists(keys(1)) == 0
    assert opened(store, HostPool(torch.float32, 16)).batch_exists(keys(1)) == 0
    # Ranks that hold the same bytes share them.
    alike = opened(store, pool, is_mla_model=True, tp_rank=0, tp_size=2)
    assert alike.batch_set_v1(keys(2), slots([0])) == [True]
    assert opened(store, pool, is_mla_model=True, tp_rank=1, tp_size=2).batch_exists(keys(2)) == 1
    versions = {"now": "1"}
    sglang_storage.get_serving = lambda: SimpleNamespace(weight_version=versions["now"])
    storage = opened(store, pool)
    assert storage.batch_set_v1(keys(3), slots([0])) == [True]
    # Other weights: nothing until SGLang has emptied its cache, since what it holds may be of both.
    storage.new_weights("2")
    versions["now"] = "2"
    assert storage.batch_exists(keys(3)) == 0
    assert storage.batch_set_v1(keys(4), slots([0])) == [False]
    storage.flushed()
    assert storage.batch_exists(keys(3)) == 0
    assert storage.batch_set_v1(keys(4), slots([0])) == [True]
    assert opened(store, pool).batch_exists(keys(4)) == 1
    storage.new_weights("1")
    versions["now"] = "1"
    storage.flushed()
    assert storage.batch_exists(keys(3)) == 1
    # And others still that nobody has named: they share nothing with anybody.
    storage.new_weights(None)
    storage.flushed()
    assert storage.batch_exists(keys(3)) == 0
    assert storage.batch_set_v1(keys(5), slots([0])) == [True]
    storage.flushed()
    assert storage.batch_exists(keys(5)) == 1
    assert opened(store, pool).batch_exists(keys(5)) == 0


def check_tensors(folder: Path) -> None:
    """The way on which SGLang copies each page."""
    storage = opened(str(folder / "tensors"), HostPool(torch.bfloat16, 8))
    values = [torch.randn(3, 5).to(torch.bfloat16) for _ in range(3)]
    assert storage.batch_set(keys(1, 2, 3), [value.t() if value is values[0] else value for value in values])
    targets = [torch.zeros(15, dtype=torch.bfloat16) for _ in range(3)]
    got = storage.batch_get(keys(1, 2, 7), targets)
    assert got[2] is None
    assert torch.equal(got[0], values[0].t().reshape(-1))
    assert torch.equal(got[1], values[1].view(-1))
    assert storage.set("a key of another form", values[0])
    assert storage.get("a key of another form", targets[0]) is not None
    assert storage.get(keys(8)[0], targets[0]) is None
    assert storage.get(keys(1)[0]) is None  # nowhere to put it


def check_several_pools(folder: Path) -> None:
    """v2: against an obvious model of what is stored."""
    draw = random.Random(5)
    for round_ in range(20):
        pool, states = HostPool(torch.float32, 8), HostPool(torch.float32, 3)
        storage = SglangStorage(config(str(folder / f"several-{round_}")), {})
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, "kv")
        storage.register_mem_host_pool_v2(states, "swa")
        storage.on_host_pools_registered()
        chain = keys(*range(8))
        stored = {name: {key for key in chain if draw.random() < 0.8} for name in ("kv", "swa")}
        for name in stored:
            some = sorted(stored[name])
            transfer = PoolTransfer(name=name, host_indices=slots(list(range(len(some)))), keys=some)
            assert storage.batch_set_v2([transfer]) == {name: [True] * len(some)}
        first = next((at for at, key in enumerate(chain) if key not in stored["kv"]), len(chain))
        tail = draw.randrange(1, 4)
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            asked = PoolTransfer(name="swa", keys=chain[:tail], hit_policy=policy)
            needed = len(chain) if policy is PoolHitPolicy.ALL_PAGES else tail
            expected = [
                length
                for length in range(1, first + 1)
                if set(chain[max(0, length - needed) : length]) <= stored["swa"]
            ]
            got = storage.batch_exists_v2(chain, [asked])
            assert (got.restorable_prefix_pages or []) == expected, (policy, stored, tail)
            assert got.kv_hit_pages == max(expected, default=0)
        reads = [PoolTransfer(name=name, host_indices=slots(list(range(8))), keys=chain) for name in stored]
        answer = storage.batch_get_v2(reads)
        assert answer == {name: [key in stored[name] for key in chain] for name in stored}
        storage.close()


def check_nothing_is_raised(folder: Path) -> None:
    """On the way of the data: whatever happens is a miss."""
    pool = HostPool(torch.float32, 8)
    for faults in ("down=1", "error=1", "corrupt=1", "short=1"):
        storage = opened(f"memory://faulty?{faults}", pool)
        for _ in range(8):
            assert storage.batch_set_v1(keys(1, 2), slots([0, 1])) in ([False] * 2, [True] * 2)
            assert storage.batch_get_v1(keys(1, 2), slots([0, 1])) == [False] * 2
            assert storage.batch_exists(keys(1, 2)) in (0, 2)
        storage.close()
    storage = opened(str(folder / "wrong"), pool)
    assert storage.batch_get_v1(keys(1, 2), slots([0])) == [False, False]
    assert storage.batch_set_v1(keys(1), slots([PAGES + 5])) == [False]
    assert storage.batch_get_v2([PoolTransfer(name="unknown", host_indices=slots([0]), keys=keys(1))]) == {
        "unknown": [False]
    }
    assert storage.batch_exists_v2(keys(1), [PoolTransfer(name="unknown", keys=keys(1))]).kv_hit_pages == 0
    assert storage.batch_set(keys(1), [object()]) is False
    assert storage.batch_get(keys(1), [object()]) == [None]
    storage.close()
    assert storage.batch_get_v1(keys(1), slots([0])) == [False]
    assert storage.batch_set_v1(keys(1), slots([0])) == [False]
    assert storage.batch_exists(keys(1)) == 0


def check_refusals(folder: Path) -> None:
    """At the start, in one line."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"extra": {"storage": ""}}, "needs a storage"),
        ({"extra": {"storage": "nowhere://x"}}, "nowhere"),
        ({"extra": {"storage_compression": "rar"}}, "rar"),
        ({"extra": {"storage_timeout": "soon"}}, "soon"),
        ({"extra": {"storage_timeout": 0}}, "0"),
        ({"extra": {"storag": "x"}}, "storag"),
        ({"model_name": ""}, "model"),
    ]
    for changed, said in wrong:
        message = ""
        try:
            SglangStorage(config(str(folder / "refused"), **changed), {})
        except (ValueError, OSError) as error:
            message = str(error)
        assert said in message, (changed, message)
        assert "\n" not in message


def main() -> None:
    folder = Path(sys.argv[1])
    sglang_storage.get_serving = lambda: SimpleNamespace(weight_version="1")
    check_pages(folder)
    check_names(folder)
    check_tensors(folder)
    check_several_pools(folder)
    check_nothing_is_raised(folder)
    check_refusals(folder)
    print("fine")


main()

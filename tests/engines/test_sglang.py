"""The cache inside a real SGLang, on this machine's CPU: it answers what it answers without a cache."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.environment import HERE, engine_python
from tests.engines.sglang_server import PAGE, SglangServer, engine_environment, model_folder
from unified_cache.storage.keys import KEY
from unified_cache.storage.page_format import HEADER_BYTES, page_bytes_of, write_headers

pytestmark = pytest.mark.engines

ANSWER = 12
_RANDOM = random.Random(11)


def _tokens(count: int) -> list[int]:
    return [_RANDOM.randrange(2, 512) for _ in range(count)]


_SHARED = _tokens(160)
PROMPTS = {
    "long": _tokens(500),
    "other": _tokens(300),
    "salted": _tokens(200),
    "stored": _tokens(400),
    "corrupt": _tokens(320),
    "damaged": _tokens(330),
    "failing": _tokens(240),
    "killed": _tokens(260),
} | {f"shared {number}": _SHARED + _tokens(40 + 16 * number) for number in range(8)}

# Small enough that what the tests ask does not fit, and requests are taken off the device again and again.
_TIERS = [
    "--max-total-tokens",
    "1536",
    "--radix-cache-backend",
    "unified-cache",
    "--enable-hierarchical-cache",
]
_TIERS += ["--hicache-ratio", "3", "--hicache-storage-backend", "dynamic"]
_TIERS += ["--hicache-storage-prefetch-policy", "wait_complete", "--enable-metrics"]


def _stored_in(folder: Path) -> list[str]:
    # Nothing comes to host by itself, so that it is known where a hit comes from.
    extra = {"storage": str(folder), "storage_warm": 0, "prefetch_threshold": PAGE}
    return ["--hicache-storage-backend-extra-config", json.dumps(extra)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def without_cache(folder: Path) -> dict[str, dict[str, Any]]:
    """The answers of SGLang alone, one request at a time."""
    with SglangServer.start(folder, "--max-total-tokens", "4096", "--disable-radix-cache") as server:
        return {name: server.generate(prompt, ANSWER) for name, prompt in PROMPTS.items()}


def _same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["tokens"] == expected["tokens"]
    np.testing.assert_allclose(got["logprobs"], expected["logprobs"], atol=1e-3)


def _tier_hits(got: dict[str, Any]) -> dict[str, int]:
    details = got["meta"]["cached_tokens_details"] or {}
    return {tier: count for tier in ("device", "host", "storage") if (count := details.get(tier, 0))}


def _whole(prompt: str) -> int:
    """Tokens of a prompt that can be cached: whole pages, and one token is always computed."""
    return (len(PROMPTS[prompt]) - 1) // PAGE * PAGE


def _idle_and_whole(server: SglangServer) -> dict[str, Any]:
    """Nothing is held on to: each page is free at SGLang's, or in the tree; its own count says so too."""
    seen = server.idle()
    usage = seen["idle"]
    assert usage["requests"] == usage["device_request_pages"] == usage["device_quarantined_pages"] == 0
    assert usage["device_free_pages"] == 0  # ours has none: SGLang's allocator has them
    held = ("host_free_pages", "host_tree_pages", "host_quarantined_pages", "host_reading_pages")
    assert sum(usage[name] for name in held) == usage["host_pages"]
    server.check_log()
    stats: dict[str, Any] = seen["stats"]
    return stats


def test_random_calls_on_pools_of_sglang(tmp_path: Path) -> None:
    """Without a server: every slot that is served is looked at, and their count; see the script."""
    script = HERE / "sglang_path" / "check_radix.py"
    command = [str(engine_python()), "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=engine_environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("fine")


def test_vllm_gives_the_same_tokens(without_cache: dict[str, dict[str, Any]]) -> None:
    names = ["other", "salted", "failing"]
    script = HERE / "sglang_path" / "answer_in_vllm.py"
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own = engine_environment(more=variables | {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""})
    del own["SGLANG_USE_CPU_ENGINE"]
    done = subprocess.run(
        [engine_python(), script, model_folder(), str(ANSWER)],
        input=json.dumps([PROMPTS[name] for name in names]),
        capture_output=True,
        text=True,
        env=own,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert answers == [without_cache[name]["tokens"] for name in names]


@pytest.fixture(scope="module")
def first_server(folder: Path, without_cache: Any) -> Iterator[SglangServer]:
    """A server with all three tiers, whose requests are taken off the device now and then."""
    retracting = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    variables = {"FAIL_LOAD": str(folder / "fail-load")} | retracting
    with SglangServer.start(folder, *_TIERS, *_stored_in(folder / "store"), environment=variables) as server:
        yield server


@pytest.fixture(scope="module")
def second_server(folder: Path, first_server: SglangServer) -> Iterator[SglangServer]:
    """Another one, later, on what the first one has stored."""
    first_server.flush()
    _idle_and_whole(first_server)
    first_server.stop()
    with SglangServer.start(folder, *_TIERS, *_stored_in(folder / "store")) as server:
        yield server
        _idle_and_whole(server)


class TestTiers:
    """Each test begins with nothing on device and host."""

    @pytest.fixture
    def server(self, first_server: SglangServer) -> SglangServer:
        first_server.flush()
        first_server.lines()
        return first_server

    def test_every_tier_gives_the_same_answer(self, server: SglangServer, without_cache: Any) -> None:
        expected, prompt, whole = without_cache["long"], PROMPTS["long"], _whole("long")
        cold = server.generate(prompt, ANSWER)
        _same(cold, expected)
        assert cold["cached"] == 0
        assert server.ran() == [len(prompt)]

        on_device = server.generate(prompt, ANSWER)
        _same(on_device, expected)
        assert _tier_hits(on_device) == {"device": whole}
        assert server.ran() == [len(prompt) - whole]

        # Others push it off the device, and it stays on host.
        for name in ("other", "stored", "corrupt", "damaged"):
            _same(server.generate(PROMPTS[name], ANSWER), without_cache[name])
        server.lines()
        from_host = server.generate(prompt, ANSWER)
        _same(from_host, expected)
        assert _tier_hits(from_host)["host"] > 0
        assert sum(_tier_hits(from_host).values()) == whole
        assert server.ran() == [len(prompt) - whole]

        server.flush()
        from_storage = server.generate(prompt, ANSWER)
        _same(from_storage, expected)
        assert _tier_hits(from_storage) == {"storage": whole}
        assert server.ran() == [len(prompt) - whole]
        metrics = server.call("/metrics").decode()
        assert 'sglang:evicted_tokens_total{cache_type="SglangCache"' in metrics
        assert "sglang:hicache_host_total_tokens" in metrics

    def test_new_weights_find_nothing_of_the_old_ones(self, server: SglangServer, without_cache: Any) -> None:
        """Nobody has said that they have another version, and the storage has the old ones' pages."""
        prompt, whole = PROMPTS["long"], _whole("long")
        server.generate(prompt, ANSWER)
        server.flush()
        server.call("/update_weights_from_disk", {"model_path": str(model_folder(8))})
        cold = server.generate(prompt, ANSWER, cache_salt="cold")
        assert cold["tokens"] != without_cache["long"]["tokens"]
        got = server.generate(prompt, ANSWER)
        _same(got, cold)
        assert got["cached"] == 0
        server.flush()
        again = server.generate(prompt, ANSWER)
        _same(again, cold)
        assert _tier_hits(again) == {"storage": whole}  # under a name of this server's own
        old = {"model_path": str(model_folder()), "weight_version": "default"}
        server.call("/update_weights_from_disk", old)
        back = server.generate(prompt, ANSWER)
        _same(back, without_cache["long"])
        assert _tier_hits(back) == {"storage": whole}
        server.check_log()

    def test_memory_may_be_released_right_after_an_answer(
        self, server: SglangServer, without_cache: Any
    ) -> None:
        """SGLang's scheduler ends if anything is under way then."""
        for name in ("other", "stored", "long"):
            _same(server.generate(PROMPTS[name], ANSWER), without_cache[name])
            server.call("/release_memory_occupation", {})
            server.call("/resume_memory_occupation", {})
        _same(server.generate(PROMPTS["long"], ANSWER), without_cache["long"])
        _idle_and_whole(server)

    def test_a_pause_with_a_flush_in_it(self, server: SglangServer, without_cache: Any) -> None:
        """While it pauses, SGLang does not call the cache; what was under way must end all the same."""
        prompt = PROMPTS["other"]
        with ThreadPoolExecutor(1) as pool:
            paused = pool.submit(server.generate, prompt, 150)
            while not any("decoded" in line for line in server.lines()):
                assert not paused.done()
            server.call("/pause_generation", {"mode": "retract"})
            server.call("/flush_cache", {})
            server.call("/continue_generation", {})
            got = paused.result()
        assert got["tokens"][:ANSWER] == without_cache["other"]["tokens"]
        assert got["tokens"] == server.generate(prompt, 150)["tokens"]
        _idle_and_whole(server)

    def test_a_copy_that_fails_is_computed(
        self, server: SglangServer, without_cache: Any, folder: Path
    ) -> None:
        prompt = PROMPTS["failing"]
        _same(server.generate(prompt, ANSWER), without_cache["failing"])
        server.flush()
        server.lines()
        (folder / "fail-load").touch()
        _same(server.generate(prompt, ANSWER), without_cache["failing"])
        lines = server.lines()
        assert [line for line in lines if "failed_load" in line] == [
            {"failed_load": _whole("failing") // PAGE}
        ]
        assert [line["ran"] for line in lines if "ran" in line] == [len(prompt)]
        _same(server.generate(prompt, ANSWER), without_cache["failing"])
        assert server.ran() == [len(prompt) - _whole("failing")]

    def test_namespaces_do_not_see_each_other(self, server: SglangServer, without_cache: Any) -> None:
        prompt, expected = PROMPTS["salted"], without_cache["salted"]
        names: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}]
        for flushed in (False, True):
            for options in names:
                got = server.generate(prompt, ANSWER, **options)
                _same(got, expected)
                # The second time each finds its own in storage, whatever the others did.
                assert _tier_hits(got) == ({"storage": _whole("salted")} if flushed else {})
            server.flush()

    def test_many_at_once(self, server: SglangServer, without_cache: Any) -> None:
        names = [name for name in PROMPTS if name.startswith("shared")] * 2
        with ThreadPoolExecutor(len(names) + 1) as pool:
            doomed = pool.submit(_begin_and_abort, server)
            answers = list(pool.map(lambda name: server.generate(PROMPTS[name], ANSWER), names))
            doomed.result()
        for name, answer in zip(names, answers, strict=True):
            _same(answer, without_cache[name])
        lines = server.lines()
        assert sum(line.get("retracted", 0) for line in lines) > 0
        computed = sum(line["ran"] for line in lines if "ran" in line)
        assert computed < sum(len(PROMPTS[name]) for name in names)
        _idle_and_whole(server)

    def test_what_it_writes_is_there_for_others(self, server: SglangServer, without_cache: Any) -> None:
        for name in ("stored", "corrupt", "damaged", "killed"):
            _same(server.generate(PROMPTS[name], ANSWER), without_cache[name])
        server.flush()  # waits until all is written
        assert _idle_and_whole(server)["storage_failed_pages"] == 0


def _begin_and_abort(server: SglangServer) -> None:
    """A long request, and its end before it has ended."""
    sampling = {"max_new_tokens": 800, "ignore_eos": True}
    body = {"input_ids": PROMPTS["long"], "rid": "doomed", "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.call, "/generate", body)
        while not wait([request], timeout=0.3).done:
            server.call("/abort_request", {"rid": "doomed"})
    # SGLang answers with what there was by then, or with an error.
    if (error := request.exception()) is not None:
        assert "abort" in str(error).lower()
        return
    meta = json.loads(request.result())["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] < 800


class TestSecondProcess:
    """After a restart; these tests damage the store, so their order counts."""

    @pytest.fixture
    def store(self, folder: Path) -> Path:
        return folder / "store"

    @pytest.fixture
    def server(self, second_server: SglangServer) -> SglangServer:
        return second_server

    def test_it_computes_nothing_that_is_stored(self, server: SglangServer, without_cache: Any) -> None:
        got = server.generate(PROMPTS["stored"], ANSWER)
        _same(got, without_cache["stored"])
        assert _tier_hits(got) == {"storage": _whole("stored")}
        assert server.ran() == [len(PROMPTS["stored"]) - _whole("stored")]

    def test_damage_is_seen_and_never_used(
        self, server: SglangServer, store: Path, without_cache: Any
    ) -> None:
        before = server.idle()["stats"]["storage_corrupt_pages"]
        _change(store, checksum=False)
        got = server.generate(PROMPTS["damaged"], ANSWER)
        _same(got, without_cache["damaged"])
        assert got["cached"] == 0
        assert server.idle()["stats"]["storage_corrupt_pages"] > before

    def test_the_answer_comes_from_the_stored_bytes(
        self, server: SglangServer, store: Path, without_cache: Any
    ) -> None:
        _change(store, checksum=True)
        got = server.generate(PROMPTS["corrupt"], ANSWER)
        assert _tier_hits(got) == {"storage": _whole("corrupt")}
        assert got["tokens"] != without_cache["corrupt"]["tokens"]
        server.flush()

    def test_a_storage_that_goes_away_under_load(
        self, server: SglangServer, store: Path, without_cache: Any
    ) -> None:
        names = [name for name in PROMPTS if name != "corrupt"]
        shutil.rmtree(store)
        store.write_text("no folder any more")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda name: server.generate(PROMPTS[name], ANSWER), names))
        for name, answer in zip(names, answers, strict=True):
            _same(answer, without_cache[name])
        _same(server.generate(PROMPTS["other"], ANSWER), without_cache["other"])


def test_two_ranks(folder: Path, without_cache: dict[str, dict[str, Any]]) -> None:
    """Tensor parallel: each scheduler has a tree, and decides what the other decides."""
    variables = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/there/is/none.so"}
    variables |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    flags = [*_TIERS, *_stored_in(folder / "of-two"), "--tp-size", "2"]
    names = [name for name in PROMPTS if name.startswith("shared")]
    with SglangServer.start(folder, *flags, environment=variables) as server:
        for tier in ("", "device", "storage"):
            if tier == "storage":
                server.flush()
            server.lines()
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda name: server.generate(PROMPTS[name], ANSWER), names))
            for name, answer in zip(names, answers, strict=True):
                _same(answer, without_cache[name])
            if tier:
                assert sum(_tier_hits(answer).get(tier, 0) for answer in answers) > 0
                # Both ranks write down what they run, and run the same.
                computed = sum(line["ran"] for line in server.lines() if "ran" in line)
                assert computed < sum(len(PROMPTS[name]) for name in names)
        _idle_and_whole(server)


def _change(store: Path, *, checksum: bool) -> None:
    """Change what is stored.

    Args:
        store: a folder with a file for each object.
        checksum: change the sign of every number, and make the checksum fit, so that nothing can tell; else
            change one bit, and leave the checksum alone.
    """
    changed = 0
    for file in [path for path in store.rglob("*") if KEY.fullmatch(path.name)]:
        content = np.frombuffer(file.read_bytes(), np.uint8).copy()
        header, body = content[np.newaxis, :HEADER_BYTES], content[HEADER_BYTES:]
        if checksum:
            body[3::4] ^= 0x80
            fresh, sizes = np.empty_like(header), page_bytes_of(header.copy())
            checksums = write_headers(fresh, [file.name], [len(body)], sizes[0], [0])
            checksums.make([0], [memoryview(body)])
            content[:HEADER_BYTES] = fresh[0]
        else:
            body[0] ^= 1
        file.chmod(0o600)
        file.write_bytes(content.tobytes())
        changed += 1
    assert changed

"""The cache inside a real vLLM on a CPU, with a small Llama that is made here.

What was skipped is seen by the tokens that vLLM's scheduler really ran, not by a counter of ours.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.environment import engine_python, install_package, vllm_variables
from tests.engines.stored_bytes import change_stored
from tests.engines.vllm_http import Server

pytestmark = pytest.mark.engines

_SCRIPTS = Path(__file__).parent / "in_vllm"
# The prompt has 300 tokens, in blocks of 32: 9 of them can be loaded, 12 tokens are left.
_ALL, _REST, _BLOCKS = 300, 12, 9


@pytest.fixture(scope="module")
def python() -> Path:
    return engine_python()


@pytest.fixture(scope="module")
def folder(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, adapters, and the package as pip would install it."""
    made = tmp_path_factory.mktemp("vllm")
    package = made / "package"
    package.mkdir()
    install_package(package)
    _run([str(python), "-W", "ignore", str(_SCRIPTS / "tiny_models.py"), str(made)], None)
    return made


@pytest.fixture(scope="module")
def first(python: Path, folder: Path) -> dict[str, Any]:
    return _scenario(python, folder, "first")


@pytest.fixture(scope="module")
def second(python: Path, folder: Path, first: dict[str, Any]) -> dict[str, Any]:
    for name in ("wrong", "damaged"):
        shutil.copytree(folder / "store", folder / name)
        change_stored(folder / name, mend_checksum=name == "wrong")
    return _scenario(python, folder, "second")


def _scenario(python: Path, folder: Path, name: str) -> dict[str, Any]:
    script = [str(python), "-W", "ignore", str(_SCRIPTS / "scenario.py"), name, str(folder)]
    said = _run(script, folder / "package")
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, said[-3000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def _run(command: list[str], package: Path | None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=vllm_variables(package), timeout=900, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def _assert_same(answer: dict[str, Any], plain: dict[str, Any]) -> None:
    assert answer["tokens"] == plain["tokens"]
    assert np.abs(np.subtract(answer["logprobs"], plain["logprobs"])).max() < 1e-3


def test_from_device_host_and_storage(first: dict[str, Any]) -> None:
    for name, ran in (("cold", _ALL), ("device", _REST), ("host", _REST), ("storage", _REST)):
        _assert_same(first[name], first["plain"])
        assert first[name]["ran"] == ran, name
    assert first["flushed"]
    assert first["flushed both"]


def test_salts_share_nothing(first: dict[str, Any]) -> None:
    assert first["salted"]["ran"] == _ALL
    assert first["salted again"]["ran"] == _REST
    _assert_same(first["salted"], first["plain"])


def test_a_load_that_fails_half_way_is_computed(first: dict[str, Any], second: dict[str, Any]) -> None:
    _assert_same(first["broken load"], first["plain"])
    assert first["broken blocks"] == _BLOCKS
    assert first["broken load"]["ran"] == _ALL
    for name in ("sync", "layers"):
        _assert_same(second[f"{name}, broken load"], first["plain"])
        assert second[f"{name}, broken blocks"] >= _BLOCKS
        # The step that read the garbage counts too.
        assert second[f"{name}, broken load"]["ran"] == _ALL + _REST


def test_what_is_computed_from_a_load_that_failed_is_never_served(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The step that reads the garbage fills blocks from it."""
    for name in ("sync", "layers"):
        _assert_same(second[f"{name}, branch, broken load"], first["plain, branch"])
        _assert_same(second[f"{name}, branch, host"], first["plain, branch"])
        assert second[f"{name}, branch, host"]["ran"] == _REST


def test_preempted_requests_give_the_same_answers_and_leave_nothing(first: dict[str, Any]) -> None:
    assert first["preempted"] >= 1
    assert first["crowd"] == first["crowd, one by one"]
    assert first["crowd, from host"] == first["crowd, one by one"]
    usage = first["usage"]
    assert (usage["requests"], usage["operations"]) == (0, 0)
    assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]


def test_another_process_goes_on_from_storage(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("layers", "sync"):
        for answer in (second[name], second[f"{name}, host"]):
            _assert_same(answer, first["plain"])
            assert answer["ran"] == _REST


def test_other_bytes_give_other_tokens(first: dict[str, Any], second: dict[str, Any]) -> None:
    """What was stored is what is read: the control of all that is said here."""
    assert second["wrong bytes"]["ran"] == _REST
    assert second["wrong bytes"]["tokens"] != first["plain"]["tokens"]


def test_damaged_pages_are_computed(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert second["damaged"]["ran"] == _ALL
    _assert_same(second["damaged"], first["plain"])


def test_adapters_share_nothing(second: dict[str, Any]) -> None:
    answers = [second[f"lora {name}"] for name in ("bare", "one", "two")]
    assert [answer["ran"] for answer in answers] == [_ALL] * 3
    assert len({tuple(answer["tokens"]) for answer in answers}) == 3
    for name, answer in zip(("bare", "one", "two"), answers, strict=True):
        _assert_same(second[f"lora {name} again"], answer)
        assert second[f"lora {name} again"]["ran"] == _REST


def test_an_adapter_that_is_loaded_in_place_is_not_cached(second: dict[str, Any]) -> None:
    for name in ("lora in place", "lora in place again"):
        _assert_same(second[name], second["lora two"])
        assert second[name]["ran"] == _ALL


def test_events_say_what_is_on_host(second: dict[str, Any]) -> None:
    stored = [["CPU", name, _BLOCKS, _BLOCKS * 32] for name in (None, "one", "two")]
    assert [event for event in second["stored"] if event[2] == _BLOCKS] == stored


def test_what_can_not_be_served_is_refused_in_one_line(second: dict[str, Any]) -> None:
    refused = {
        name: second[f"refused {name}"]
        for name in (
            *("setting", "model", "prefix caching", "new weights", "overlap"),
            *("storage", "version", "platform"),
        )
    }
    assert "no setting 'hicache_sise', allowed are: copy_blocks, " in refused["setting"]
    assert "groups of these kinds: sliding_window, full_attention; only models" in refused["model"]
    assert "prefix caching is off, by --no-enable-prefix-caching or because vLLM" in refused["prefix caching"]
    assert "(--weight-transfer-config) go with no storage" in refused["new weights"]
    assert "transfer='sync' with kv_load_failure_policy 'recompute' needs" in refused["overlap"]
    assert "there is no storage backend nowhere://" in refused["storage"]
    assert "knows the connectors of vLLM 0.32, this is 0.32" in refused["version"]
    assert "which has no a_call_of_another_version" in refused["version"]
    assert "serves vLLM on CPUs and CUDA GPUs, not on tpu" in refused["platform"]
    assert not any("\n" in message for message in refused.values())


@pytest.fixture(scope="module")
def server(python: Path, folder: Path, first: dict[str, Any]) -> Iterator[Server]:
    """A server, an engine and two workers, each a process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = {
        "storage": str(folder / "served"),
        "prefetch_policy": "wait_complete",
        # What is left of a prompt, once vLLM shares the front of it, is worth reading too.
        "prefetch_threshold": 32,
        # Half of the host is given to what is being read: all prompts fit, if all are looked up at once.
        "hicache_ratio": 3,
    }
    transfer = {
        "kv_connector": "UnifiedCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    flags = {
        "model": folder / "llama",
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 8,
        "block-size": 32,
        "num-gpu-blocks-override": 36,
        "tensor-parallel-size": 2,
        "host": "127.0.0.1",
        "port": port,
        "kv-transfer-config": json.dumps(transfer),
    }
    command = [str(python), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=vllm_variables(folder / "package"))
        try:
            client, end = Server(port), time.monotonic() + 600
            while not client.ready():
                if process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(log.read_text()[-3000:])
                time.sleep(0.5)
            yield client
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _crowd() -> list[list[int]]:
    shared = [(at * 7919) % 500 + 5 for at in range(96)]
    return [shared + [5 + (at * 31 + step) % 490 for step in range(170)] for at in range(6)]


def test_several_requests_over_http(server: Server) -> None:
    """Two workers: what one of them says is no end of anything."""
    prompts = _crowd()
    alone = [server.ask(prompt, 40, salt=f"alone {at}") for at, prompt in enumerate(prompts)]
    assert server.ask_all(prompts, 40) == alone
    server.ask_and_leave(prompts[0] + [7] * 100, 60)
    hits = server.idle()["vllm:external_prefix_cache_hits_total"]
    server.flush()
    assert server.ask_all(prompts, 40) == alone
    server.flush(host=True)
    assert server.ask_all(prompts, 40) == alone
    metrics = server.idle()
    # Each time 8 blocks of each of the prompts, of which vLLM may have shared the first three.
    assert metrics["vllm:external_prefix_cache_hits_total"] - hits >= 2 * (6 * 5 + 3) * 32
    assert metrics["vllm:unified_cache_total:storage_hit_tokens"] >= (6 * 5 + 3) * 32
    assert metrics["vllm:num_preemptions_total"] >= 1
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0


def test_storage_that_goes_away_under_load(server: Server, folder: Path) -> None:
    prompts = _crowd()
    answers = server.ask_all(prompts, 8)
    server.flush(host=True)
    others = [list(reversed(prompt)) for prompt in prompts]
    during: list[list[list[int]]] = []
    load = threading.Thread(target=lambda: during.append(server.ask_all(prompts + others, 8)))
    load.start()
    (folder / "served").rename(folder / "gone")
    (folder / "served").touch()  # no folder: every call fails
    load.join()
    assert during[0][: len(prompts)] == answers
    server.flush(host=True)
    assert server.ask_all(prompts, 8) == answers
    assert server.metrics()["vllm:unified_cache_total:storage_set_error"] > 0
    assert server.ready()

"""Our storages under SGLang's own HiCache, in a real SGLang on this machine's CPU."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.environment import engine_python
from tests.engines.sglang_server import HERE, PAGE, SglangServer, engine_environment
from unified_cache.storage.keys import KEY

pytestmark = pytest.mark.engines

ANSWER = 12


def _tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 512) for _ in range(count)]


PROMPT, DAMAGED, LATER = _tokens(1, 450), _tokens(2, 330), _tokens(3, 280)
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE


def test_pages_names_pools_and_faults(tmp_path: Path) -> None:
    """Without a server, on pools that look like SGLang's: see the script."""
    script = HERE / "sglang_path" / "check_storage.py"
    command = [str(engine_python()), "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=engine_environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("fine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hicache")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SglangServer]:
    extra = {
        "backend_name": "unified-cache",
        "module_path": "unified_cache.engines.sglang_storage",
        "class_name": "SglangStorage",
        "interface_v1": 1,
        "storage": str(folder / "store"),
        "prefetch_threshold": PAGE,
    }
    flags = ["--max-total-tokens", "2048", "--enable-hierarchical-cache"]
    flags += [
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-io-backend",
        "direct",
        "--hicache-mem-layout",
        "layer_first",
        "--hicache-ratio",
        "2",
    ]
    flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
    flags += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    with SglangServer.start(folder, *flags, environment={"HICACHE_ON_CPU": "1"}) as running:
        yield running
        assert "Scheduler hit an exception" not in running.log.read_text(), running.tail()


def _same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["tokens"] == expected["tokens"]
    np.testing.assert_allclose(got["logprobs"], expected["logprobs"], atol=1e-3)


def test_hicache_reads_what_it_has_written(server: SglangServer, folder: Path) -> None:
    cold = server.generate(PROMPT, ANSWER)
    assert (cold["cached"], server.ran()) == (0, [len(PROMPT)])
    server.flush()
    again = server.generate(PROMPT, ANSWER)
    _same(again, cold)
    assert again["meta"]["cached_tokens_details"]["storage"] == WHOLE
    assert again["meta"]["cached_tokens_details"]["storage_backend"] == "SglangStorage"
    assert server.ran() == [len(PROMPT) - WHOLE]


def test_damage_is_a_miss(server: SglangServer, folder: Path) -> None:
    cold = server.generate(DAMAGED, ANSWER)
    server.flush()
    server.ran()
    for file in [path for path in (folder / "store").rglob("*") if KEY.fullmatch(path.name)]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.chmod(0o600)
        file.write_bytes(content)
    again = server.generate(DAMAGED, ANSWER)
    _same(again, cold)
    assert (again["cached"], server.ran()) == (0, [len(DAMAGED)])


def test_a_storage_that_goes_away_is_a_miss(server: SglangServer, folder: Path) -> None:
    cold = server.generate(LATER, ANSWER)
    server.flush()
    shutil.rmtree(folder / "store")
    (folder / "store").write_text("no folder any more")
    for _ in range(2):
        again = server.generate(LATER, ANSWER)
        _same(again, cold)
        server.flush()
    assert again["cached"] == 0

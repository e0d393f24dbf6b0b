"""What one process has computed, another one finds in storage: with `generate`, and with `generate_batch`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil", reason="continuous batching on a CPU asks it how much memory there is")

from tests.engines.transformers_support import SMALL, Computed, batch_settings, text, tiny
from unified_cache.engines.transformers import BatchPrefixCache, PrefixCache

pytestmark = pytest.mark.parallel


def answers(folder: Path) -> dict[str, Any]:
    """Of both ways: tokens, and how many were computed of the prompt."""
    model, prompt = tiny("llama"), text(1, 100)
    computed = Computed(model)
    with PrefixCache(model, folder / "one", num_pages=64, **SMALL) as cached:
        computed.take()
        one = cached.generate(prompt, max_new_tokens=6, do_sample=False)
        got = {"one": (one[0, 100:].tolist(), computed.take()[0])}
    with BatchPrefixCache(model, folder / "batch", **batch_settings()) as batched:
        computed.take()
        (batch,) = batched.generate_batch([prompt[0].tolist()], max_new_tokens=6).values()
        got["batch"] = (batch.generated_tokens, computed.take()[0])
    return got


def test_a_second_process_finds_it_in_storage(tmp_path: Path) -> None:
    first = answers(tmp_path)
    assert first["one"][0] == first["batch"][0]
    assert (first["one"][1], first["batch"][1]) == (100, 100)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.test_transformers_processes", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    second = json.loads(done.stdout.splitlines()[-1])
    assert second == {"one": [first["one"][0], 4], "batch": [first["batch"][0], 4]}


if __name__ == "__main__":
    print(json.dumps(answers(Path(sys.argv[1]))))

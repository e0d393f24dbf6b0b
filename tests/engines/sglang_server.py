"""A server of SGLang on this machine's CPU, in processes of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engines.environment import HERE, engine_python, install_package

PAGE = 16
_START_SECONDS = 300


@cache
def model_folder(seed: int = 7) -> Path:
    """A Llama with random weights, made by the engines' own transformers."""
    folder = Path(tempfile.mkdtemp(prefix="unified-cache-llama-"))
    script = HERE / "sglang_path" / "make_llama.py"
    subprocess.run([engine_python(), script, folder, str(seed)], check=True, env=engine_environment())
    return folder


@cache
def _path() -> str:
    folder = Path(tempfile.mkdtemp(prefix="unified-cache-path-"))
    install_package(folder, {"watch_scheduler": "watch_scheduler:register"})
    return os.pathsep.join([str(folder), str(HERE / "sglang_path")])


def engine_environment(watched: Path | None = None, more: dict[str, str] | None = None) -> dict[str, str]:
    """Of every process of the engines."""
    left_out = ("PYTEST", "PYTHONDONTWRITEBYTECODE")
    own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    programs = engine_python().parent
    own |= {
        "PYTHONPATH": _path(),
        # SGLang compiles a small extension, once: it calls ninja.
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(programs.parent / "extensions"),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        # It counts slots when it is idle, and ends if one is missing.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if watched is not None:
        own["WATCH_FILE"] = str(watched)
    return own | (more or {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SglangServer:
    """One server; every method but `start` needs it to run.

    Args:
        folder: for its log.
        flags: beside those that a CPU needs.
        environment: variables beside those that it needs.
    """

    def __init__(self, folder: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        number = sum(1 for _ in folder.glob("server-*.log"))
        self.log, self.watched = folder / f"server-{number}.log", folder / f"watched-{number}.jsonl"
        self.watched.touch()
        self._read = 0
        self._killed = False
        command = [engine_python(), "-m", "sglang.launch_server", "--model-path", model_folder()]
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--grammar-backend", "none", "--dtype", "float32", "--disable-overlap-schedule"]
        command += ["--skip-server-warmup", "--page-size", str(PAGE), "--enable-cache-report"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(self.watched, environment),
                cwd=folder,
                start_new_session=True,
            )

    @classmethod
    def start(cls, folder: Path, *flags: str, **options: Any) -> Self:
        """A server that answers."""
        server = cls(folder, *flags, **options)
        try:
            server.wait_ready()
        except BaseException:
            server.kill()
            raise
        return server

    def wait_ready(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while True:
            if self._has_ended():
                raise RuntimeError(f"the server has ended:\n{self.tail()}")
            try:
                self.call("/model_info", timeout=5)
                return
            except OSError:
                if time.monotonic() > end:
                    raise RuntimeError(f"the server does not come up:\n{self.tail()}") from None
                time.sleep(0.2)

    def tail(self) -> str:
        return self.log.read_text()[-6000:]

    def check_log(self) -> None:
        """Nothing of ours has raised, and the scheduler has not lost or freed a slot twice."""
        log = self.log.read_text()
        for sign in ("Scheduler hit an exception", "memory leak", "double free", "use-after-free"):
            assert sign not in log, self.tail()
        assert "/unified_cache/engines/" not in log, self.tail()

    def call(self, path: str, body: Any = None, *, timeout: float = 120) -> bytes:
        """One request; POST if there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}\n{self.tail()}") from None

    def generate(self, tokens: list[int], answer: int = 12, **options: Any) -> dict[str, Any]:
        """The answer: ``tokens``, ``logprobs``, ``cached`` tokens of the prompt, and ``meta``."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
            "return_logprob": True,
        }
        result = json.loads(self.call("/generate", body | options))
        meta = result["meta_info"]
        pairs = meta["output_token_logprobs"]
        return {
            "tokens": [pair[1] for pair in pairs],
            "logprobs": [pair[0] for pair in pairs],
            "cached": meta["cached_tokens"],
            "meta": meta,
        }

    def flush(self) -> None:
        """Empty device and host; waits for what is under way."""
        end = time.monotonic() + 60
        while True:
            try:
                self.call("/flush_cache", {})
                return
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def ran(self) -> list[int]:
        """Prompt tokens of each forward since the last call."""
        return [line["ran"] for line in self.lines() if "ran" in line]

    def lines(self) -> list[dict[str, Any]]:
        """What was watched since the last call."""
        with open(self.watched, encoding="utf-8") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]

    def idle(self) -> dict[str, Any]:
        """What the cache holds once nothing is under way: ``{"idle": usage, "stats": counters}``."""
        time.sleep(0.5)
        last: dict[str, Any] = {}
        for line in self.watched.read_text(encoding="utf-8").splitlines():
            if '"idle"' in line:
                last = json.loads(line)
        return last

    def _has_ended(self) -> bool:
        """Its first process has; it is not waited for, so that its number is not given to anybody else."""
        if self._killed:
            return True
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def kill(self) -> None:
        """End all its processes; more than once is fine."""
        if self._killed:
            return
        # The first one has not been waited for, so this group can be nobody else's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._killed = True

    def stop(self) -> None:
        """Ask it to end, as an operator does, and make sure that it has."""
        if not self._has_ended():
            os.kill(self._process.pid, signal.SIGTERM)
        end = time.monotonic() + 60
        while not self._has_ended():
            if time.monotonic() > end:
                print("the server did not end by itself", file=sys.stderr)
                break
            time.sleep(0.05)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

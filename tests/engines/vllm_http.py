"""What a vLLM server is asked in the tests, over HTTP."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Server"]


class Server:
    """A client of a server that runs on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ready(self) -> bool:
        try:
            return self._call("GET", "/health")[0] == 200
        except OSError:
            return False

    def ask(self, prompt: list[int], tokens: int, salt: str | None = None) -> list[int]:
        """The tokens of the answer."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        status, text = self._call("POST", "/v1/completions", body)
        assert status == 200, text
        answer: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return answer

    def ask_all(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """The same of several, at once."""
        answers: list[list[int]] = [[] for _ in prompts]
        errors: list[BaseException] = []

        def ask(at: int) -> None:
            try:
                answers[at] = self.ask(prompts[at], tokens)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return answers

    def ask_and_leave(self, prompt: list[int], tokens: int) -> None:
        """Ask for a stream, and close the connection after the first piece of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline()
        connection.close()

    def idle(self) -> dict[str, float]:
        """Wait until no request runs; returns the metrics of then."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            self.ask([5, 6, 7], 1, salt="idle")  # the metrics are those of the last step
            metrics = self.metrics()
            if metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0:
                return metrics
        raise AssertionError("requests run that nobody waits for")

    def flush(self, *, host: bool = False) -> None:
        reset = f"/reset_prefix_cache?reset_external={'true' if host else 'false'}"
        status, text = self._call("POST", reset)
        assert status == 200, text

    def metrics(self) -> dict[str, float]:
        """Every sample by its name; those of several labels summed, those of the cache by its label."""
        found: dict[str, float] = {}
        for line in self._call("GET", "/metrics")[1].splitlines():
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            bare = name.partition("{")[0]
            label = re.search(r'\bcount="([^"]+)"', name)
            bare = f"{bare}:{label[1]}" if label else bare
            found[bare] = found.get(bare, 0.0) + float(value)
        return found

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

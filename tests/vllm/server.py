# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` for the tests: a child process on a free port, with the platform's settings.

Run as a program it is `vllm serve` that also appends the margin of every token it samples to the
file MARGINS_FILE, see engine._Margins. It patches where it is imported, since vLLM's engine may
run in a process that starts from this file anew."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARGINS_FILE = "DDTREE_TEST_MARGINS"
HERE = Path(__file__).resolve().parent


def arguments(settings: dict[str, Any]) -> Iterator[str]:
    """Of `vllm serve`, from those of vllm.LLM."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, dict) else str(value)


class Server:
    """`with Server(folder, speculative) as server: server.post(path, body)`."""

    def __init__(
        self, folder: Path, speculative: dict[str, Any] | None = None, **config: Any
    ) -> None:
        from engine import DRAFTER, TARGET, platform_settings

        self.log = folder / "server.log"
        self._margins = folder / "margins"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = {
            "host": "127.0.0.1",
            "port": self.port,
            "served_model_name": "nano",
            "dtype": "bfloat16",
            "max_model_len": 512,
            "seed": 0,
            **platform_settings(),
            **config,
        }
        if speculative is not None:
            settings["speculative_config"] = {"model": str(DRAFTER), **speculative}
        self.command = [sys.executable, __file__, "serve", str(TARGET), *arguments(settings)]
        # a server has its engine in a process of its own
        self.env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.env |= {"VLLM_LOGGING_LEVEL": "INFO"}
        if speculative is None:
            self.env[MARGINS_FILE] = str(self._margins)

    def __enter__(self) -> "Server":
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.env,
            )
        start = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                if self._request("GET", "/health").status == 200:
                    return self
            if self._process.poll() is not None or time.monotonic() - start > 1200:
                self.__exit__()
                raise AssertionError(f"no server: {self.log.read_text()[-6000:]}")
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
                break
        # its children, had it died without ending them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _request(
        self, method: str, path: str, body: dict | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection.getresponse()

    def post(self, path: str, body: dict) -> dict:
        response = self._request("POST", path, {"model": "nano", **body})
        answer = json.load(response)
        return answer if response.status == 200 else {"status": response.status, **answer}

    def stream(self, path: str, body: dict) -> list[dict]:
        """The events of a streamed answer."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = self._request("POST", path, {"model": "nano", **body, **options})
        assert response.status == 200, response.read()
        lines = (line.decode().strip() for line in response)
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(event) for event in data]

    def counter(self, name: str) -> float:
        lines = self._request("GET", "/metrics").read().decode().splitlines()
        found = [line for line in lines if line.startswith(f"vllm:{name}_total{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def margins(self) -> dict[tuple[int, int], float]:
        """By seed and position; of a server without speculation."""
        entries = map(json.loads, self._margins.read_text().splitlines())
        return {(seed, position): margin for seed, position, margin in entries}


def record_margins(path: str) -> None:
    from engine import _Margins
    from vllm.v1.worker.gpu.sample import sampler, states

    class File(dict):
        def update(self, pairs):
            with open(path, "a") as out:
                out.writelines(json.dumps([*key, margin]) + "\n" for key, margin in pairs)

    margins = _Margins()
    margins.by_key = File()
    states.apply_min_p = margins.wrap_min_p(states.apply_min_p)
    sampler.apply_top_k_top_p = margins.wrap_filter(sampler.apply_top_k_top_p)
    sampler.gumbel_sample = margins.wrap_sample(sampler.gumbel_sample)


if __name__ in ("__main__", "__mp_main__") and os.environ.get(MARGINS_FILE):
    sys.path.insert(0, str(HERE))
    record_margins(os.environ[MARGINS_FILE])

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()

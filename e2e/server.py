"""A real `vllm serve` on the CPU, as the demo and the end-to-end tests start, ask, read and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SERVED_NAME = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 8192
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0


_TELLING = re.compile(r"py-kvcache: |Traceback|ERROR|Error:")


class ServerError(Exception):
    """The server did not start, answer or stop; the text says what, the log says why."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer; ``ttft_s`` is from sending the request to the first piece of text."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int


def transfer_config(root: Path, **settings: object) -> str:
    """The value of --kv-transfer-config that a user would write."""
    return json.dumps(
        {
            "kv_connector": "PyKvCacheConnector",
            "kv_connector_module_path": "py_kvcache.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"root": str(root), **settings},
        }
    )


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """One `vllm serve` process with a log file: ``with Server(...) as server: server.start()``.

    Leaving the context ends the process, whatever happened.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        transfer: str | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._port = free_port()
        self._command = [
            sys.executable,
            *(str(Path(__file__).with_name("vllm_cli.py")), "serve", str(model)),
            *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(self._port)),
            # With bfloat16 a cached prefix changes batch shapes and so the last bits, in vLLM's own
            # prefix cache as well; equal text can be asked of float32 only.
            *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8"),
            "--enforce-eager",
            *(("--kv-transfer-config", transfer) if transfer else ()),
            *arguments,
        ]
        self._environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # By itself vLLM keeps one core free, and two with any connector: on two cores it then uses
            # both. The same for all, or computing with and without a connector cannot be compared.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def start(self) -> None:
        """Start and wait until it answers.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        with self.log.open("wb") as log:
            # A session of its own, so that what it starts can be ended with it, and a Ctrl-C in the
            # terminal reaches only us, who then stop it in order.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._running.poll() is not None:
                raise ServerError(f"vllm serve ended with code {self._running.returncode} while starting")
            with contextlib.suppress(OSError):
                self._get("/health", timeout_s=2.0)
                return
            time.sleep(0.2)
        raise ServerError(f"vllm serve was not ready after {READY_TIMEOUT_S:.0f} s")

    def stop(self) -> float:
        """End it as Kubernetes would (SIGTERM, then wait); returns the seconds it took.

        Raises:
            ServerError: it was still there after a minute.
        """
        began = time.monotonic()
        process = self._running
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._end()
            raise ServerError(f"vllm serve was still running {STOP_TIMEOUT_S:.0f} s after SIGTERM") from None
        self._end()
        return time.monotonic() - began

    def _end(self) -> None:
        """Kill what is left of our session: by then only children that outlived the server."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process

    def _get(self, path: str, timeout_s: float = 10.0) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=timeout_s) as reply:
            return str(reply.read().decode())

    def ask(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, more: Mapping[str, Any] | None = None
    ) -> Answer:
        """Send one greedy chat request, with ``more`` fields in its body, and read the stream.

        Raises:
            ServerError: the server refused it, broke off, or sent no text.
        """
        body = {
            "model": SERVED_NAME,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(more or {}),
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        began = time.monotonic()
        pieces, first, tokens = [], 0.0, 0
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as stream:
                for event in _events(stream):
                    for choice in event.get("choices", ()):
                        if text := choice["delta"].get("content"):
                            first = first or time.monotonic()
                            pieces.append(text)
                    tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
        except urllib.error.HTTPError as error:
            raise ServerError(f"the server answered {error.code}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise ServerError(f"the answer broke off: {error}") from error
        if not pieces:
            raise ServerError("the server sent an answer without text")
        return Answer("".join(pieces), first - began, time.monotonic() - began, tokens)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, summed over labels (``vllm:prompt_tokens_total`` and so on)."""
        totals: dict[str, float] = {}
        for line in self._get("/metrics").splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def log_excerpt(self, lines: int = 25, width: int = 300) -> str:
        """What the log says of py-kvcache and of errors, then its end; long lines are cut."""
        log = [line[:width] for line in self.log.read_text(errors="replace").splitlines()]
        telling = [n for n, line in enumerate(log) if _TELLING.search(line)][-lines:]
        # An exception's message stands below its Traceback line.
        shown = sorted({k for n in telling for k in range(n, n + (lines if "Traceback" in log[n] else 1))})
        picked = sorted({*shown, *range(len(log) - lines, len(log))})
        return "\n".join(log[n] for n in picked if 0 <= n < len(log))


def _events(stream: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream, up to its [DONE]."""
    for line in stream:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)

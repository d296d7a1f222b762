"""Starts engines quickly: one process imports vLLM, and every engine is a fork of it.

On two cores importing vLLM takes half a minute, building the tiny engine two seconds. A forked engine is a
process of its own in everything that counts here: memory, descriptors, threads, environment, its end.

Run as a program it serves fork requests from the socket on descriptor 0 until that is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from session import CONNECTOR, HERE, Session, tiny_model


class Nursery:
    """The process that has imported vLLM."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=theirs, stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": str(CONNECTOR),
                # Without compiled files importing vLLM takes three times as long; some sandboxes forbid them.
                "PYTHONDONTWRITEBYTECODE": "",
                # The oldest releases compile small functions for half a minute although told to be eager.
                "TORCH_COMPILE_DISABLE": "1",
            },
        )  # fmt: skip
        theirs.close()
        self._socket.settimeout(300)  # the first fork waits for the imports

    def fork(self, env: dict[str, str], descriptors: list[int]) -> int:
        """A process with these as standard input, output and error; its id."""
        socket.send_fds(self._socket, [json.dumps(env).encode()], descriptors)
        return int(self._socket.recv(64))

    def close(self) -> None:
        """End it; engines that still run go on."""
        self._socket.close()
        self._process.wait(30)


class ForkedSession(Session):
    """A Session whose process is a fork of the nursery."""

    def __init__(self, nursery: Nursery, env: dict[str, str] | None = None, timeout: float = 180.0) -> None:
        self.timeout = timeout
        self.log: list[str] = []
        self._answers: queue.Queue[str | None] = queue.Queue()
        pipes = [os.pipe() for _ in range(3)]
        (stdin, to_child), (from_child, stdout), (logged, stderr) = pipes
        pid = nursery.fork(env or {}, [stdin, stdout, stderr])
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self._process: Any = _Process(pid, to_child, from_child, logged)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_log, daemon=True).start()

    def __enter__(self) -> ForkedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Process:
    """As much of subprocess.Popen as Session uses, for a process that is not our child."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.stdin = os.fdopen(stdin, "w")
        self.stdout, self.stderr = os.fdopen(stdout), os.fdopen(stderr)

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("engine", timeout or 0)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


_nursery: Nursery | None = None


def session(env: dict[str, str] | None = None) -> ForkedSession:
    """A process without an engine yet; the first call starts the nursery."""
    global _nursery
    if _nursery is None:
        _nursery = Nursery()
        atexit.register(_nursery.close)
    return ForkedSession(_nursery, env)


@contextlib.contextmanager
def engine(arguments: dict[str, Any], env: dict[str, str] | None = None) -> Iterator[Session]:
    """session.engine, started in a fork."""
    forked = session({"PYTHONHASHSEED": "0", **(env or {})})
    try:
        forked.call("start", **arguments)
        yield forked
    finally:
        forked.close()


def real_model(folder: Path, seed: int = 1, **changes: Any) -> str:
    """A tiny model with saved random weights.

    With load_format="dummy" the weights are so small that the text does not depend on the prefix at all,
    and wrong blocks would go unnoticed; with these a single other token changes it.
    """
    path = tiny_model(folder, **{"initializer_range": 0.1, **changes})
    with session() as helper:
        helper.call("save_model", folder=path, seed=seed)
    return path


def _register_models() -> None:
    """Else vLLM looks at each model class in a new process, which imports vLLM again."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.phi3 import Phi3ForCausalLM

    for model in (Gemma3ForCausalLM, LlamaForCausalLM, Phi3ForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


def serve() -> None:
    """Fork an engine's process for each request."""
    import driver  # sets the environment that vLLM reads when it is imported

    driver.import_vllm()
    _register_models()
    # An engine collects garbage several times as it starts; it need not look at all that is imported.
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=os.dup(0))
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, 65536, 3)
        if not request:
            return
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            asked.send(str(pid).encode())
            continue
        asked.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.pop("PYTHONHASHSEED", None)
        os.environ.update(json.loads(request))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        driver.main()  # does not return


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    serve()

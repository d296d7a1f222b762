"""An engine in a process of its own, asked one question after the other; the child's side is asked.py."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from py_kvcache.bench.children import (
    causes,
    child_environment,
    command_of,
    end_group,
    ending,
    group_ticks,
    tail,
)
from py_kvcache.bench.serve_config import ServeConfig
from py_kvcache.bench.systems import Place
from py_kvcache.bench.variants import Variant
from py_kvcache.errors import KvCacheError

_CHILD = "py_kvcache.bench.asked"


class AskedEngine:
    """One system's engine. Close it, or its processes stay for as long as this one.

    Args:
        engine: options for vLLM, to which those of the system are added.
        folder: the system's own, empty.
        out: takes log and task.
    """

    def __init__(
        self,
        config: ServeConfig,
        variant: Variant,
        folder: str,
        out: Path,
        engine: Mapping[str, Any],
    ) -> None:
        self.label, self._timeout_s = variant.label, config.child_timeout_s
        name = f"{variant.system.name}-{secrets.token_hex(4)}"
        self._log = out / f"{name}.log"
        place = Place(folder, f"asked-{os.getpid()}-{secrets.token_hex(4)}", variant.options)
        shape = config.shape
        task = {
            "engine": {**engine, **variant.system.engine(place)},
            "shape": vars(shape) | {"tokens": list(shape.tokens)},
            "max_tokens": config.max_tokens,
            "folder": folder,
            "counters": variant.system.counters,
        }
        path = out / f"{name}.task.json"
        path.write_text(json.dumps(task, indent=1), encoding="utf-8")
        reads, writes = os.pipe()
        environment = child_environment({**config.environment, **variant.system.environment(place)})
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command_of(_CHILD), str(path), str(writes)], stdin=subprocess.PIPE, stdout=log, stderr=log,
                env=environment, pass_fds=(writes,), start_new_session=True, text=True,
            )  # fmt: skip
        os.close(writes)
        self._answers = os.fdopen(reads, encoding="utf-8")

    def wait(self) -> dict[str, Any]:
        """The next answer; the first comes when it is ready. Raises KvCacheError with what it said last."""
        if not select.select([self._answers], [], [], self._timeout_s)[0]:
            raise KvCacheError(f"{self.label} gave no answer in {self._timeout_s:g} s ({self._log})")
        line = self._answers.readline()
        if not line:
            # It closes its end a moment before it is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            how = (
                ending(self._process.returncode)
                if self._process.returncode is not None
                else "it answers no more"
            )
            said = "; ".join([how, *causes(self._log), *tail(self._log)][:4])
            raise KvCacheError(f"{self.label}: {said} ({self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """See asked.py."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.wait()

    @property
    def ticks(self) -> int:
        """CPU time of its processes so far."""
        return group_ticks(self._process.pid)

    def close(self) -> None:
        """End it and all that it started."""
        end_group(self._process)
        self._answers.close()

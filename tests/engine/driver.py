"""A real vLLM in this process, driven by JSON lines: one request a line in, one answer a line out.

Started by tests/engine/session.py. In one process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that faults can
be put between a hit and its load and every loaded block compared byte for byte with its file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def import_vllm() -> None:
    """All that an engine imports while it starts, so that forks of this process need not."""
    import vllm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker
    from vllm import LLM, SamplingParams  # noqa: F401

    assert vllm.__version__


def take_answers() -> Any:
    """Standard output, which from now on belongs to the answers: whatever vLLM prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


class KvMemory:
    """Reads KV memory: on a GPU by cuMemcpyDtoH, ordinary memory by address."""

    def __init__(self) -> None:
        import torch

        self._cuda = ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None

    def read(self, address: int, length: int) -> bytes:
        if self._cuda is None:
            return ctypes.string_at(address, length)
        buffer = ctypes.create_string_buffer(length)
        code = self._cuda.cuMemcpyDtoH_v2(buffer, ctypes.c_uint64(address), ctypes.c_size_t(length))
        if code:
            raise RuntimeError(f"cuMemcpyDtoH: CUDA error {code}")
        return buffer.raw


class Driver:
    """Holds the engine and what was observed."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.memory: KvMemory | None = None
        self.checked = 0
        self.wrong: list[str] = []
        self.fault: Callable[[str], None] | None = None
        self.fault_blocks: set[int] = set()
        self.peak_slots = 0
        self.peak_fds = 0
        self.lookup_times: list[float] = []
        self._decided: Counter[str] = Counter()
        self._on_gpu: list[int] = []

    # ---- commands

    def start(self, **engine: Any) -> dict[str, Any]:
        from vllm import LLM

        began = time.monotonic()
        self.llm = LLM(**engine)
        if self.connector is not None and hasattr(self.connector, "connector_worker"):
            self._watch()
        return {"seconds": time.monotonic() - began, "connector": type(self.connector).__name__}

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, n: int = 1, **more: Any
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        params = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "n": n,
            "detokenize": False,
        }
        if n > 1:
            params.update(temperature=1.0, seed=7)
        extra = more.get("extra_args")
        sampling = SamplingParams(**params, extra_args=extra)
        salt = more.get("cache_salt")
        inputs = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        lora = None
        if more.get("lora"):
            from vllm.lora.request import LoRARequest

            name, number, path, *options = more["lora"]
            lora = LoRARequest(name, number, path, **(options[0] if options else {}))
        began = time.monotonic()
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return {
            "tokens": [[list(c.token_ids) for c in out.outputs] for out in outputs],
            "cached": [out.num_cached_tokens for out in outputs],
            "seconds": time.monotonic() - began,
        }

    def abort_after(self, prompts: list[list[int]], steps: int, max_tokens: int = 4) -> dict[str, Any]:
        """Add requests, step the engine a few times, abort all, then drain."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        names = [f"abort-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        return {"drained": self._drain()}

    def same_id_again(self, prompts: list[list[int]]) -> dict[str, Any]:
        """One request after the other under one id, each as soon as the one before has its answer."""
        from vllm import SamplingParams

        engine, texts = self.llm.llm_engine, []
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            engine.add_request("same", {"prompt_token_ids": prompt}, sampling)
            outputs: list[Any] = []
            while not any(output.finished for output in outputs):
                outputs = engine.step()
            texts.append(list(outputs[-1].outputs[0].token_ids))
        return {"tokens": texts}

    def _drain(self, seconds: float = 60.0) -> bool:
        engine = self.llm.llm_engine
        end = time.monotonic() + seconds
        core = engine.engine_core.engine_core
        while engine.has_unfinished_requests() or core.scheduler.has_requests():
            engine.step()
            if time.monotonic() > end:
                return False
        return True

    def settle(self, seconds: float = 30.0) -> dict[str, Any]:
        """Step until every store is done; what the worker then holds must add up."""
        drained = self._drain(seconds)
        end = time.monotonic() + seconds
        reactor = self.executor._parts.reactor
        core = self.llm.llm_engine.engine_core.engine_core
        while time.monotonic() < end:
            snapshot = reactor.snapshot()
            scheduler = self.connector_scheduler
            if snapshot.jobs_running == 0 and not scheduler._jobs and snapshot.lost_now == 0:
                break
            core.step_fn()  # with asynchronous scheduling it is another than step()
            time.sleep(0.01)
        return {"drained": drained, **self.stats()}

    def digest(self) -> str | None:
        """What thresholds for this engine carry."""
        digest: str | None = self.connector_scheduler.manager._names._spaces.engine()
        return digest

    def decisions(self) -> dict[str, float]:
        """What the gate has decided of admitted requests since the start."""
        return dict(self._decided)

    def on_gpu(self) -> list[int]:
        """Of requests that waited, how many blocks vLLM's own prefix cache was found to have."""
        return list(self._on_gpu)

    def stats(self) -> dict[str, Any]:
        counters = self.executor._parts.reactor.snapshot()
        return {
            "slots": counters.slots,
            "lost_now": counters.lost_now,
            "leaks": counters.leaks,
            "open_files": counters.open_files,
            "loaded_blocks": counters.loaded_blocks,
            "reads": counters.reads.count,
            "without_read": counters.without_read,
            "preloads": counters.preloads,
            "loaded_bytes": counters.loaded_bytes,
            "stored_blocks": counters.stored_blocks,
            "existed": counters.existed,
            "failures": {"/".join(k): v for k, v in counters.failures.items()},
            "dropped": {"/".join(k): v for k, v in counters.dropped.items()},
            "jobs_left": len(self.connector_scheduler._jobs),
            "checked": self.checked,
            "wrong": self.wrong,
            "peak_slots": self.peak_slots,
            "peak_fds": self.peak_fds,
        }

    def watch_peaks(self) -> dict[str, Any]:
        """From here on note the most slots and descriptors the worker ever had at once."""
        core = self.executor._parts.reactor._core
        take, took = core.staging.take, core.took_file

        def taken(use: Any) -> Any:
            slot = take(use)
            self.peak_slots = max(self.peak_slots, core.staging.used)
            return slot

        def took_file(*arguments: Any, **more: Any) -> None:
            took(*arguments, **more)
            self.peak_fds = max(self.peak_fds, core.open_files)

        core.staging.take, core.took_file = taken, took_file
        return {"ok": True}

    def reset_prefix_cache(self) -> dict[str, Any]:
        return {"ok": self.llm.reset_prefix_cache()}

    def reset_while_running(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All requests are preempted by a reset of the prefix cache in the middle, and go on."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for number, tokens in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
        found: dict[str, list[int]] = {}
        jobs, resets = self.connector_scheduler._jobs, 0
        requests = engine.engine_core.engine_core.scheduler.requests
        for step in range(10_000):
            # vLLM refuses while a request waits for its load, or has it and was not scheduled since.
            loading = any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in requests.values())
            if step >= 6 and not resets and not loading and all(job.is_store for job in jobs.values()):
                engine.reset_prefix_cache(reset_running_requests=True)
                resets += 1
            found.update((o.request_id, list(o.outputs[0].token_ids)) for o in engine.step())
            if not engine.has_unfinished_requests():
                break
        return {"tokens": [found[str(number)] for number in range(len(prompts))], "resets": resets}

    def session(self, turns: list[list[int]]) -> dict[str, Any]:
        """A streaming-input request that gets its prompt in these pieces."""
        from vllm import SamplingParams

        engine, core = self.llm.llm_engine, self.llm.llm_engine.engine_core.engine_core
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        for number, tokens in enumerate(turns):
            request = engine.input_processor.process_inputs(
                "session", {"prompt_token_ids": tokens}, sampling,
                supported_tasks=("generate",), resumable=number + 1 < len(turns),
            )  # fmt: skip
            request.external_req_id = "session"
            core.add_request(*core.preprocess_add_request(request))
            for _ in range(30):
                core.step_fn()
                time.sleep(0.003)
        return {"left": core.scheduler.has_requests()}

    def reset_connector(self) -> dict[str, Any]:
        self.connector_scheduler_connector.reset_cache()
        return {"ok": True}

    def break_next(self, how: str, blocks: list[int]) -> dict[str, Any]:
        """The next load finds these blocks of its job damaged: between the hit and the read."""
        self.fault_blocks = set(blocks)
        self.fault = {
            "delete": os.unlink,
            "truncate": lambda p: os.truncate(p, os.path.getsize(p) // 2),
            "empty": lambda p: os.truncate(p, 0),
            "flip": _flip,
            "directory": lambda p: (os.unlink(p), os.mkdir(p)),
            "fifo": lambda p: (os.unlink(p), os.mkfifo(p)),
            "symlink": lambda p: (os.rename(p, p + ".real"), os.symlink(p + ".real", p)),
            "foreign": lambda p: _overwrite_tail(p, b"x" * 4096),
        }[how]
        return {"ok": True}

    def metrics(self) -> dict[str, Any]:
        """Values of vLLM's counters and gauges by name, summed over labels."""
        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                values[metric.name] = values.get(metric.name, 0.0) + metric.value
        return {"names": list(values), "values": values}

    def save_model(self, folder: str, seed: int) -> dict[str, Any]:
        """Random float32 weights for the config.json in the folder, as transformers saves them."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        return {"ok": True}

    def save_adapter(self, folder: str, model: str, seed: int) -> dict[str, Any]:
        """A LoRA adapter on queries and values, strong enough to change the text."""
        import torch
        from safetensors.torch import save_file

        with open(os.path.join(model, "config.json")) as file:
            config = json.load(file)
        hidden, width = config["hidden_size"], config["head_dim"]
        outputs = {
            "q_proj": config["num_attention_heads"] * width,
            "v_proj": config["num_key_value_heads"] * width,
        }
        torch.manual_seed(seed)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, rows in outputs.items():
                stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(8, hidden)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 8)
        os.makedirs(folder, exist_ok=True)
        save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
        with open(os.path.join(folder, "adapter_config.json"), "w") as file:
            json.dump({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": sorted(outputs)}, file)
        return {"ok": True}

    def add_lora(self, lora: list[Any]) -> dict[str, Any]:
        """What /v1/load_lora_adapter does: the worker reads the files before any request."""
        from vllm.lora.request import LoRARequest

        name, number, path, *options = lora
        request = LoRARequest(name, number, path, **(options[0] if options else {}))
        return {"ok": self.llm.llm_engine.add_lora(request)}

    def reload_while_running(self, lora: list[Any], prompt: list[int]) -> dict[str, Any]:
        """A request is prefilled, its adapter is loaded anew in place, and the request goes on."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        engine, (name, number, path) = self.llm.llm_engine, lora
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        request = LoRARequest(name, number, path)
        engine.add_request("reload", {"prompt_token_ids": prompt}, sampling, lora_request=request)
        scheduler = engine.engine_core.engine_core.scheduler
        while not any(r.num_computed_tokens >= len(prompt) for r in scheduler.requests.values()):
            engine.step()
        engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
        return {"drained": self._drain()}

    def version(self) -> dict[str, Any]:
        import vllm

        return {"text": vllm.__version__}

    def stop(self) -> dict[str, Any]:
        """End the engine in order."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        return {"ok": True}

    # ---- access

    @property
    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    @property
    def executor(self) -> Any:
        return _ours(self.connector).executor

    @property
    def connector_scheduler_connector(self) -> Any:
        return _ours(self.llm.llm_engine.engine_core.engine_core.scheduler.connector)

    @property
    def connector_scheduler(self) -> Any:
        return self.connector_scheduler_connector.connector_scheduler

    # ---- observation

    def _watch(self) -> None:
        gate = self.connector_scheduler.manager._gate
        counted = gate.counted

        def note(decision: Any) -> None:
            self._decided[f"{'load' if decision.load else 'decline'}/{decision.reason.value}"] += 1
            counted(decision)

        gate.counted = note
        foresight = self.connector_scheduler.manager._foresight
        count_cached = foresight._count_cached

        def note_cached(*args: Any) -> int:
            self._on_gpu.append(count_cached(*args))
            return self._on_gpu[-1]

        foresight._count_cached = note_cached
        self.memory = KvMemory()
        executor = self.executor
        submit, settle = executor.submit_load, executor._settle

        def submit_load(job_id: int, src: Any, dst: Any, *rest: Any, **kw: Any) -> bool:
            if self.fault is not None:
                fault, self.fault = self.fault, None
                for ordinal in self.fault_blocks:
                    if ordinal < len(src.keys):
                        fault(self._path(src, ordinal))
            return submit(job_id, src, dst, *rest, **kw)

        def settled(result: Any) -> Any:
            if result.kind.value == "load":
                self._compare(result, executor._jobs[result.job_id])
            return settle(result)

        executor.submit_load, executor._settle = submit_load, settled

    def _path(self, plan: Any, ordinal: int) -> str:
        from py_kvcache.layout import block_path, part_dir

        folder = part_dir(self.executor._config.root_path, plan.space, self.executor._part)
        return block_path(folder, plan.keys[ordinal])

    def _compare(self, result: Any, submitted: Any) -> None:
        assert self.memory is not None
        failed = {ordinal for ordinal, _ in result.failed}
        device = self.executor._parts.device
        for ordinal, chunk in enumerate(submitted.chunks):
            if ordinal in failed:
                continue
            with open(self._path(submitted.plan, ordinal), "rb") as file:
                content = file.read()
            entries = device._map.copies(chunk.block_ids, chunk.first)
            for address, offset, length in zip(
                entries.addresses.tolist(), entries.offsets.tolist(), entries.lengths.tolist(), strict=True
            ):
                if self.memory.read(address, length) != content[offset : offset + length]:
                    self.wrong.append(f"job {result.job_id} block {ordinal} offset {offset}")
            self.checked += 1


def _ours(connector: Any) -> Any:
    """Our connector, also inside MultiConnector."""
    for inner in getattr(connector, "_connectors", [connector]):
        if type(inner).__name__ == "PyKvCacheConnector":
            return inner
    return connector


def _flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


def _overwrite_tail(path: str, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(-len(data), os.SEEK_END)
        file.write(data)


def main() -> None:
    driver, out = Driver(), take_answers()
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer = getattr(driver, command)(**request)
        except BaseException as error:  # the test process must hear of it, whatever it is
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
    driver.stop()
    # Python's own end takes ten seconds with all that vLLM imports.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

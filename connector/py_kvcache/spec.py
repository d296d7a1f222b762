"""The OffloadingSpec that vLLM's stock connector builds its scheduler and worker around."""

from __future__ import annotations

from typing import Any

from py_kvcache import namespace, vllm_api
from py_kvcache.adapters import ADAPTERS
from py_kvcache.config import Config
from py_kvcache.footer import ALGO_SUMS, ALGORITHMS
from py_kvcache.scheduler.manager import Manager
from py_kvcache.worker.executor import Executor

SPEC_NAME = "PyKvCacheSpec"
SPEC_MODULE = "py_kvcache.spec"


class PyKvCacheSpec(vllm_api.OffloadingSpec):  # type: ignore[misc]
    """Built by vLLM in the scheduler process and in every worker, and named by the API server for metrics."""

    # vLLM builds us from its own small config; the connector leaves what that lacks here for the time
    # of the call: VllmConfig, KVCacheConfig and the settings as the user gave them.
    engine: tuple[Any, Any, Config] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        assert PyKvCacheSpec.engine is not None, "PyKvCacheSpec is built by PyKvCacheConnector only"
        self._vllm_config, self._kv_cache_config, self.settings = PyKvCacheSpec.engine
        self.manager: Manager | None = None
        self.executor: Executor | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """vLLM's API server asks for these before any engine exists."""
        return vllm_api.metric_definitions()

    def get_manager(self) -> Manager:
        """Scheduler process."""
        parallel = self._vllm_config.parallel_config
        replicas = vllm_api.replication(self._vllm_config)
        facts = namespace.engine_facts(self._vllm_config, self._kv_cache_config, self.settings.block_tokens)
        # Blocks with and without a digest stay apart: who wants his bytes checked gets no others.
        facts["checksum"] = ALGORITHMS[ALGO_SUMS] if self.settings.checksum else "none"
        self.manager = Manager(
            self.settings,
            namespace.Spaces(facts),
            parts=tuple(range(parallel.tensor_parallel_size // replicas)),
            hashes_per_block=self.settings.block_tokens // self.tokens_per_hash,
            ranks=parallel.world_size,
            longest=self._vllm_config.model_config.max_model_len,
        )
        return self.manager

    def get_worker(self, kv_caches: Any) -> Executor:
        """Worker process, once its KV tensors exist."""
        replicas = vllm_api.replication(self._vllm_config)
        # In a data-parallel deployment `rank` counts within this engine only.
        rank = self._vllm_config.parallel_config.rank
        lora = self._vllm_config.lora_config
        adapters = None if lora is None else ADAPTERS.open(vllm_api.lora_manager_class(), lora, rank)
        self.executor = Executor(
            self.settings,
            kv_caches,
            blocks_per_chunk=self.blocks_per_chunk,
            part=rank // replicas,
            writes=rank % replicas == 0,
            rank=rank,
            adapters=adapters,
        )
        return self.executor

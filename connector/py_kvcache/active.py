"""The connector proper: vLLM's hooks around its stock offloading connector."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from py_kvcache import stock, vllm_api
from py_kvcache.config import Config, parse_config
from py_kvcache.errors import RootError, UnsupportedError
from py_kvcache.inert import make_inert
from py_kvcache.layout import make_dir
from py_kvcache.namespace import backend_names, cpu_marks, tensor_marks
from py_kvcache.plan import StepNote, WorkerReport
from py_kvcache.spec import SPEC_MODULE, SPEC_NAME, PyKvCacheSpec
from py_kvcache.vllm_api import KVConnectorRole, OffloadingConnector

logger = logging.getLogger("vllm.py_kvcache")


@dataclass
class LayoutHandshake(vllm_api.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker's KV tensors look like; vLLM carries it to the scheduler at start."""

    layouts: tuple[dict[str, Any], ...] = field(default_factory=tuple)


def parse_extra(extra: dict[str, Any]) -> Config:
    """The user's settings, from vLLM's extra config before or after we filled it in. Raises ConfigError."""
    filled_in = extra.get("spec_module_path") == SPEC_MODULE
    return parse_config({k: v for k, v in extra.items() if k != "block_size" or not filled_in})


def read_settings(vllm_config: Any) -> Config:
    """Parse the user's settings and fill in vLLM's own keys. Raises ConfigError."""
    extra = vllm_api.extra_config(vllm_config)
    settings = parse_extra(extra)
    extra.update(spec_name=SPEC_NAME, spec_module_path=SPEC_MODULE, block_size=settings.block_tokens)
    return settings


_ANOTHER = 'give another "root" in kv_connector_extra_config or PY_KVCACHE_ROOT'


def prepare_root(settings: Config) -> None:
    """Make a missing root whose parent exists. Raises RootError."""
    root = settings.root_path
    try:
        make_dir(root, settings.dir_mode)
    except OSError as error:
        raise RootError(
            error.errno,
            f"{error.strerror}; mount the volume or make the folder (py-kvcache needs its parent to exist), "
            f"or {_ANOTHER}",
            root,
        ) from error
    if not os.path.isdir(root):
        raise RootError(errno.ENOTDIR, f"py-kvcache needs a folder; {_ANOTHER}", root)


class PyKvCacheConnector(OffloadingConnector):  # type: ignore[misc]
    """Loaded by vLLM in the scheduler process and in every worker; metrics only in the API server."""

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> Any:
        """Build the connector, or the inert one if asked to disable itself here."""
        settings = read_settings(vllm_config)
        try:
            reason = vllm_api.unsupported_reason(vllm_config, kv_cache_config, settings.block_tokens)
            if reason is not None:
                raise UnsupportedError(f"py-kvcache: {reason}")
            prepare_root(settings)
            connector = super().__new__(cls)
            connector._start(vllm_config, role, kv_cache_config, settings)
        except Exception as error:
            # vLLM's own constructor may refuse, too (an assertion on block sizes, say).
            if settings.on_unsupported != "disable":
                raise
            return make_inert(vllm_config, role, kv_cache_config, str(error) or type(error).__name__)
        return connector

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Nothing: __new__ has built everything, since it may have to answer with another class."""

    def _start(self, vllm_config: Any, role: Any, kv_cache_config: Any, settings: Config) -> None:
        PyKvCacheSpec.engine = (vllm_config, kv_cache_config, settings)
        try:
            OffloadingConnector.__init__(self, vllm_config, role, kv_cache_config)
        finally:
            PyKvCacheSpec.engine = None
        self._engine, self._cache_config = vllm_config, kv_cache_config
        self._layouts: tuple[dict[str, Any], ...] = ()
        # Without prefix caching vLLM gives the blocks of a request that ended to the next one at once; with
        # it they are the last to be used again, and a reset of the cache wants them free.
        self._keeps_blocks = not vllm_api.has_prefix_caching(vllm_config)
        self._held: set[str] = set()  # scheduler: ended since the last step, their blocks kept
        self._keeping: set[str] = set()  # scheduler: all whose blocks are kept
        self._pool: Any = None  # scheduler: vLLM's book of KV blocks
        if role == KVConnectorRole.SCHEDULER:
            vllm_api.choose_recompute(vllm_config, settings.load_failure_policy)

    # ---- scheduler process

    @property
    def manager(self) -> Any:
        """Our Manager, inside the stock scheduler."""
        return self.connector_scheduler.manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        if vllm_api.has_prefix_caching(self._engine):
            self.manager.know_cached(lambda block_hash: vllm_api.is_cached(gpu_block_pool, block_hash))
        super().bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self.manager.admit(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.manager.begin_lookup(request.request_id, num_computed_tokens)
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.manager.end_lookup(request.request_id, answer[0])
        if answer[0] and not self.manager.pays(request, num_computed_tokens, answer[0]):
            return 0, False
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.manager.allocated(request, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            # Before super(), which completes the jobs that these failures belong to.
            self.manager.note_report(report)
            for job, failures in report.failed_loads.items():
                stock.rewind_store(self.connector_scheduler, job, failures.faults)
            for request_id, key in self.manager.take_postponed().items():
                stock.offer_again(self.connector_scheduler, request_id, key)
        self._keeping.difference_update(connector_output.finished_sending or ())
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._ended(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._ended(request, super().request_finished_all_groups(request, block_ids))

    def _ended(
        self, request: Any, answer: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True makes vLLM keep the blocks until get_finished() names the request.

        Stock gives them up at once and has a step wait for what is still to be copied from them: the engine
        stands still, or the end of the prompt is not stored.
        """
        stock.forget_uncomputed(self.connector_scheduler, request)
        keep, more = answer
        if keep or not self._keeps_blocks or not vllm_api.ended_by_itself(request):
            return answer
        if not self.manager.stores(request.request_id):
            return answer
        self._held.add(request.request_id)
        self._keeping.add(request.request_id)
        return True, more

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(stock.without_loading(self.connector_scheduler, scheduler_output))
        held, self._held = self._held, set()
        # Its store jobs are complete now: the last ones were made a line above.
        jobs = stock.store_jobs_of(self.connector_scheduler, held) if held else {}
        idle = vllm_api.is_idle(scheduler_output)
        if idle:
            self.manager.wait_if_asking()
        self.manager.preempted(scheduler_output.preempted_req_ids or ())
        number = self.manager.next_step(vllm_api.spans(scheduler_output))
        note = StepNote(
            idle, jobs, number, self._is_pressed(), self.manager.wants(), self.manager.is_time_to_count(idle)
        )
        meta.step_note = note
        return meta

    def _is_pressed(self) -> bool:
        """Whether blocks that we make vLLM keep may be what a request waits for."""
        if not self._keeping:
            return False
        if self._pool is None:
            return True
        tokens = vllm_api.tokens_of_a_block(self._cache_config)
        return bool(self.manager.needs_blocks(self._pool.get_num_free_blocks() * tokens, tokens))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """vLLM hands over what the workers' get_handshake_metadata() said."""
        ours = [item for item in metadata.values() if isinstance(item, LayoutHandshake)]
        if ours and len(ours) == len(metadata):
            self.manager.set_layouts([layout for item in ours for layout in item.layouts])

    # ---- worker process

    @property
    def executor(self) -> Any:
        """Our Executor, once vLLM registered the KV tensors."""
        return self.connector_worker.worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._describe(kv_caches, slab=False)
        super().register_kv_caches(kv_caches)
        self.executor.describe(self._layouts)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Up to 0.28: one slab with all layers of a block side by side."""
        self._describe({"slab": kv_cache}, slab=True)
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)
        self.executor.describe(self._layouts)

    def _describe(self, kv_caches: dict[str, Any], slab: bool) -> None:
        marks = tensor_marks(kv_caches, self._cache_config.num_blocks)
        on_cpu = any("cpu" in mark for mark in marks)
        layout = {
            "slab": slab,
            "tensors": marks,
            "backends": backend_names(self._engine),
            "cpu": cpu_marks() if on_cpu else [],
        }
        self._layouts = (layout,)

    def get_handshake_metadata(self) -> LayoutHandshake:
        return LayoutHandshake(self._layouts)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        # The first call of a step in every version; start_load_kv comes after the forward since 0.29.
        if self.executor is not None:
            self.executor.step_began(getattr(connector_metadata, "step_note", None))
        super().bind_connector_metadata(connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.executor.wait_if_idle()
        sent, received = super().get_finished(finished_req_ids)
        self.executor.step_ended()
        return (sent or set()) | self.executor.take_released(), received

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.executor.take_invalid_blocks()  # type: ignore[no-any-return]

    def build_connector_worker_meta(self) -> Any:
        if self.connector_worker is None or self.executor is None:
            return super().build_connector_worker_meta()
        return self.executor.report(super().build_connector_worker_meta())

    # ---- API server

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """With CUDA graphs vLLM asks this before all else: a bad setting ends the start here, in seconds."""
        parse_extra(extra_config)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """vLLM's metrics class finds our definitions through the spec's name."""
        read_settings(vllm_config)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

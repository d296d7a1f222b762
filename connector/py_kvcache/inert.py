"""Connectors that do nothing: for a model or setting that we do not serve, or when we cannot be imported."""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("vllm.py_kvcache")


def unavailable(error: BaseException) -> type:
    """A stand-in for the connector class when its import failed.

    With ``on_unsupported=disable`` it serves without a cache; else building it says what is wrong.
    """
    reason = f"py-kvcache could not be imported ({type(error).__name__}: {error}); see `py-kvcache doctor`"
    try:
        inert = _inert_class()
    except Exception as worse:  # noqa: BLE001 - vLLM itself is missing or another one: nobody will build us
        logger.debug("vLLM's connector base is not to be had either: %s", worse)

        class Unavailable:
            """Says why there is no connector."""

            def __init__(self, *args: object, **kwargs: object) -> None:
                raise RuntimeError(reason) from error

        return Unavailable

    class UnavailableConnector(inert):  # type: ignore[misc,valid-type]
        """No-op, or an error that says why."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            # config.py may be what could not be imported.
            choice = extra.get("on_unsupported") or os.environ.get("PY_KVCACHE_ON_UNSUPPORTED")
            if choice != "disable":
                raise RuntimeError(reason) from error
            super().__init__(vllm_config, role, kv_cache_config, reason)

    return UnavailableConnector


def make_inert(vllm_config: Any, role: Any, kv_cache_config: Any, reason: str) -> Any:
    """A connector that serves without a cache and says why, once, with a gauge."""
    return _inert_class()(vllm_config, role, kv_cache_config, reason)


class _Nothing:
    """vLLM's connector interface with every answer "nothing"; to be mixed into its base class."""

    def begin(self, scheduler: bool, reason: str) -> None:
        """Say once, in the scheduler process, that there is no cache and why."""
        self._scheduler = scheduler
        if scheduler:
            logger.warning("py-kvcache is disabled, this engine serves without a cache: %s", reason)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # the base says yes for kv_both, and then preempted requests are computed again

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def get_kv_connector_stats(self) -> Any:
        if not self._scheduler:
            return None
        try:
            from py_kvcache import metrics, vllm_api
        except ImportError:
            return None  # our own import is what failed: there is no metric to set
        samples = metrics.Samples()
        samples.set(metrics.DISABLED, 1)
        return vllm_api.to_stats(samples)


def _inert_class() -> Any:
    # Imported late: connector.py must be importable whatever is broken here.
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

    class InertConnector(_Nothing, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        """A connector that does nothing."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, reason: str) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            self.begin(role == KVConnectorRole.SCHEDULER, reason)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

    return InertConnector

"""The connector that vLLM loads: its hooks, one line each where possible.

    --kv-transfer-config '{"kv_connector":"PyKvCacheConnector","kv_connector_module_path":
        "py_kvcache.connector","kv_role":"kv_both","kv_connector_extra_config":{"root":"/cache"}}'

Importing this module never raises: in a pod that we were injected into, a fault of ours must not keep
the engine from starting.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.py_kvcache")

try:
    from py_kvcache.active import PyKvCacheConnector
except Exception as error:  # noqa: BLE001 - whatever it is, it is said when the connector is built
    logger.warning("py-kvcache cannot be used here and stays off: %s: %s", type(error).__name__, error)
    from py_kvcache.inert import unavailable

    PyKvCacheConnector = unavailable(error)  # type: ignore[misc,assignment]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'py_kvcache.connector' has no attribute {name!r}")


__all__ = ["PyKvCacheConnector"]

"""py-kvcache: a KV-cache service for vLLM on a shared filesystem."""

__version__ = "0.1.0"

SUPPORTED_VLLM = ((0, 26), (0, 34))  # from, below

"""The adapter to vLLM: one sentence for each thing that we do not serve, and each version switch."""

from __future__ import annotations

from types import SimpleNamespace as N
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm_api is the adapter to vLLM")

from py_kvcache import metrics, vllm_api
from py_kvcache import stock as stock_books
from py_kvcache.errors import UnsupportedError
from py_kvcache.vllm_api import unsupported_reason


class FullAttentionSpec:
    """Known by the name of its class, like vLLM's own."""

    non_causal = False

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs:
    """vLLM's wrapper: layers of one block size and different page sizes."""

    def __init__(self, **members: Any) -> None:
        self.kv_cache_specs = members
        self.block_size = 16


def kv(*specs: Any) -> Any:
    return N(kv_cache_groups=[N(kv_cache_spec=spec, layer_names=["l"]) for spec in specs])


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    at(monkeypatch, "0.32.0")
    return N(
        kv_transfer_config=N(kv_role="kv_both", kv_connector_extra_config={}, kv_load_failure_policy="fail"),
        parallel_config=N(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=N(prefix_caching_hash_algo="sha256"),
        model_config=N(use_mla=False, get_total_num_kv_heads=lambda: 8, max_model_len=8192),
    )


def at(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm_api.vllm, "__version__", version)


def reason(config: Any, caches: Any = None, block_tokens: int = 256) -> str | None:
    return unsupported_reason(config, kv(FullAttentionSpec()) if caches is None else caches, block_tokens)


# ---- what we serve


@pytest.mark.parametrize("caches", [
    kv(FullAttentionSpec()),
    kv(MLAAttentionSpec(64)),
    kv(UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=MLAAttentionSpec())),
])  # fmt: skip
def test_full_attention_mla_and_uniform_groups_are_served(config: Any, caches: Any):
    assert reason(config, caches) is None


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.27.1", "0.30.0rc1", "0.33.0", "0.33.1.dev5+gabc", "0.32.0+cpu"]
)
def test_versions_from_026_to_033_are_served(config: Any, monkeypatch: pytest.MonkeyPatch, version: str):
    at(monkeypatch, version)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert reason(config) is None


# ---- one sentence each


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "dev", "", "0"])
def test_another_version_is_named(config: Any, monkeypatch: pytest.MonkeyPatch, version: str):
    at(monkeypatch, version)
    assert reason(config) == f"vLLM {version} is not supported; use 0.26 to 0.33"
    with pytest.raises(UnsupportedError, match="install vllm>=0.26,<0.34"):
        vllm_api.check_supported_version()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_other_than_both_is_named(config: Any, role: str):
    config.kv_transfer_config.kv_role = role
    assert reason(config) == f'kv_role is \'{role}\'; py-kvcache needs "kv_role": "kv_both"'


@pytest.mark.parametrize(("name", "words"), [
    ("pipeline_parallel_size", "pipeline parallelism"),
    ("prefill_context_parallel_size", "prefill context parallelism"),
    ("decode_context_parallel_size", "decode context parallelism"),
])  # fmt: skip
def test_parallelism_beyond_tensors_is_named(config: Any, name: str, words: str):
    setattr(config.parallel_config, name, 2)
    assert reason(config) == f"{words} ({name}=2) is not supported yet; set it to 1"


def test_scales_made_at_run_time_are_named(config: Any):
    config.cache_config.calculate_kv_scales = True
    assert "calculate_kv_scales" in reason(config)
    assert "turn it off" in reason(config)


def test_weight_transfer_is_named(config: Any):
    config.weight_transfer_config = N()
    assert "weight transfer changes the weights" in reason(config)


@pytest.mark.parametrize(("value", "served"), [("0", True), ("", True), ("1", False)])
def test_dev_mode_is_named(config: Any, monkeypatch: pytest.MonkeyPatch, value: str, served: bool):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", value)
    assert (reason(config) is None) is served
    assert served or "VLLM_SERVER_DEV_MODE" in reason(config)


def test_request_ids_that_may_come_again_are_named(config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION" in reason(config)
    assert "unset it" in reason(config)


@pytest.mark.parametrize(
    ("gigabytes", "prefix_caching", "served"),
    [(0, False, False), (0, True, True), (4, False, True), (None, False, True)],
)
def test_images_that_have_no_hash_are_named(
    config: Any, gigabytes: int | None, prefix_caching: bool, served: bool
):
    media = None if gigabytes is None else N(mm_processor_cache_gb=gigabytes)
    config.model_config.multimodal_config = media
    config.cache_config.enable_prefix_caching = prefix_caching
    assert (reason(config) is None) is served
    assert served or "mm_processor_cache_gb=0" in reason(config)


@pytest.mark.parametrize("where", ["extra", "config"])
def test_synchronous_loads_are_named(config: Any, where: str):
    transfer = config.kv_transfer_config
    transfer.sync_load_budget_bytes = 0
    transfer.kv_connector_extra_config["sync_load_budget_bytes"] = 0
    assert reason(config) is None
    if where == "extra":
        transfer.kv_connector_extra_config["sync_load_budget_bytes"] = 1
    else:
        transfer.sync_load_budget_bytes = 1
    assert "sync_load_budget_bytes > 0 gives wrong text" in reason(config)


def test_hybrid_models_are_named_with_their_groups(config: Any):
    said = reason(config, kv(FullAttentionSpec(), SlidingWindowSpec()))
    assert said == (
        "models with 2 KV cache groups (FullAttentionSpec, SlidingWindowSpec) are not supported yet, "
        "only one is"
    )
    assert "0 KV cache groups (none)" in reason(config, kv())


@pytest.mark.parametrize(
    "spec",
    [SlidingWindowSpec(), MambaSpec(), UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=SlidingWindowSpec())],
)
def test_other_kinds_of_cache_are_named(config: Any, spec: Any):
    assert "is not supported yet; only full attention and MLA are" in reason(config, kv(spec))


def test_attention_to_later_tokens_is_named(config: Any):
    spec = FullAttentionSpec()
    spec.non_causal = True
    assert "non-causal attention" in reason(config, kv(spec))


@pytest.mark.parametrize(("tokens", "block", "better"), [(256, 96, 288), (16, 32, 32), (100, 16, 112)])
def test_a_block_that_does_not_fit_is_named_with_one_that_does(
    config: Any, tokens: int, block: int, better: int
):
    said = reason(config, kv(FullAttentionSpec(block)), tokens)
    assert said.endswith(f"set block_tokens to {better}")
    assert reason(config, kv(FullAttentionSpec(block)), better) is None


@pytest.mark.parametrize(("version", "algorithm", "seed", "served"), [
    ("0.28.0", "sha256", None, False),
    ("0.28.0", "sha256_cbor", None, False),
    ("0.28.0", "sha256", "0", True),
    ("0.29.0", "sha256", None, True),
    ("0.33.0", "sha256_cbor", None, True),
    ("0.33.0", "xxhash", None, False),
    ("0.33.0", "xxhash_cbor", None, False),
    ("0.33.0", "xxhash", "7", True),
])  # fmt: skip
def test_hashes_with_a_random_seed_are_refused_with_the_way_out(
    config: Any, monkeypatch: pytest.MonkeyPatch, version: str, algorithm: str, seed: str | None, served: bool
):
    at(monkeypatch, version)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config.cache_config.prefix_caching_hash_algo = algorithm
    said = reason(config)
    assert (said is None) is served
    assert served or "set PYTHONHASHSEED=0 in the environment of every engine" in said


def test_our_idea_of_the_seed_is_vllms(monkeypatch: pytest.MonkeyPatch):
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    if not hasattr(utils, "resolve_none_hash_seed"):
        pytest.skip("this vLLM has no fixed seed")
    from vllm.utils.hashing import sha256, xxhash

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    resolve = utils.resolve_none_hash_seed
    assert (resolve(sha256) == resolve(sha256)) is (vllm_api.hash_seed("sha256") is not None)
    assert (resolve(xxhash) == resolve(xxhash)) is (vllm_api.hash_seed("xxhash") is not None)
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert resolve(sha256) == vllm_api.hash_seed("sha256") == "5"


# ---- who holds what


@pytest.mark.parametrize(("mla", "tp", "heads", "replicas"), [
    (True, 8, 128, 8),
    (True, 1, 1, 1),
    (False, 2, 8, 1),
    (False, 8, 8, 1),
    (False, 16, 8, 2),
    (False, 4, 1, 4),
    (False, 1, 0, 1),
])  # fmt: skip
def test_ranks_that_hold_equal_bytes_are_counted(mla: bool, tp: int, heads: int, replicas: int):
    config = N(
        parallel_config=N(tensor_parallel_size=tp),
        model_config=N(use_mla=mla, get_total_num_kv_heads=lambda: heads),
    )
    assert vllm_api.replication(config) == replicas


# ---- failed loads become recomputes


def test_the_failure_policy_is_set_where_the_scheduler_reads_it(config: Any):
    vllm_api.choose_recompute(config, "recompute")
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    vllm_api.choose_recompute(config, "fail")
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


def test_inside_a_multi_connector_the_outer_policy_is_set_too(config: Any):
    class MultiConnector:
        """Gives its parts copies of the configuration, as vLLM's does."""

        def __init__(self, vllm_config: Any) -> None:
            inner = N(kv_transfer_config=N(kv_load_failure_policy="fail"))
            self.part = self.build(inner)

        def build(self, config: Any) -> Any:
            vllm_api.choose_recompute(config, "recompute")
            return config

    part = MultiConnector(config).part
    assert part.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def scheduler(keys: list[bytes], stored: int, blocks: int = 0, per_chunk: int = 2) -> Any:
    state = N(offload_keys=list(keys), next_stored_chunk_idx=stored, block_ids=list(range(blocks)))
    return N(
        _jobs={1: N(req_id="r")},
        _req_status={"r": N(group_states=(state,))},
        config=N(blocks_per_chunk=per_chunk, kv_group_configs=(N(tokens_per_chunk=16 * per_chunk),)),
        state=state,
    )


KEYS = [bytes([n]) for n in range(6)]


@pytest.mark.parametrize(("failed", "index", "given_back"), [
    ({KEYS[2]: "io", KEYS[3]: "cancelled"}, 2, 3),
    ({KEYS[3]: "io", KEYS[2]: "io"}, 2, 3),
    ({KEYS[0]: "io"}, 0, 5),
    ({KEYS[5]: "io"}, 5, 0),
    ({b"other": "io"}, 5, 0),
    ({}, 5, 0),
])  # fmt: skip
def test_what_is_computed_again_is_offered_for_storing_again(failed: Any, index: int, given_back: int):
    stock = scheduler(KEYS, stored=5)
    assert stock_books.rewind_store(stock, 1, failed) == given_back
    assert stock.state.next_stored_chunk_idx == index


def test_a_job_or_request_that_is_gone_needs_no_rewind():
    stock = scheduler(KEYS, stored=5)
    assert stock_books.rewind_store(stock, 99, {KEYS[0]: "io"}) == 0
    stock._req_status.clear()
    assert stock_books.rewind_store(stock, 1, {KEYS[0]: "io"}) == 0
    assert stock.state.next_stored_chunk_idx == 5


def test_a_requests_chunks_are_offered_again_from_a_given_one_on():
    stock = scheduler(KEYS, stored=5)
    stock_books.offer_again(stock, "r", KEYS[2])
    assert stock.state.next_stored_chunk_idx == 2
    for request, key in (("r", b"none"), ("nobody", KEYS[0]), ("r", KEYS[4])):
        stock_books.offer_again(stock, request, key)
    assert stock.state.next_stored_chunk_idx == 2


@pytest.mark.parametrize(
    ("blocks", "computed", "tokens", "chunks"),
    [
        (0, 0, 192, 0),  # aborted while it waited
        (3, 48, 192, 1),  # half a chunk has a place
        (4, 60, 192, 1),  # aborted in the middle of a prefill: the second chunk has a place, and no end
        (4, 64, 192, 2),
        (12, 192, 192, 6),
        (12, 192, 193, 6),  # its first token was sampled
        (12, 224, 224, 6),
        (12, 0, 192, 0),  # aborted while it was preempted: its blocks are others' by now
    ],
)
def test_an_ended_request_keeps_the_chunks_that_were_computed(
    blocks: int, computed: int, tokens: int, chunks: int
):
    stock = scheduler(KEYS, stored=0, blocks=blocks)
    request = N(request_id="r", num_computed_tokens=computed, num_prompt_tokens=192, num_tokens=tokens)
    stock_books.forget_uncomputed(stock, request)
    assert stock.state.offload_keys == KEYS[:chunks]
    assert stock.state.block_ids == list(range(2 * chunks))


@pytest.mark.parametrize(("tokens", "chunks"), [(96, 2), (97, 3)])
def test_the_last_sampled_token_was_not_computed(tokens: int, chunks: int):
    """Asynchronous scheduling has counted the step that would have."""
    stock = scheduler(KEYS, stored=0, blocks=12)
    request = N(request_id="r", num_computed_tokens=tokens, num_prompt_tokens=40, num_tokens=tokens)
    stock_books.forget_uncomputed(stock, request)
    assert (stock.state.offload_keys, len(stock.state.block_ids)) == (KEYS[:chunks], 2 * chunks)


def test_a_request_that_the_stock_scheduler_never_knew_is_none_of_ours():
    stock = scheduler(KEYS, stored=0)
    stock_books.forget_uncomputed(stock, N(request_id="nobody"))
    assert stock.state.offload_keys == KEYS


# ---- metrics


def test_every_metric_is_declared_to_vllm_with_kind_help_and_labels():
    found = vllm_api.metric_definitions()
    assert set(found) == {metric.name for metric in metrics.ALL}
    for metric in metrics.ALL:
        declared = found[metric.name]
        assert (declared.documentation, declared.labelnames) == (metric.help, metric.labels)
        counter = isinstance(declared, vllm_api.OffloadingCounterMetadata)
        assert counter is (metric.kind is metrics.Kind.COUNTER)


def test_samples_become_vllms_stats_and_several_steps_add_up():
    samples = metrics.Samples()
    samples.add(metrics.LOOKUPS, 2, "hit")
    samples.add(metrics.LOAD_BYTES, 5)
    samples.set(metrics.STAGING_SLOTS, 3, "free")
    total = vllm_api.to_stats(samples).aggregate(vllm_api.to_stats(samples))
    assert total.data["data"] == {
        metrics.LOOKUPS.name: {("hit",): 4},
        metrics.LOAD_BYTES.name: {(): 10},
        metrics.STAGING_SLOTS.name: {("free",): 3},
    }
    assert total.data["types"][metrics.STAGING_SLOTS.name] == "gauge"
    assert total.data["types"][metrics.LOOKUPS.name] == "counter"


def test_the_source_of_hits_is_one_that_vllm_knows():
    pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="comes with 0.32")
    assert vllm_api.storage_hit_source().name == "DISK"


def test_an_extra_config_is_the_users_own_dictionary(config: Any):
    vllm_api.extra_config(config)["new"] = 1
    assert config.kv_transfer_config.kv_connector_extra_config == {"new": 1}


def test_blocks_longer_than_any_request_are_refused_since_nothing_would_be_stored(config: Any):
    config.model_config.max_model_len = 255
    assert "max_model_len 255" in reason(config, kv(FullAttentionSpec()))


def test_a_preempted_request_that_is_being_loaded_is_no_flush_of_its_jobs():
    def status(*jobs: int) -> N:
        return N(transfer_jobs=set(jobs))

    jobs = {1: N(is_store=True), 2: N(is_store=False)}
    scheduler = N(_jobs=jobs, _req_status={"a": status(1), "b": status(2), "c": status()})
    output = N(preempted_req_ids={"a", "b", "c", "gone"}, other=7)
    changed = stock_books.without_loading(scheduler, output)
    assert (changed.preempted_req_ids, changed.other) == ({"a", "c", "gone"}, 7)
    assert output.preempted_req_ids == {"a", "b", "c", "gone"}, "vLLM's own stays as it is"
    for nobody in (None, set(), {"a"}):
        output = N(preempted_req_ids=nobody)
        assert stock_books.without_loading(scheduler, output) is output

"""Check a vLLM wheel's sources for every name, field and parameter that the connector touches.

    python tests/matrix/check_signatures.py vllm-0.33.0-….whl

Reads the wheel as text: nothing is imported, so a CUDA build is checked on a machine without one.
Exit code 1 if something is missing, 2 if the file is no vLLM wheel.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from dataclasses import dataclass

V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
BASE = "vllm/v1/kv_offload/base.py"


@dataclass(frozen=True)
class Expect:
    """One class (or module, if ``name`` is empty) and what it must have.

    ``methods`` are written as name(parameter, ...); more parameters may follow if they have defaults.
    ``own`` are attributes set on self in the class; ``names`` are module-level names.
    """

    path: str
    name: str = ""
    fields: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


EXPECTED = (
    Expect(BASE, "TransferResult", fields=("job_id", "success", "transfer_size", "transfer_time")),
    Expect(BASE, "PrepareStoreOutput", fields=("keys_to_store", "store_spec", "evicted_keys")),
    Expect(BASE, "LookupResult", fields=("MISS", "HIT", "HIT_PENDING", "RETRY")),
    Expect(BASE, "ReqContext", fields=("req_id", "kv_transfer_params")),
    Expect(BASE, "CanonicalKVCaches", fields=("tensors", "group_data_refs")),
    Expect(BASE, "CanonicalKVCacheTensor", fields=("tensor",)),
    Expect(BASE, "CanonicalKVCacheRef", fields=("tensor_idx", "page_size_bytes")),
    Expect(BASE, "GPULoadStoreSpec", own=("block_indices",)),
    Expect(BASE, "BlockIDsLoadStoreSpec", own=("block_ids",)),
    Expect(BASE, "RequestOffloadingContext"),
    Expect(BASE, "OffloadingCounterMetadata"),
    Expect(BASE, "OffloadingGaugeMetadata"),
    Expect(BASE, "OffloadingMetricMetadata", fields=("documentation", "labelnames")),
    Expect(
        BASE,
        "OffloadingManager",
        methods=(
            "lookup(key, req_context)",
            "prepare_load(keys, req_context)",
            "prepare_store(keys, req_context)",
            "complete_load(keys, req_context)",
            "complete_store(keys, req_context, success)",
            "on_new_request(req_context)",
            "on_request_finished(req_context)",
            "on_schedule_end(context)",
            "reset_cache()",
            "get_stats()",
            "shutdown()",
        ),
    ),
    Expect(
        BASE,
        "OffloadingWorker",
        methods=(
            "submit_store(job_id, src_spec, dst_spec)",
            "submit_load(job_id, src_spec, dst_spec)",
            "get_finished()",
            "wait(job_ids)",
            "shutdown()",
        ),
    ),
    Expect(
        BASE,
        "OffloadingSpec",
        methods=("get_manager()", "get_worker(kv_caches)", "build_metric_definitions(extra_config)"),
        own=("tokens_per_hash", "blocks_per_chunk"),
    ),
    Expect(
        f"{V1}/offloading/common.py", "OffloadingWorkerMetadata", fields=("completed_jobs", "transfer_stats")
    ),
    Expect(f"{V1}/offloading/common.py", "OffloadingConnectorMetadata", fields=("load_jobs", "store_jobs")),
    Expect(
        f"{V1}/offloading/metrics.py",
        "OffloadingConnectorStats",
        methods=(
            "increase_counter(counter_name, counter_increase_value, labelvalues)",
            "set_gauge(gauge_name, gauge_value, labelvalues)",
        ),
    ),
    Expect(
        f"{V1}/offloading/scheduler.py",
        "OffloadingConnectorScheduler",
        own=("_jobs", "_req_status", "config", "manager"),
    ),
    Expect(
        f"{V1}/offloading/scheduler.py",
        "RequestGroupState",
        fields=("offload_keys", "block_ids", "next_stored_chunk_idx"),
    ),
    Expect(f"{V1}/offloading/scheduler.py", "TransferJobStatus", fields=("req_id",)),
    Expect(f"{V1}/offloading/scheduler.py", "RequestOffloadState", fields=("group_states",)),
    Expect(f"{V1}/offloading/scheduler.py", "SchedulerOffloadConfig", fields=("blocks_per_chunk",)),
    Expect(f"{V1}/offloading/worker.py", "OffloadingConnectorWorker", own=("worker",)),
    Expect(
        f"{V1}/offloading_connector.py",
        "OffloadingConnector",
        methods=(
            "on_new_request(request)",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "update_connector_output(connector_output)",
            "request_finished(request, block_ids)",
            "request_finished_all_groups(request, block_ids)",
            "register_kv_caches(kv_caches)",
            "get_finished(finished_req_ids)",
            "build_connector_worker_meta()",
            "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        ),
        own=("connector_scheduler", "connector_worker"),
    ),
    Expect(
        f"{V1}/base.py",
        "KVConnectorBase_V1",
        methods=(
            "bind_connector_metadata(connector_metadata)",
            "get_block_ids_with_load_errors()",
            "get_handshake_metadata()",
            "set_xfer_handshake_metadata_pp_aware(metadata)",
            "start_load_kv(forward_context)",
            "wait_for_layer_load(layer_name)",
            "save_kv_layer(layer_name, kv_layer, attn_metadata)",
            "wait_for_save()",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "build_connector_meta(scheduler_output)",
            "get_kv_connector_stats()",
        ),
    ),
    Expect(f"{V1}/base.py", names=("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "SupportsHMA")),
    Expect(
        "vllm/v1/outputs.py", "KVConnectorOutput", fields=("kv_connector_worker_meta", "invalid_block_ids")
    ),
    Expect(
        "vllm/config/kv_transfer.py",
        "KVTransferConfig",
        fields=("kv_role", "kv_connector_extra_config", "kv_load_failure_policy"),
    ),
    Expect(
        "vllm/config/cache.py",
        "CacheConfig",
        fields=("cache_dtype", "prefix_caching_hash_algo", "enable_prefix_caching"),
    ),
    Expect(
        "vllm/config/model.py",
        "ModelConfig",
        fields=("model", "revision", "dtype", "quantization", "seed"),
        methods=("get_total_num_kv_heads()", "use_mla()"),
    ),
    Expect("vllm/config/load.py", "LoadConfig", fields=("load_format",)),
    Expect(
        "vllm/config/parallel.py",
        "ParallelConfig",
        fields=("tensor_parallel_size", "pipeline_parallel_size", "rank"),
    ),
    Expect(
        "vllm/v1/request.py",
        "Request",
        own=("request_id", "block_hashes", "lora_request", "num_prompt_tokens"),
    ),
    Expect("vllm/v1/kv_cache_interface.py", names=("FullAttentionSpec", "MLAAttentionSpec")),
    Expect("vllm/v1/kv_cache_interface.py", "KVCacheConfig", fields=("num_blocks", "kv_cache_groups")),
    Expect("vllm/v1/kv_cache_interface.py", "KVCacheGroupSpec", fields=("layer_names", "kv_cache_spec")),
)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], int]:
    """Names without self or cls, and how many of them have no default."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return names, len(names) - len(node.args.defaults)


def attributes_of_self(node: ast.ClassDef) -> set[str]:
    """Everything assigned as self.name anywhere in the class, or named in its slots of annotations."""
    found = set()
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else []
        if isinstance(inner, ast.AnnAssign):
            targets = [inner.target]
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                found.add(target.attr)
    return found


def fields_of(node: ast.ClassDef) -> set[str]:
    """Annotated fields, enum members and class attributes."""
    found = set()
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
        elif isinstance(inner, ast.Assign):
            found |= {target.id for target in inner.targets if isinstance(target, ast.Name)}
    return found


def missing(tree: ast.Module, expect: Expect) -> list[str]:
    """What of an expectation the module lacks, in words."""
    top = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    lacks = [f"no {name}" for name in expect.names if name not in top]
    if not expect.name:
        return lacks
    node = top.get(expect.name)
    if not isinstance(node, ast.ClassDef):
        return [*lacks, "no such class"]
    fields, own = fields_of(node), attributes_of_self(node)
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    lacks += [f"no field {name}" for name in expect.fields if name not in fields | methods.keys()]
    lacks += [f"no self.{name}" for name in expect.own if name not in own | fields | methods.keys()]
    for signature in expect.methods:
        name, _, rest = signature.rstrip(")").partition("(")
        wanted = [word.strip() for word in rest.split(",") if word.strip()]
        if name not in methods:
            lacks.append(f"no method {name}")
            continue
        has, required = parameters(methods[name])
        if has[: len(wanted)] != wanted or required > len(wanted):
            lacks.append(
                f"{name} takes ({', '.join(has)}), {required} of them required; we pass ({', '.join(wanted)})"
            )
    return lacks


def main(path: str) -> int:
    """Print a line for each expectation; 1 if one is not met."""
    try:
        wheel = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        print(f"{path}: {error}; give a vLLM wheel", file=sys.stderr)
        return 2
    names, broken = set(wheel.namelist()), 0
    for expect in EXPECTED:
        if expect.path not in names:
            lacks = ["no such module"]
        else:
            lacks = missing(ast.parse(wheel.read(expect.path)), expect)
        broken += bool(lacks)
        what = f"{expect.path}:{expect.name or ', '.join(expect.names)}"
        print(f"{'MISSING' if lacks else 'ok':8}{what}{': ' + '; '.join(lacks) if lacks else ''}")
    print(f"{len(EXPECTED) - broken} of {len(EXPECTED)} expectations met by {path.rsplit('/', 1)[-1]}")
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))

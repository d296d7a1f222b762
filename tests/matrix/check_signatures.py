"""Does a vLLM wheel still have what the connector touches? `python check_signatures.py WHEEL`

vLLM is not imported: the wheel's sources and the connector's own are compared as syntax trees. Checked are
every import, every method that we override (its parameters must be ours), every abstract method of a class
that we derive from, and the fields, members, private attributes, names and calls of the tables below.
Prints a table; ends with 1 and the names of what is missing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from wheel_sources import Signature, Wheel, constructor, release

PACKAGE = Path(__file__).resolve().parents[2] / "connector" / "py_kvcache"

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOAD = "vllm.v1.kv_offload.base"

# Our class -> vLLM's: what ours defines and vLLM's does, too, must be callable as vLLM calls it.
DERIVED = {
    "active:PyKvCacheConnector": f"{V1}.offloading_connector:OffloadingConnector",
    "inert:InertConnector": f"{V1}:KVConnectorBase_V1",
    "spec:PyKvCacheSpec": f"{OFFLOAD}:OffloadingSpec",
    "scheduler.manager:Manager": f"{OFFLOAD}:OffloadingManager",
    "worker.executor:Executor": f"{OFFLOAD}:OffloadingWorker",
    "plan:WorkerReport": f"{V1}.offloading.common:OffloadingWorkerMetadata",
    "plan:TransferPlan": f"{OFFLOAD}:LoadStoreSpec",
    "active:LayoutHandshake": f"{V1}.base:KVConnectorHandshakeMetadata",
}

# Members of classes, one class a line. "name>=0.30" and "name<0.29": there from, or up to, that release.
# What is read with getattr and a default stands here as well: renamed, it would be missed in silence.
MEMBERS = f"""
{V1}:KVConnectorRole                          SCHEDULER WORKER
{V1}:SupportsHMA                              request_finished_all_groups
{V1}.offloading_connector:OffloadingConnector connector_scheduler connector_worker get_handshake_metadata
  set_xfer_handshake_metadata_pp_aware get_block_ids_with_load_errors build_connector_worker_meta
  register_cross_layers_kv_cache<0.29 build_prom_metrics on_new_request
{V1}.offloading.common:OffloadingConnectorMetadata load_jobs store_jobs jobs_to_flush
{V1}.offloading.common:OffloadingWorkerMetadata    completed_jobs transfer_stats aggregate
{V1}.offloading.scheduler:OffloadingConnectorScheduler manager config _jobs _req_status
{V1}.offloading.scheduler:SchedulerOffloadConfig   blocks_per_chunk kv_group_configs
{V1}.offloading.scheduler:TransferJobStatus   req_id is_store
{V1}.offloading.scheduler:RequestOffloadState group_states
{V1}.offloading.scheduler:RequestGroupState   offload_keys block_ids next_stored_chunk_idx
{V1}.offloading.worker:OffloadingConnectorWorker   worker
{V1}.multi_connector:MultiConnector           _connectors
{OFFLOAD}:LookupResult                        MISS HIT HIT_PENDING RETRY
{OFFLOAD}:ReqContext                          req_id kv_transfer_params
{OFFLOAD}:GPULoadStoreSpec                    block_ids block_indices
{OFFLOAD}:CanonicalKVCaches                   tensors group_data_refs
{OFFLOAD}:CanonicalKVCacheTensor              tensor page_size_bytes
{OFFLOAD}:CanonicalKVCacheRef                 tensor_idx page_size_bytes
{OFFLOAD}:OffloadingSpec                      tokens_per_hash blocks_per_chunk
{OFFLOAD}:OffloadingManager                   get_stats on_schedule_end get_load_source>=0.32
  config_info>=0.33 on_reset_flushed>=0.33
vllm.v1.metrics.cache_hit_source:CacheHitSource    DISK>=0.32
vllm.v1.outputs:KVConnectorOutput             kv_connector_worker_meta invalid_block_ids finished_sending
vllm.v1.kv_cache_interface:KVCacheConfig      num_blocks kv_cache_groups
vllm.v1.kv_cache_interface:KVCacheGroupSpec   kv_cache_spec layer_names
vllm.v1.kv_cache_interface:FullAttentionSpec  block_size
vllm.v1.kv_cache_interface:MLAAttentionSpec   block_size
vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs block_size kv_cache_specs
vllm.v1.request:Request                       request_id block_hashes num_prompt_tokens lora_request status
  resumable num_computed_tokens num_tokens
vllm.v1.request:RequestStatus                 FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED
vllm.v1.core.sched.output:SchedulerOutput     total_num_scheduled_tokens preempted_req_ids
  num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs
vllm.v1.core.sched.output:NewRequestData      req_id num_computed_tokens
vllm.v1.core.sched.output:CachedRequestData   req_ids num_computed_tokens
vllm.v1.core.block_pool:BlockPool             get_num_free_blocks get_cached_block
vllm.lora.request:LoRARequest                 lora_name lora_int_id load_inplace
  tensorizer_config_dict<0.31
vllm.lora.worker_manager:WorkerLoRAManager    _load_adapter list_adapters lora_config
vllm.lora.lora_model:LoRAModel                id rank loras
vllm.lora.lora_weights:LoRALayerWeights       lora_a lora_b scaling
vllm.config:LoRAConfig                        lora_dtype target_modules max_loras max_cpu_loras
vllm.config:MultiModalConfig                  mm_processor_cache_gb
vllm.config:KVTransferConfig                  kv_role kv_connector_extra_config kv_load_failure_policy
vllm.config:ParallelConfig                    rank world_size tensor_parallel_size
  pipeline_parallel_size
  prefill_context_parallel_size decode_context_parallel_size
vllm.config:CacheConfig                       cache_dtype prefix_caching_hash_algo kv_cache_dtype_skip_layers
  calculate_kv_scales<0.27 kv_cache_layout>=0.30 enable_prefix_caching
vllm.config:ModelConfig                       model revision seed dtype quantization hf_config
  hf_overrides use_mla get_total_num_kv_heads multimodal_config quantization_config
  max_model_len original_max_model_len override_generation_config try_get_generation_config
  model_impl model_class_overrides>=0.32 code_revision trust_remote_code
vllm.config:LoadConfig                        load_format model_loader_extra_config ignore_patterns
vllm.config:SpeculativeConfig                 method model revision num_speculative_tokens
vllm.config:CompilationConfig                 static_forward_context
vllm.config:VllmConfig                        model_config cache_config parallel_config load_config
  lora_config speculative_config compilation_config kv_transfer_config weight_transfer_config
  additional_config
"""

# Calls that we make: target, then positional arguments in order, then keywords with "=".
CALLS = f"""
{V1}.base:KVConnectorMetadata
{V1}:KVConnectorBase_V1                       vllm_config role kv_cache_config
{V1}.offloading_connector:OffloadingConnector vllm_config role kv_cache_config
{V1}.offloading.common:OffloadingWorkerMetadata    completed_jobs transfer_stats
{V1}.offloading.metrics:OffloadingConnectorStats
{V1}.offloading.metrics:OffloadingConnectorStats.increase_counter _ _ _
{V1}.offloading.metrics:OffloadingConnectorStats.set_gauge        _ _ _
{V1}.multi_connector:MultiConnector           vllm_config role kv_cache_config
{V1}.base:KVConnectorBase_V1.requires_piecewise_for_cudagraph  extra_config
{OFFLOAD}:OffloadingSpec                      config
{OFFLOAD}:OffloadingCounterMetadata           documentation= labelnames=
{OFFLOAD}:OffloadingGaugeMetadata             documentation= labelnames=
{OFFLOAD}:PrepareStoreOutput                  keys_to_store= store_spec= evicted_keys=
{OFFLOAD}:RequestOffloadingContext
{OFFLOAD}:TransferResult                      job_id success transfer_size transfer_time
"""

# Names of modules that we rely on without importing them.
NAMES = """
vllm.envs                    VLLM_SERVER_DEV_MODE VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
vllm.v1.core.kv_cache_utils  init_none_hash resolve_none_hash_seed>=0.29
"""

# Imports within functions that only newer releases reach.
NEWER = {"vllm.v1.metrics.cache_hit_source": "0.32"}

# ---- the checks: each yields (what, whether it is all right, what is wrong)

Row = tuple[str, str | None]


def in_force(items: list[str], wheel: Wheel) -> list[str]:
    """The names that this release must have."""
    due = []
    for item in items:
        found = re.fullmatch(r"(\w+)(?:(>=|<)(\d+\.\d+))?", item)
        assert found is not None, f"a table of this file has {item!r}"
        if not found[2] or (found[2] == ">=") == (wheel.release >= release(found[3])):
            due.append(found[1])
    return due


def table(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Module, name and items of each entry; indented lines go on."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        target, *items = entry.split()
        module, _, name = target.partition(":")
        yield module, name, items


def check_imports(wheel: Wheel) -> Iterator[Row]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm"):
                continue
            module = node.module or ""
            if module in NEWER and wheel.release < release(NEWER[module]):
                continue
            missing = [
                alias.name
                for alias in node.names
                if wheel.find(module, alias.name) is None and wheel.module(f"{module}.{alias.name}") is None
            ]
            yield f"{path.name}: import {module}", f"no {', '.join(missing)}" if missing else None


def our_methods(target: str) -> dict[str, ast.FunctionDef]:
    """Methods of one of our classes, those of its bases in the same file included."""
    module, _, name = target.partition(":")
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        out = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                out = {**methods(classes[base.id]), **out}
        return out

    return methods(classes[name])


def check_overrides(wheel: Wheel) -> Iterator[Row]:
    for target, base in DERIVED.items():
        module, _, name = base.partition(":")
        theirs = wheel.members(module, name)
        if not wheel.lineage(module, name):
            yield f"{target} derives from {base}", "no such class"
            continue
        mine = our_methods(target)
        count, wrong = 0, []
        for method, node in mine.items():
            other = theirs.get(method)
            if method.startswith("__") or not isinstance(other, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            count += 1
            if (why := Signature.of(node).objection(Signature.of(other))) is not None:
                wrong.append(f"{method}: {why}")
        abstract = {
            method
            for method, node in theirs.items()
            if isinstance(node, ast.FunctionDef)
            and any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        wrong += [f"{method}: abstract there, not ours" for method in sorted(abstract - mine.keys())]
        yield f"{target} overrides {count} of {name}", "; ".join(wrong) or None


def check_members(wheel: Wheel) -> Iterator[Row]:
    for module, name, items in table(MEMBERS):
        due = in_force(items, wheel)
        if not due:
            continue
        there = wheel.members(module, name)
        missing = [member for member in due if member not in there]
        text = f"no {', '.join(missing)}" if there else "no such class"
        yield f"{module}:{name} has {len(due)}", text if missing else None


def check_names(wheel: Wheel) -> Iterator[Row]:
    for module, _, items in table(NAMES):
        due = in_force(items, wheel)
        missing = [name for name in due if wheel.find(module, name) is None]
        yield f"{module} has {len(due)}", f"no {', '.join(missing)}" if missing else None


def check_calls(wheel: Wheel) -> Iterator[Row]:
    for module, target, items in table(CALLS):
        name, _, method = target.partition(".")
        if method:
            node = wheel.members(module, name).get(method)
            signature = Signature.of(node) if isinstance(node, ast.FunctionDef) else None
        else:
            signature = constructor(wheel, module, name)
        if signature is None:
            yield f"{module}:{target}()", "no such thing"
            continue
        yield f"{module}:{target}({', '.join(items)})", refused(signature, items)


def refused(signature: Signature, items: list[str]) -> str | None:
    given = {item[:-1] for item in items if item.endswith("=")}
    ordered = [item for item in items if not item.endswith("=")]
    for i, name in enumerate(ordered):
        if i >= len(signature.positional):
            return f"takes only {len(signature.positional)} arguments"
        if name not in ("_", signature.positional[i][0]):
            return f"argument {i + 1} is {signature.positional[i][0]!r}"
    known = {name for name, _ in (*signature.positional, *signature.keyword)}
    if unknown := given - known:
        return f"takes no {', '.join(sorted(unknown))}"
    rest = (*signature.positional[len(ordered) :], *signature.keyword)
    needed = [name for name, default in rest if not default and name not in given]
    return f"wants {', '.join(needed)}" if needed else None


CHECKS = {
    "imports": check_imports,
    "overridden methods": check_overrides,
    "members of classes": check_members,
    "names of modules": check_names,
    "calls": check_calls,
}


def main(arguments: list[str]) -> int:
    """Print the table; 0 if nothing is missing, 1 if something is, 2 for a call without a wheel."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print("usage: check_signatures.py WHEEL", file=sys.stderr)
        return 2
    wheel = Wheel(Path(arguments[0]))
    print(f"vLLM {wheel.version}, from {Path(arguments[0]).name}")
    missing = 0
    for title, check in CHECKS.items():
        print(f"-- {title}")
        for what, problem in check(wheel):
            missing += problem is not None
            print(f"  {'MISSING' if problem else 'ok     '}  {what}{f': {problem}' if problem else ''}")
    print(f"{missing} missing in vLLM {wheel.version}" if missing else f"vLLM {wheel.version} has all of it")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What is read and changed in the books of vLLM's stock offloading scheduler, where no hook does it.

Its private names (``_jobs``, ``_req_status``, ``offload_keys``) are checked against each supported version by
tests/matrix/check_signatures.py.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from typing import Any


def rewind_store(connector_scheduler: Any, job_id: int, first_failed: Mapping[bytes, object]) -> int:
    """Let the chunks that will be computed again be offered for storing again.

    The stock scheduler moved its store index behind everything it asked us to load. Returns the
    number of chunks that were given back.
    """
    job = connector_scheduler._jobs.get(job_id)
    status = connector_scheduler._req_status.get(job.req_id) if job is not None else None
    if status is None:
        return 0
    return _rewind(status, first_failed)


def _rewind(status: Any, keys: Container[bytes]) -> int:
    given_back = 0
    for state in status.group_states:
        for position, key in enumerate(state.offload_keys[: state.next_stored_chunk_idx]):
            if key in keys:
                given_back += state.next_stored_chunk_idx - position
                state.next_stored_chunk_idx = position
                break
    return given_back


def offer_again(connector_scheduler: Any, request_id: str, first: bytes) -> None:
    """Let a request's chunks from this one on be offered for storing again, with its next step or its end."""
    status = connector_scheduler._req_status.get(request_id)
    if status is not None:
        _rewind(status, (first,))


def forget_uncomputed(connector_scheduler: Any, request: Any) -> None:
    """Keep of an ended request only the chunks that have been computed to their last token.

    Its last store jobs are made in the step after its end, and vLLM then counts tokens that have a place but
    were never computed: of an aborted request all of them (0.26: wrong text for the next one; while it waits
    its blocks are fewer than its keys, and an assertion kills the engine, vllm#49118, #52170), the last
    sampled one (before 0.30), and those of a load that failed, where a failed load is to fail the request
    (all versions). What is scheduled counts as computed: its kernels come before the copy's event.
    """
    status = connector_scheduler._req_status.get(request.request_id)
    if status is None:
        return
    computed = min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))
    config = connector_scheduler.config
    for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
        chunks = min(computed // group.tokens_per_chunk, len(state.block_ids) // config.blocks_per_chunk)
        # Both, or vLLM asserts that they are as many.
        del state.offload_keys[chunks:]
        del state.block_ids[chunks * config.blocks_per_chunk :]


def without_loading(connector_scheduler: Any, scheduler_output: Any) -> Any:
    """The step's output without preempted requests that are being loaded by now.

    vLLM flushes the jobs of preempted requests and asserts that they are stores. But a reset of the prefix
    cache with reset_running_requests preempts them and resumes them in the same step: what is found in
    storage has a load by then, and nothing to be flushed.
    """
    loading = set()
    for request_id in scheduler_output.preempted_req_ids or ():
        status = connector_scheduler._req_status.get(request_id)
        jobs = status.transfer_jobs if status is not None else ()
        if any(not connector_scheduler._jobs[job].is_store for job in jobs):
            loading.add(request_id)
    if not loading:
        return scheduler_output
    changed = copy.copy(scheduler_output)
    changed.preempted_req_ids = set(scheduler_output.preempted_req_ids) - loading
    return changed


def store_jobs_of(connector_scheduler: Any, request_ids: set[str]) -> dict[str, frozenset[int]]:
    """Ids of the store jobs under way, for each of the requests, also where there are none."""
    found: dict[str, set[int]] = {request_id: set() for request_id in request_ids}
    for job_id, job in connector_scheduler._jobs.items():
        if job.is_store and job.req_id in found:
            found[job.req_id].add(job_id)
    return {request_id: frozenset(jobs) for request_id, jobs in found.items()}

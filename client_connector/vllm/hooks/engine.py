"""Hooks of the engine core: requests hold adapters, steps carry plans, failures end or flag requests."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from vllm.lora.request import LoRARequest
from vllm.tokenizers import get_tokenizer
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from client_connector.serving.leases import AdapterLeases
from client_connector.serving.plan import FAILURES, NO_PLAN, PLAN, RETRY, Failure
from client_connector.serving.request_state import Phase, RequestState
from client_connector.serving.settings import BASE_MODEL, ERROR, KEY
from client_connector.serving.wrapping import Wrap, ours
from client_connector.vllm.settings import of_engine
from lora_server.errors import ConfigError
from lora_server.logs import Repeats
from lora_server.merged import find_merged

LEASES = "lora_server_leases"  # attribute of a Scheduler of ours
BEGAN = "lora_server_began"  # attribute of a scheduler output: when it was made
IDLE_SECONDS = 1e-3  # of a step in which all requests wait for a place
log = structlog.get_logger()


def install(wrap: Wrap) -> None:
    """Wrap the scheduler, the way of a request into it, and the hashing of KV blocks."""
    wrap(Scheduler, "__init__", _init)
    wrap(Scheduler, "schedule", _schedule)
    wrap(Scheduler, "update_from_output", _update_from_output)
    wrap(Scheduler, "_handle_blocked_waiting_request", _handle_blocked_waiting_request)
    wrap(Scheduler, "_free_request", _free_request)
    wrap(Scheduler, "_preempt_request", _preempt_request)
    wrap(Scheduler, "shutdown", _shutdown)
    wrap(EngineCore, "preprocess_add_request", _preprocess_add_request)
    wrap(kv_cache_utils, "generate_block_hash_extra_keys", _extra_keys)


def tokenizer_of(vllm_config: Any) -> Callable[[str], Sequence[int]]:
    """Return a tokenizer that is loaded when the first legacy invocation string needs it; raises ConfigError."""

    @functools.cache
    def tokenize(text: str) -> Sequence[int]:
        config = vllm_config.model_config
        try:
            tokenizer = get_tokenizer(
                config.tokenizer,
                tokenizer_mode=config.tokenizer_mode,
                revision=config.tokenizer_revision,
                trust_remote_code=config.trust_remote_code,
            )
            tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            raise ConfigError(
                f"invocation string {text!r}: no tokenizer at {config.tokenizer} ({error}); "
                "give the adapter alora_invocation_tokens"
            ) from error
        return tokens

    return tokenize


def _init(original: Any) -> Callable[..., Any]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        found = of_engine(vllm_config)
        if found is not None and not hasattr(self, LEASES):
            record = find_merged(vllm_config.model_config.model)
            setattr(self, LEASES, AdapterLeases(found, tokenizer_of(vllm_config), record))
            self.lora_server_ended = []
            self.lora_server_failed, self.lora_server_flagged = Repeats(log.error), Repeats(log.warning)

    return init


def _leases(scheduler: Any) -> AdapterLeases | None:
    return getattr(scheduler, LEASES, None)


@ours(lambda core: _leases(core.scheduler))
def _preprocess_add_request(original: Any, leases: AdapterLeases, self: Any, request: Any) -> Any:
    """Ask for the adapter in the thread that receives requests. KV blocks are hashed under the version that the front
    end knows, until the answer says which it is."""
    asked = request.lora_request
    if asked is None:
        leases.hold_base(request.request_id, request.trace_headers)
    elif not leases.is_in_weights(_version_in(asked)):
        state = leases.hold(request.request_id, asked.lora_name, request.prompt_token_ids, request.trace_headers)
        request.lora_request = _identified(asked, state)
    return original(request)


def _identified(asked: Any, state: RequestState) -> Any:
    """Name the adapter's version and where it begins to act: KV blocks are hashed under that."""
    if state.falls_back:
        return None
    version = state.version or _version_in(asked)
    return LoRARequest(asked.lora_name, asked.lora_int_id, f"{KEY}:{asked.lora_name}@{version}#{state.start}")


def _version_in(asked: Any) -> str:
    """Return the version that the front end knows."""
    version: str = asked.lora_path.removeprefix(f"{KEY}:{asked.lora_name}@").partition("#")[0]
    return version


def start_in(lora_path: str) -> int:
    """Return the position from which the adapter acts, of a path that `_preprocess_add_request` made."""
    start = lora_path.rpartition("#")[2]
    return int(start) if lora_path.startswith(f"{KEY}:") and start.isdigit() else 0


def _extra_keys(original: Any) -> Callable[..., Any]:
    """Hash blocks wholly before an activated LoRA's invocation as the base model's, later ones under the version."""

    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        if keys is None or request.lora_request is None or not request.lora_request.lora_path.startswith(f"{KEY}:"):
            return keys, mm_idx
        start = start_in(request.lora_request.lora_path)
        if end_token_idx <= start:
            return tuple(key for key in keys if key[0] != "lora") or None, mm_idx
        return keys, mm_idx

    return generate_block_hash_extra_keys


@ours(_leases)
def _schedule(original: Any, leases: AdapterLeases, self: Any, *args: Any, **kwargs: Any) -> Any:
    self.lora_server_failed.flush()
    self.lora_server_flagged.flush()
    self.lora_server_ended += _end(self, leases.failed())  # before they take a place in the batch
    output = original(*args, **kwargs)
    leases.expect(request.request_id for request in self.waiting)
    setattr(output, PLAN, leases.plan(output.num_scheduled_tokens.keys()))
    setattr(output, BEGAN, time.monotonic())
    if not output.num_scheduled_tokens and leases.num_waiting:
        time.sleep(IDLE_SECONDS)
    return output


@ours(_leases)
def _handle_blocked_waiting_request(original: Any, leases: AdapterLeases, self: Any, request: Any) -> bool:
    """Pass over a request that is not ready, as vLLM does until a request's grammar is: it takes no KV blocks."""
    if not original(request) or not leases.is_ready(request.request_id):
        return False
    state = leases.state(request.request_id)
    if state is not None:
        _identify(request, state)
    return True


def _identify(request: Request, state: RequestState) -> None:
    """Hash a request's KV blocks again where it fell back to the base model, or its version became known just now."""
    if request.lora_request is None:
        return
    now = _identified(request.lora_request, state)
    if now is None or now.lora_path != request.lora_request.lora_path:
        request.lora_request = now
        request.block_hashes = []
        request.update_block_hashes()


@ours(_leases)
def _update_from_output(
    original: Any, leases: AdapterLeases, self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    tokens, began, now = scheduler_output.total_num_scheduled_tokens, getattr(scheduler_output, BEGAN), time.monotonic()
    leases.pace.passed(tokens, began, now)
    void = {req_id: Failure(RETRY, "") for req_id in getattr(scheduler_output, PLAN, NO_PLAN).void}
    failures = void | getattr(model_runner_output, FAILURES, {})
    ended = [*self.lora_server_ended, *_settle(self, leases, failures)]
    self.lora_server_ended = []
    states = {req_id: leases.state(req_id) for req_id in scheduler_output.num_scheduled_tokens}
    results: dict[int, Any] = original(scheduler_output, model_runner_output)
    for result in results.values():
        for output in result.outputs:
            _flag(self, output, states.get(output.request_id))
    for client_index, output in ended:
        results.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
    return results


def _settle(scheduler: Any, leases: AdapterLeases, failures: dict[str, Failure]) -> list[tuple[int, Any]]:
    """Discard the KV blocks of a failed step's requests, and end each request or compute it again."""
    for req_id, failure in failures.items():
        state, request = leases.fail_step(req_id, failure), scheduler.requests.get(req_id)
        if request is None or state is None:
            continue
        void = {block for group in scheduler.kv_cache_manager.get_block_ids(req_id) for block in group}
        scheduler.kv_cache_manager.evict_blocks(void)
        if state.phase is not Phase.FAILED:
            _identify(request, state)
            _start_over(scheduler, request)
    return _end(scheduler, leases.failed())


def _start_over(scheduler: Any, request: Request) -> None:
    """Compute the text so far again: nothing of a void step, or of an adapter given up, stays in the KV cache."""
    if request.status == RequestStatus.RUNNING:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)


def _end(scheduler: Any, failures: Sequence[tuple[str, Failure]]) -> list[tuple[int, Any]]:
    ended = []
    for req_id, failure in failures:
        for request in scheduler.finish_requests(req_id, RequestStatus.FINISHED_ERROR):
            said = {"request": req_id, "code": failure.code, "error": failure.message}
            scheduler.lora_server_failed(failure.code, "request failed", **said)
            output = EngineCoreOutput(
                request_id=req_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=failure.flag(ERROR),
                trace_headers=request.trace_headers,
            )
            ended.append((request.client_index, output))
    return ended


def _flag(scheduler: Any, output: Any, state: RequestState | None) -> None:
    """Say in the last output of a request that the base model answered it."""
    failure = None if state is None else state.base_model_reason
    if failure is None or output.finish_reason is None:
        return
    scheduler.lora_server_flagged(
        failure.code, "answered by the base model", request=output.request_id, error=failure.message
    )
    if output.stop_reason is None:
        output.stop_reason = failure.flag(BASE_MODEL)
    output.kv_transfer_params = {
        **(output.kv_transfer_params or {}),
        KEY: {"answered_by": BASE_MODEL, "code": failure.code, "reason": failure.message},
    }


@ours(_leases)
def _free_request(original: Any, leases: AdapterLeases, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    leases.release(request.request_id)
    return original(request, *args, **kwargs)


@ours(_leases)
def _preempt_request(original: Any, leases: AdapterLeases, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    leases.pause(request.request_id)
    return original(request, *args, **kwargs)


@ours(_leases)
def _shutdown(original: Any, leases: AdapterLeases, self: Any) -> Any:
    leases.close()
    return original()

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

from client_connector.serving.holder import Holder
from client_connector.serving.plan import FAILURES, NO_PLAN, PLAN, RETRY, Failure
from client_connector.serving.settings import KEY
from client_connector.serving.waiting import Use
from client_connector.vllm.settings import of_engine
from lora_server.errors import ConfigError
from lora_server.logs import Repeats

HOLDER = "lora_server_holder"  # attribute of a Scheduler of ours
IDLE_SECONDS = 1e-3  # of a step in which all requests wait for a place
log = structlog.get_logger()
Wrap = Callable[[Any, str, Callable[[Any], Callable[..., Any]]], None]


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
    """The engine's tokenizer, loaded when the first legacy invocation string needs it; raises ConfigError."""

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
        if found is not None and not hasattr(self, HOLDER):
            setattr(self, HOLDER, Holder(found, tokenizer_of(vllm_config)))
            self.lora_server_ended = []
            self.lora_server_failed, self.lora_server_flagged = Repeats(log.error), Repeats(log.warning)

    return init


def _preprocess_add_request(original: Any) -> Callable[..., Any]:
    """In the thread that receives requests, before KV blocks are hashed under the adapter's version."""

    def preprocess_add_request(self: Any, request: Any) -> Any:
        holder: Holder | None = getattr(self.scheduler, HOLDER, None)
        if holder is None or request.lora_request is None:
            return original(self, request)
        asked = request.lora_request
        use = holder.hold(request.request_id, asked.lora_name, request.prompt_token_ids, request.trace_headers)
        request.lora_request = _identified(asked, use)
        return original(self, request)

    return preprocess_add_request


def _identified(asked: Any, use: Use) -> Any:
    """What KV blocks are hashed under: the adapter's version, and where it begins to act."""
    if use.falls_back:
        return None
    return LoRARequest(asked.lora_name, asked.lora_int_id, f"{KEY}:{asked.lora_name}@{use.version}#{use.start}")


def start_in(lora_path: str) -> int:
    """Where the adapter of a path that `_preprocess_add_request` made begins to act."""
    start = lora_path.rpartition("#")[2]
    return int(start) if lora_path.startswith(f"{KEY}:") and start.isdigit() else 0


def _extra_keys(original: Any) -> Callable[..., Any]:
    """Blocks wholly before an activated LoRA's invocation are the base model's; later ones are the version's."""

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


def _schedule(original: Any) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        holder: Holder | None = getattr(self, HOLDER, None)
        if holder is None:
            return original(self, *args, **kwargs)
        self.lora_server_failed.flush()
        self.lora_server_flagged.flush()
        self.lora_server_ended += _end(self, holder.failed())  # before they take a place in the batch
        output = original(self, *args, **kwargs)
        holder.expect(request.request_id for request in self.waiting)
        setattr(output, PLAN, holder.plan(output.num_scheduled_tokens.keys()))
        if not output.num_scheduled_tokens and holder.num_queued:
            time.sleep(IDLE_SECONDS)
        return output

    return schedule


def _handle_blocked_waiting_request(original: Any) -> Callable[..., Any]:
    """A request without a place is passed over, as vLLM does with one whose grammar is not ready: it takes no KV blocks
    and holds up nobody."""

    def handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        holder: Holder | None = getattr(self, HOLDER, None)
        if not original(self, request) or (holder is not None and not holder.is_ready(request.request_id)):
            return False
        use = holder.use(request.request_id) if holder is not None else None
        if use is not None and request.lora_request is not None:
            _identify(request, use)
        return True

    return handle_blocked_waiting_request


def _identify(request: Request, use: Use) -> None:
    """While it waited it failed, and the base model answers; or the version was told only then: other KV blocks."""
    now = _identified(request.lora_request, use)
    if now is None or now.lora_path != request.lora_request.lora_path:
        request.lora_request = now
        request.block_hashes = []
        request.update_block_hashes()


def _update_from_output(original: Any) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        holder: Holder | None = getattr(self, HOLDER, None)
        if holder is None:
            return original(self, scheduler_output, model_runner_output)
        void = {req_id: Failure(RETRY, "") for req_id in getattr(scheduler_output, PLAN, NO_PLAN).void}
        failures = void | getattr(model_runner_output, FAILURES, {})
        ended = [*self.lora_server_ended, *_settle(self, holder, failures)]
        self.lora_server_ended = []
        uses = {req_id: holder.use(req_id) for req_id in scheduler_output.num_scheduled_tokens}
        results: dict[int, Any] = original(self, scheduler_output, model_runner_output)
        for result in results.values():
            for output in result.outputs:
                _flag(self, output, uses.get(output.request_id))
        for client_index, output in ended:
            results.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        return results

    return update_from_output


def _settle(scheduler: Any, holder: Holder, failures: dict[str, Failure]) -> list[tuple[int, Any]]:
    """After a failed step: its KV blocks are void, and its requests end, or start over: when there is a server again,
    or with the base model."""
    ending = []
    for req_id, failure in failures.items():
        request = scheduler.requests.get(req_id)
        again = failure.code == RETRY or holder.starts_over(req_id, failure)
        use = holder.use(req_id) if again else holder.fail(req_id, failure)
        if request is None or use is None:
            continue
        void = {block for group in scheduler.kv_cache_manager.get_block_ids(req_id) for block in group}
        scheduler.kv_cache_manager.evict_blocks(void)
        if again:
            _start_over(scheduler, request)
        elif use.falls_back:
            _identify(request, use)
            _start_over(scheduler, request)
        else:
            ending.append((req_id, failure))
    return _end(scheduler, [*ending, *(one for one in holder.failed() if one[0] not in failures)])


def _start_over(scheduler: Any, request: Request) -> None:
    """Compute the text so far anew: nothing of a void step, or of an adapter given up, stays in its KV cache."""
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
                stop_reason=failure.flag("error"),
                trace_headers=request.trace_headers,
            )
            ended.append((request.client_index, output))
    return ended


def _flag(scheduler: Any, output: Any, use: Use | None) -> None:
    """A request that the base model answered says so in its last output."""
    if use is None or use.failure is None or not use.falls_back or output.finish_reason is None:
        return
    said = {"request": output.request_id, "error": use.failure.message}
    scheduler.lora_server_flagged(use.failure.code, "answered by the base model", **said)
    if output.stop_reason is None:
        output.stop_reason = use.failure.flag("base_model")
    output.kv_transfer_params = {
        **(output.kv_transfer_params or {}),
        KEY: {"answered_by": "base_model", "code": use.failure.code, "reason": use.failure.message},
    }


def _free_request(original: Any) -> Callable[..., Any]:
    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        holder: Holder | None = getattr(self, HOLDER, None)
        if holder is not None:
            holder.release(request.request_id)
        return original(self, request, *args, **kwargs)

    return free_request


def _preempt_request(original: Any) -> Callable[..., Any]:
    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        holder: Holder | None = getattr(self, HOLDER, None)
        if holder is not None:
            holder.pause(request.request_id)
        return original(self, request, *args, **kwargs)

    return preempt_request


def _shutdown(original: Any) -> Callable[..., Any]:
    def shutdown(self: Any) -> Any:
        holder: Holder | None = getattr(self, HOLDER, None)
        if holder is not None:
            holder.close()
        return original(self)

    return shutdown

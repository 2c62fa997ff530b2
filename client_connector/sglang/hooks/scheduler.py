"""Hooks of the scheduler: requests hold adapters, steps carry plans, failures end requests or compute them again.

SGLang's scheduler and model runner are one process, so a step's plan needs no way between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import structlog
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req

from client_connector.serving.http import status_of
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.plan import RETRY, Failure
from client_connector.serving.request_state import Phase, RequestState
from client_connector.serving.settings import find
from client_connector.serving.wrapping import Wrap, ours
from client_connector.sglang.hooks.arguments import MAX_ADAPTERS
from client_connector.sglang.hooks.worker import SglangLoRAManager
from client_connector.sglang.names import AdapterId, base_names
from lora_server.errors import ConfigError
from lora_server.logs import Repeats

ADAPTERS = "lora_server_adapters"  # attribute of a Scheduler of ours
IDLE_SECONDS = 1e-3  # of a step in which all requests wait for their adapters
log = structlog.get_logger()


class ScheduledAdapters:
    """A scheduler's requests that named an adapter, and what each holds; one thread, the scheduler's."""

    def __init__(self, leases: AdapterLeases, manager: SglangLoRAManager) -> None:
        self.leases, self.manager = leases, manager
        self._requests: dict[str, Any] = {}  # by SGLang's rid
        self._failures: dict[str, Failure] = {}  # of the step that was computed last
        self._complain = Repeats(log.error)

    def add(self, request: Any) -> None:
        """Ask for a new request's adapter; release the adapter of a preempted request."""
        if self._has(request):
            self.leases.pause(request.rid)
        elif request.lora_id is not None and (request.to_finish is not None or request.finished()):
            request.skip_radix_cache_insert = True  # SGLang ends it after a pass that has no adapter
        elif request.lora_id is not None:
            name = AdapterId.parse(request.lora_id).name
            self._requests[request.rid] = request
            self.leases.hold(request.rid, name, list(request.origin_input_ids))

    def is_ready(self, request: Any) -> bool:
        """Return whether a request may be scheduled; its KV cache is its adapter's version's from then on."""
        if not self._has(request):
            return True
        state = self.leases.state(request.rid)
        if not self.leases.is_ready(request.rid) or state is None or _failure_in(state) is not None:
            return False
        before = request.lora_id
        now = str(AdapterId.parse(before)._replace(version=state.version, start=state.start))
        request.lora_id, request.extra_key = now, request.extra_key.removesuffix(before) + now
        return True

    def begin(self, batch: Any) -> None:
        """Plan the step of a batch."""
        names = [request.rid for request in batch.reqs]
        if batch.forward_mode.is_extend():
            counts, computed = list(batch.extend_lens), list(batch.prefix_lens)
        else:
            counts = [1] * len(names)
            computed = [len(one.origin_input_ids) + len(one.output_ids) - 1 for one in batch.reqs]
        plan = self.leases.plan(names)
        self.manager.expect(plan, names, counts, computed)
        self._failures = {name: Failure(RETRY, "") for name in plan.void}

    def end(self, tokens: int, began: float) -> None:
        """End the step; its failures are known."""
        self._failures |= self.manager.end()
        self.leases.pace.passed(tokens, began, time.monotonic())

    def settle(self, requests: Sequence[Any]) -> list[Any]:
        """Take note of the step's failures; return the requests whose part of it is void."""
        void = []
        for request in requests:
            failure = self._failures.get(request.rid)
            state = self.leases.state(request.rid) if failure is None else self.leases.fail_step(request.rid, failure)
            if not request.finished() and (failure is not None or _failure_in(state) is not None):
                void.append(request)
        return void

    def failed(self) -> list[Any]:
        """List the requests that end with an error."""
        return [one for name, one in self._requests.items() if _failure_in(self.leases.state(name)) is not None]

    def has_failed(self, request: Any) -> bool:
        """Return whether a request ends with an error."""
        return self._has(request) and _failure_in(self.leases.state(request.rid)) is not None

    def forget(self, request: Any) -> Failure:
        """Forget a request that ends with an error; returns the reason."""
        failure = _failure_in(self.leases.state(request.rid))
        assert failure is not None
        self._release(request.rid)
        self._complain(failure.code, "request failed", request=request.rid, code=failure.code, error=failure.message)
        return failure

    def keep(self, requests: Sequence[Any]) -> None:
        """Release the adapters of all requests but these; the others have ended."""
        alive = {id(request) for request in requests}
        for name in [name for name, request in self._requests.items() if id(request) not in alive]:
            self._release(name)

    def _has(self, request: Any) -> bool:
        return self._requests.get(request.rid) is request  # a rid may be used again

    def _release(self, name: str) -> None:
        self.leases.release(name)
        del self._requests[name]


def _failure_in(state: RequestState | None) -> Failure | None:
    """Return why a request ends. Where the base model would answer, too: SGLang's answers have no place to say so."""
    return state.failure if state is not None and state.phase in (Phase.FAILED, Phase.BASE_MODEL) else None


# -- the scheduler


def install(wrap: Wrap) -> None:
    """Wrap the way of a request into the scheduler, and that of a step through it."""
    wrap(Scheduler, "__init__", _init)
    wrap(Scheduler, "_add_request_to_queue", _add_request_to_queue)
    wrap(Scheduler, "can_schedule_lora_req", _can_schedule)
    wrap(Scheduler, "get_next_batch_to_run", _get_next_batch_to_run)
    wrap(Scheduler, "run_batch", _run_batch)
    wrap(Scheduler, "process_batch_result", _process_batch_result)
    wrap(Scheduler, "release_host_resources", _release_host_resources)


def _init(original: Any) -> Callable[..., None]:
    def init(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        original(self, server_args, *args, **kwargs)
        manager, found = self.tp_worker.model_runner.lora_manager, find(None, os.environ)
        if not isinstance(manager, SglangLoRAManager) or found is None or self.max_loras_per_batch != MAX_ADAPTERS:
            raise ConfigError(
                "SGLang's arguments: got some that were resolved before the plugin was loaded; start SGLang by its "
                "command or by sglang.Engine, or call sglang.srt.plugins.load_plugins() first"
            )
        # it then passes over requests that `_process_batch_result` took off their batch, also of a decoding step
        self.batch_result_processor = replace(self.batch_result_processor, enable_overlap=True)
        names = base_names(server_args.served_model_name or server_args.model_path, server_args.model_path)
        leases = AdapterLeases(replace(found, served_names=names), _tokenizer_of(self))
        setattr(self, ADAPTERS, ScheduledAdapters(leases, manager))

    return init


def _tokenizer_of(scheduler: Any) -> Callable[[str], Sequence[int]]:
    def tokenize(text: str) -> Sequence[int]:
        if scheduler.tokenizer is None:
            raise ConfigError(f"invocation string {text!r}: no tokenizer; give the adapter alora_invocation_tokens")
        tokens: list[int] = scheduler.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    return tokenize


def _adapters(scheduler: Any) -> ScheduledAdapters | None:
    return getattr(scheduler, ADAPTERS, None)


@ours(_adapters)
def _add_request_to_queue(
    original: Any, adapters: ScheduledAdapters, self: Any, req: Any, *args: Any, **kwargs: Any
) -> None:
    adapters.add(req)
    original(req, *args, **kwargs)


@ours(_adapters)
def _can_schedule(original: Any, adapters: ScheduledAdapters, self: Any, req: Any, running_loras: object) -> bool:
    """Pass over a request that is not ready: it takes no KV blocks, and others go first."""
    return adapters.is_ready(req)


@ours(_adapters)
def _get_next_batch_to_run(original: Any, adapters: ScheduledAdapters, self: Any, *args: Any, **kwargs: Any) -> Any:
    failed = {id(one) for one in adapters.failed()}
    ended = [one for one in self.waiting_queue if id(one) in failed]
    self.waiting_queue = [one for one in self.waiting_queue if id(one) not in failed]
    for one in ended:
        _abort(self, one, adapters.forget(one))
    plan = original(*args, **kwargs)
    running = [*plan.running_batch.reqs, *(plan.batch_to_run.reqs if plan.batch_to_run else ())]
    chunked = [] if self.chunked_req is None else [self.chunked_req]
    adapters.keep([*self.waiting_queue, *running, *chunked])
    adapters.leases.expect(one.rid for one in self.waiting_queue)
    if plan.batch_to_run is None and adapters.leases.num_waiting:
        time.sleep(IDLE_SECONDS)  # SGLang would ask again at once
    return plan


@ours(_adapters)
def _run_batch(original: Any, adapters: ScheduledAdapters, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    began = time.monotonic()
    adapters.begin(batch)
    result = original(batch, *args, **kwargs)
    adapters.end(batch.extend_num_tokens if batch.forward_mode.is_extend() else len(batch.reqs), began)
    return result


@ours(_adapters)
def _process_batch_result(original: Any, adapters: ScheduledAdapters, self: Any, batch: Any, result: Any) -> None:
    """Remove each request with a void result from the batch, free its KV cache, then requeue or abort it."""
    void = adapters.settle(batch.reqs)
    if void and batch.return_logprob and batch.forward_mode.is_extend():
        # SGLang finds a prompt's logprobs by counting those of the requests before it
        void = [one for one in batch.reqs if one in void or (one.return_logprob and not one.finished())]
    if not void:
        original(batch, result)
        return
    for index, request in enumerate(batch.reqs):
        if request in void:
            batch.release_req(index, 0)  # marks it as retracted, and its result is passed over
    if self.chunked_req in void:
        self.chunked_req = None
    original(batch, result)
    batch.filter_batch(reqs_to_exclude=void)
    batch.batch_is_full = self.running_batch.batch_is_full = False
    for request in void:
        if adapters.has_failed(request):
            _abort(self, request, adapters.forget(request))
        else:
            self._add_request_to_queue(request, is_retracted=True)


def _abort(scheduler: Any, request: Any, failure: Failure) -> None:
    """End a request that is in no batch, with an error that names the reason."""
    status = HTTPStatus.BAD_REQUEST if failure.code == "not_invoked" else status_of(failure)
    reason: Mapping[str, Any] = {"type": "abort", "message": failure.message, "status_code": status, "err_type": None}
    scheduler._release_aborted_request(request)
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=reason), request)


@ours(_adapters)
def _release_host_resources(original: Any, adapters: ScheduledAdapters, self: Any) -> None:
    adapters.leases.close()
    adapters.manager.close()
    original()

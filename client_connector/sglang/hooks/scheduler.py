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
from client_connector.sglang.hooks.frontend import lora_id, name_in
from client_connector.sglang.hooks.worker import RemoteLoRAManager
from lora_server.errors import ConfigError
from lora_server.logs import Repeats

OURS = "lora_server"  # attribute of a Scheduler of ours
IDLE_SECONDS = 1e-3  # of a step in which all requests wait for their adapters
NOT_SUPPORTED = "not_supported"
BAD_REQUESTS = (NOT_SUPPORTED, "not_invoked")  # codes of failures that are the request's own
log = structlog.get_logger()


class AdapterRequests:
    """A scheduler's requests that named an adapter, and what each holds; one thread, the scheduler's."""

    def __init__(self, leases: AdapterLeases, manager: RemoteLoRAManager) -> None:
        self.leases, self.manager = leases, manager
        self.failures: dict[str, Failure] = {}  # of the step that was computed last
        self._requests: dict[str, Any] = {}  # by SGLang's rid
        self._names: dict[str, str] = {}
        self._complain = Repeats(log.error)

    def add(self, request: Any) -> None:
        """Hold a new request's adapter; give back that of a request which the engine took off its batch."""
        if self._requests.get(request.rid) is request:
            self.leases.pause(request.rid)
        elif request.lora_id is not None and request.to_finish is None and not request.finished():
            self._requests[request.rid], self._names[request.rid] = request, name_in(request.lora_id)
            self.leases.hold(request.rid, self._names[request.rid], list(request.origin_input_ids))

    def is_ready(self, request: Any) -> bool:
        """Return whether a request may be scheduled.

        From then on the key of its KV cache has its adapter's version, and where an activated LoRA begins: the same
        text before it is the base model's in one request, and not in another.
        """
        if request.rid not in self._requests:
            return True
        state = self.leases.state(request.rid)
        if not self.leases.is_ready(request.rid) or state is None or _failure_of(state) is not None:
            return False
        now, before = lora_id(self._names[request.rid], state.version, state.start), request.lora_id
        if now != before:
            request.lora_id, request.extra_key = now, request.extra_key.removesuffix(before) + now
        return True

    def plan(self, batch: Any) -> None:
        """Plan the step of a batch."""
        names = [request.rid for request in batch.reqs]
        if batch.forward_mode.is_extend():
            counts, computed = list(batch.extend_lens), list(batch.prefix_lens)
        else:
            counts = [1] * len(names)
            computed = [len(one.origin_input_ids) + len(one.output_ids) - 1 for one in batch.reqs]
        plan = self.leases.plan(names)
        self.manager.forward.receive(plan)
        self.manager.rows = names, counts, computed
        self.failures = {name: Failure(RETRY, "") for name in plan.void}

    def end(self, tokens: int, began: float) -> None:
        """End the step; its failures are known."""
        self.manager.rows = [], [], []
        self.failures |= self.manager.forward.end()
        self.leases.pace.passed(tokens, began, time.monotonic())

    def failed_in(self, requests: Sequence[Any]) -> list[Any]:
        """List the requests whose part of the step is void."""
        void = []
        for request in requests:
            failure = self.failures.get(request.rid)
            state = self.leases.state(request.rid) if failure is None else self.leases.fail_step(request.rid, failure)
            if not request.finished() and (failure is not None or _failure_of(state) is not None):
                void.append(request)
        return void

    def failed(self) -> list[Any]:
        """List the requests that end with an error."""
        return [one for name, one in self._requests.items() if _failure_of(self.leases.state(name)) is not None]

    def forget(self, request: Any) -> Failure | None:
        """Forget a request that ends; returns the failure that ends it."""
        failure = _failure_of(self.leases.state(request.rid))
        self._release(request.rid)
        if failure is not None:
            self._complain(failure.code, "request failed", request=request.rid, **failure._asdict())
        return failure

    def keep(self, requests: Sequence[Any]) -> None:
        """Release what requests hold that are not among these: they ended."""
        names = {request.rid for request in requests}
        for name in [one for one in self._requests if one not in names]:
            self._release(name)

    def _release(self, name: str) -> None:
        self.leases.release(name)
        self._requests.pop(name, None)
        self._names.pop(name, None)


def _failure_of(state: RequestState | None) -> Failure | None:
    """Return why a request ends; also where the base model would answer, which SGLang's answers cannot say."""
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
        assert isinstance(manager, RemoteLoRAManager) and found is not None
        # it then passes over requests that `_process_batch_result` took off their batch, also of a decoding step
        self.batch_result_processor = replace(self.batch_result_processor, enable_overlap=True)
        found = replace(found, served_names=(server_args.served_model_name or server_args.model_path,))
        setattr(self, OURS, AdapterRequests(AdapterLeases(found, _tokenizer_of(self)), manager))

    return init


def _tokenizer_of(scheduler: Any) -> Callable[[str], Sequence[int]]:
    def tokenize(text: str) -> Sequence[int]:
        if scheduler.tokenizer is None:
            raise ConfigError(f"invocation string {text!r}: no tokenizer; give the adapter alora_invocation_tokens")
        tokens: list[int] = scheduler.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    return tokenize


def _requests(scheduler: Any) -> AdapterRequests | None:
    return getattr(scheduler, OURS, None)


@ours(_requests)
def _add_request_to_queue(
    original: Any, requests: AdapterRequests, self: Any, req: Any, *args: Any, **kwargs: Any
) -> None:
    if req.lora_id is not None and req.beam_group is not None:
        _abort(self, req, Failure(NOT_SUPPORTED, "beam search with an adapter: not supported with the LoRA server yet"))
        return
    requests.add(req)
    original(req, *args, **kwargs)


@ours(_requests)
def _can_schedule(original: Any, requests: AdapterRequests, self: Any, req: Any, running_loras: object) -> bool:
    """Pass over a request that is not ready: it takes no KV blocks, and others go first."""
    return requests.is_ready(req)


@ours(_requests)
def _get_next_batch_to_run(original: Any, requests: AdapterRequests, self: Any, *args: Any, **kwargs: Any) -> Any:
    failed = {id(one) for one in requests.failed()}
    ended = [one for one in self.waiting_queue if id(one) in failed]
    self.waiting_queue = [one for one in self.waiting_queue if id(one) not in failed]
    for one in ended:
        _abort(self, one, requests.forget(one))
    plan = original(*args, **kwargs)
    running = [*plan.running_batch.reqs, *(plan.batch_to_run.reqs if plan.batch_to_run else ())]
    chunked = [] if self.chunked_req is None else [self.chunked_req]
    requests.keep([*self.waiting_queue, *running, *chunked])
    requests.leases.expect(one.rid for one in self.waiting_queue)
    if plan.batch_to_run is None and requests.leases.num_waiting:
        time.sleep(IDLE_SECONDS)  # SGLang would ask again at once
    return plan


@ours(_requests)
def _run_batch(original: Any, requests: AdapterRequests, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    began = time.monotonic()
    requests.plan(batch)
    try:
        return original(batch, *args, **kwargs)
    finally:
        requests.end(sum(requests.manager.rows[1]), began)


@ours(_requests)
def _process_batch_result(original: Any, requests: AdapterRequests, self: Any, batch: Any, result: Any) -> None:
    """Take requests whose part of the step is void off the batch, with all that their KV cache has of it."""
    void = requests.failed_in(batch.reqs)
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
    for request in void:
        if _failure_of(requests.leases.state(request.rid)) is not None:
            _abort(self, request, requests.forget(request))
        else:
            self._add_request_to_queue(request, is_retracted=True)


def _abort(scheduler: Any, request: Any, failure: Failure | None) -> None:
    """End a request that is in no batch, with an error that names the reason."""
    assert failure is not None
    status = HTTPStatus.BAD_REQUEST if failure.code in BAD_REQUESTS else status_of(failure)
    reason: Mapping[str, Any] = {"type": "abort", "message": failure.message, "status_code": status, "err_type": None}
    scheduler._release_aborted_request(request)
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=reason), request)


@ours(_requests)
def _release_host_resources(original: Any, requests: AdapterRequests, self: Any) -> None:
    requests.leases.close()
    requests.manager.close()
    original()

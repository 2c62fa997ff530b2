"""Hooks of the scheduler: requests hold adapters, steps carry plans, failures end requests or compute them again.

SGLang's scheduler and model runner are one process. With tensor parallelism every rank has both, and all schedulers
must come to the same batches: rank 0 alone asks the server, and the others learn from it which requests are ready, the
step's plan, and what failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NamedTuple

import structlog
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req
from sglang.srt.runtime_context import get_parallel

from client_connector.serving.http import status_of
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.plan import NO_PLAN, RETRY, Failure, StepPlan
from client_connector.serving.ranks import RankGroup
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


class Readiness(NamedTuple):
    """Rank 0's word on a waiting request: with a `failure` it ends, else it may be scheduled, with this version of its
    adapter, which acts from position `start` on."""

    version: str
    start: int
    failure: Failure | None


class ScheduledAdapters:
    """A scheduler's requests that named an adapter, the same on each rank; one thread, the scheduler's."""

    def __init__(self, leases: AdapterLeases | None, manager: SglangLoRAManager, ranks: RankGroup) -> None:
        """`leases`: what each request holds, on rank 0 alone."""
        self.leases, self.manager, self._ranks = leases, manager, ranks
        self._requests: dict[str, Any] = {}  # by SGLang's rid
        self._decided: dict[str, Readiness] = {}  # of waiting requests; those that wait on have none
        self._failures: dict[str, Failure] = {}  # of the step that was computed last
        self._is_planned = False  # whether that step has rows with adapters
        self._complain = Repeats(log.error)

    def add(self, request: Any) -> None:
        """Ask for a new request's adapter; release the adapter of a preempted request."""
        if self._has(request):
            if self.leases is not None:
                self.leases.pause(request.rid)
        elif request.lora_id is not None and (request.to_finish is not None or request.finished()):
            request.skip_radix_cache_insert = True  # SGLang ends it after a pass that has no adapter
        elif request.lora_id is not None:
            self._requests[request.rid] = request
            if self.leases is not None:
                name = AdapterId.parse(request.lora_id).name
                self.leases.hold(request.rid, name, list(request.origin_input_ids))

    def decide(self, waiting: Sequence[Any]) -> list[tuple[Any, Failure]]:
        """Learn which waiting requests may be scheduled now; return those that end, each with the reason."""
        ours = {one.rid: one for one in waiting if self._has(one)}
        known = {name: one for name, one in self._decided.items() if name in ours}
        news = self._ranks.from_first(lambda: _news(self.leases, ours, known)) if ours else {}
        self._decided = {name: one for name, one in (known | news).items() if one is not None}
        return [(ours[name], one.failure) for name, one in self._decided.items() if one.failure is not None]

    def is_ready(self, request: Any) -> bool:
        """Return whether a request may be scheduled; its KV cache is its adapter's version's from then on."""
        if not self._has(request):
            return True
        decided = self._decided.get(request.rid)
        if decided is None:
            return False
        before = request.lora_id
        now = str(AdapterId.parse(before)._replace(version=decided.version, start=decided.start))
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
        ours = [request.rid for request in batch.reqs if self._has(request)]
        plan = self._ranks.from_first(lambda: _plan(self.leases, ours)) if ours else NO_PLAN
        self.manager.expect(plan, names, counts, computed)
        self._is_planned = bool(plan.rows)
        self._failures = {name: Failure(RETRY, "") for name in ours if name not in plan.rows}

    def end(self, tokens: int, began: float) -> None:
        """End the step; its failures are known."""
        failures = self.manager.end()
        if self._is_planned:
            self._failures |= self._ranks.agree(failures)
        if self.leases is not None:
            self.leases.pace.passed(tokens, began, time.monotonic())

    def settle(self, requests: Sequence[Any]) -> tuple[list[Any], Mapping[str, Failure]]:
        """Take note of the step's failures; return the requests for which it is void, and why some of them end."""
        if not self._failures:
            return [], {}
        ended = self._ranks.from_first(lambda: _ended(self.leases, self._failures))
        return [one for one in requests if one.rid in self._failures and not one.finished()], ended

    def forget(self, request: Any, failure: Failure) -> None:
        """Forget a request that ends with an error."""
        self._release(request.rid)
        if self._ranks.is_first:
            said = {"request": request.rid, "code": failure.code, "error": failure.message}
            self._complain(failure.code, "request failed", **said)

    def keep(self, requests: Sequence[Any]) -> None:
        """Release the adapters of all requests but these; the others have ended."""
        alive = {id(request) for request in requests}
        for name in [name for name, request in self._requests.items() if id(request) not in alive]:
            self._release(name)

    def look_ahead(self, waiting: Sequence[Any], is_idle: bool) -> None:
        """Prefetch for waiting requests. An idle scheduler rests a little: SGLang would ask again at once."""
        if self.leases is not None:
            self.leases.expect(one.rid for one in waiting)
            if is_idle and self.leases.num_waiting:
                time.sleep(IDLE_SECONDS)

    def close(self) -> None:
        """Leave the server."""
        if self.leases is not None:
            self.leases.close()
        self.manager.close()

    def _has(self, request: Any) -> bool:
        return self._requests.get(request.rid) is request  # a rid may be used again

    def _release(self, name: str) -> None:
        if self.leases is not None:
            self.leases.release(name)
        del self._requests[name]


# -- what rank 0 alone knows


def _news(
    leases: AdapterLeases | None, waiting: Iterable[str], known: Mapping[str, Readiness]
) -> dict[str, Readiness | None]:
    """Return the readiness of waiting requests where it differs from what is known; None: the request waits again."""
    assert leases is not None
    now = {name: _readiness(leases, name) for name in waiting}
    return {name: decided for name, decided in now.items() if decided != known.get(name)}


def _readiness(leases: AdapterLeases, name: str) -> Readiness | None:
    """Judge a waiting request; None: it waits on, and a preempted one's adapter is asked for again."""
    is_ready, state = leases.is_ready(name), leases.state(name)  # in this order: what is ready has its version
    failure = _failure_in(state)
    return Readiness(state.version, state.start, failure) if state is not None and (failure or is_ready) else None


def _failure_in(state: RequestState | None) -> Failure | None:
    """Return why a request ends; also where the base model would answer it: SGLang's answers cannot say that."""
    return state.failure if state is not None and state.phase in (Phase.FAILED, Phase.BASE_MODEL) else None


def _plan(leases: AdapterLeases | None, names: Sequence[str]) -> StepPlan:
    assert leases is not None
    return leases.plan(names)


def _ended(leases: AdapterLeases | None, failures: Mapping[str, Failure]) -> dict[str, Failure]:
    """Apply failures of a step; return those requests that end, each with the reason."""
    assert leases is not None
    states = {name: leases.fail_step(name, failure) for name, failure in failures.items()}
    return {name: failure for name, state in states.items() if (failure := _failure_in(state)) is not None}


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
        ranks, leases = RankGroup(get_parallel().tp_group.cpu_group), None
        if ranks.is_first:
            names = base_names(server_args.served_model_name or server_args.model_path, server_args.model_path)
            leases = AdapterLeases(replace(found, served_names=names), _tokenizer_of(self))
        setattr(self, ADAPTERS, ScheduledAdapters(leases, manager, ranks))

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
    ended = adapters.decide(self.waiting_queue)
    gone = {id(one) for one, _ in ended}
    self.waiting_queue = [one for one in self.waiting_queue if id(one) not in gone]
    for one, failure in ended:
        _abort(self, one, failure)
    plan = original(*args, **kwargs)
    running = [*plan.running_batch.reqs, *(plan.batch_to_run.reqs if plan.batch_to_run else ())]
    chunked = [] if self.chunked_req is None else [self.chunked_req]
    adapters.keep([*self.waiting_queue, *running, *chunked])
    adapters.look_ahead(self.waiting_queue, is_idle=plan.batch_to_run is None)
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
    """Remove each request with a void result from the batch, free its KV cache, then queue it again or abort it."""
    void, ended = adapters.settle(batch.reqs)
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
        if request.rid in ended:
            _abort(self, request, ended[request.rid])
        else:
            self._add_request_to_queue(request, is_retracted=True)


def _abort(scheduler: Any, request: Any, failure: Failure) -> None:
    """End a request that is in no batch, with an error that names the reason."""
    getattr(scheduler, ADAPTERS).forget(request, failure)
    status = HTTPStatus.BAD_REQUEST if failure.code == "not_invoked" else status_of(failure)
    reason: Mapping[str, Any] = {"type": "abort", "message": failure.message, "status_code": status, "err_type": None}
    scheduler._release_aborted_request(request)
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=reason), request)


@ours(_adapters)
def _release_host_resources(original: Any, adapters: ScheduledAdapters, self: Any) -> None:
    adapters.close()
    original()

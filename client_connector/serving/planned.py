"""The forward pass of a serving engine's worker: its rows and adapters come with the scheduler's plan.

    forward.receive(plan); forward.begin(...)            once per forward pass
        step = forward.start_dense(site, x, ...)         before the engine's own GEMM
        forward.add(step, [(y, 0)])                      after it
    failures = forward.end()

This is the whole interface between a serving engine and the wire: here the host has an exchange per site, in
`launched` kernels send and wait by themselves.
A failure never raises into the engine: the rest of the pass runs without deltas, and `end` names
the requests whose results are void.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import structlog
import torch
from typing_extensions import override

from client_connector.client import Client
from client_connector.exchange import Exchange, Started
from client_connector.forward_pass import ForwardPass
from client_connector.routing import Batch, Message
from client_connector.serving.plan import NO_PLAN, RETRY, Assigned, Failure, StepPlan
from client_connector.serving.rejoin import Rejoin
from client_connector.serving.staging import Staging, add_rows
from lora_server.errors import AdapterError, LoraServerError, ShardUnavailableError, UnknownAdapterError
from lora_server.logs import Repeats
from lora_server.spec import Site
from lora_server.timings import Timings
from lora_server.transport.session import Held, Proof, Session

Part = tuple[torch.Tensor, int]  # columns of an engine's result, and the first of the answer's that belong there
log = structlog.get_logger()


class PlannedPass(ForwardPass):
    """One engine worker's; one thread."""

    def __init__(
        self,
        client: Client,
        ready: Callable[[], bool] = lambda: False,
        outage_seconds: float = Timings.outage_step,
    ) -> None:
        """`ready` says, without waiting, whether the server is up; `outage_seconds`: that the first step of an outage
        waits."""
        self._outage_seconds = outage_seconds
        super().__init__(client)
        self._ready = ready
        self._known: dict[int, Held] = {}
        self._assigned: dict[str, Assigned] = {}
        self._failures: dict[str, Failure] = {}
        self._plan = NO_PLAN
        self._server = client.terms.server
        self._lender: tuple[Session, Proof] | None = None  # under which session, from whom it borrows
        self._rejoin = Rejoin(client.recover, "worker")
        self._complain = Repeats(log.warning)
        self._staging = Staging()

    # -- once per forward pass

    def receive(self, plan: StepPlan) -> None:
        """Every step's plan, also where there is nothing to compute."""
        self._plan, self._failures = plan, {}
        self._complain.flush()
        self._learn(plan)

    def begin(self, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int]) -> None:
        """`counts` rows of each request lie together, in this order, from position `computed` on."""
        plan, self._plan = self._plan, NO_PLAN  # a pass that no scheduler planned (warm-up) has none
        self.batch, self._assigned = None, plan.rows
        if not plan.rows:
            return
        try:
            runs, decode = self._runs(plan, req_ids, counts, computed)
            if runs:
                self._join_run_of(plan.server)
                self._borrow(plan.holder)
            self.batch = Batch.of_runs(runs, decode)
        except LoraServerError as error:
            self.failed(error, None)

    def end(self) -> dict[str, Failure]:
        """The requests whose adapters did not act as they should in this pass."""
        self.batch = None
        return self._failures

    def rehearse(self, with_adapters: bool) -> AbstractContextManager[None]:
        """Around an engine's passes without requests, in which it warms up, and captures graphs.

        `with_adapters`: that serve steps with adapters.
        """
        return nullcontext()

    def close(self) -> None:
        """Leave the server."""
        self._rejoin.close()
        self.client.close()

    @override
    def staged(self, x: torch.Tensor) -> torch.Tensor:
        return self._staging.host(x)

    @override
    def failed(self, error: LoraServerError, exchange: Exchange | None) -> None:
        """The pass goes on without deltas; its requests are void."""
        self.batch = None
        self._complain(error.code, "adapter rows failed", requests=len(self._assigned), error=str(error))
        self._failures = {req_id: Failure.of(error) for req_id in self._assigned}
        if exchange is not None and isinstance(error, AdapterError):
            self._spare_the_innocent(exchange.site, lambda handle: self.client.probe(exchange, handle))

    # -- at a site

    def add(self, step: Started | None, parts: Sequence[Part], per_entry: bool = False) -> None:
        """The answer to what was started, added to an engine's result: to a row per token, or per token and expert."""

        def add(message: Message, delta: torch.Tensor) -> None:
            for y, begin in parts:
                add_rows(y, message.entries_N if per_entry else message.rows_M, delta[:, begin : begin + y.shape[1]])

        self.finish(step, add)

    # -- what the plan says

    def _learn(self, plan: StepPlan) -> None:
        if plan.server and plan.server != self._server:
            self._known, self._server = {}, plan.server
        for handle in plan.gone:
            self._known.pop(handle, None)
        self._known |= {held.handle: held for held in plan.new}

    def _runs(
        self, plan: StepPlan, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int]
    ) -> tuple[list[tuple[Held, int, int]], bool]:
        runs: list[tuple[Held, int, int]] = []
        first, decode = 0, True
        for req_id, count, position in zip(req_ids, counts, computed, strict=True):
            assigned = plan.rows.get(req_id)
            if assigned is not None:
                skipped = min(max(assigned.start - int(position), 0), int(count))
                runs.append((self._held(assigned.handle), first + skipped, int(count) - skipped))
                decode = decode and count == 1
            first += int(count)
        return [run for run in runs if run[2]], decode

    def _held(self, handle: int) -> Held:
        if handle not in self._known:
            raise UnknownAdapterError(f"handle {handle}: this worker was not told of it; send the request again")
        return self._known[handle]

    # -- failures

    def _join_run_of(self, server: str) -> None:
        """Handles mean something only to the run of the server that gave them."""
        if self.client.terms.server != server:
            self.client.give_up(ShardUnavailableError("the server was restarted"))
        lost = self.client.lost()
        if lost is not None:
            # a run that the scheduler joined is up; otherwise only the first step of an outage waits, and a little
            up = self.client.terms.server != server or self._ready()
            seconds = self.client.timeout_seconds if up else 0.0 if self._rejoin.waited else self._outage_seconds
            if not self._rejoin.wait(seconds):
                raise lost
        if self.client.terms.server != server:
            raise ShardUnavailableError(
                f"server: this worker is joined to run {self.client.terms.server}, the step was planned for "
                f"run {server}: it restarted in between; send the request again"
            )

    def _borrow(self, holder: Proof | None) -> None:
        """The scheduler holds the adapters, under a lease of its own."""
        if holder is None or self._lender == (self.client.session, holder):
            return
        self.client.session.borrow(holder)
        self._lender = self.client.session, holder

    def _spare_the_innocent(self, site: Site, probe: Callable[[int], None]) -> None:
        """One bad adapter voids a message for all; ask for each alone, and let the good ones' requests start over."""
        errors: dict[int, LoraServerError] = {}
        for held in {assigned.handle: self._known[assigned.handle] for assigned in self._assigned.values()}.values():
            try:
                if site in held.sites:
                    probe(held.handle)
            except AdapterError as error:
                errors[held.handle] = error
            except LoraServerError:
                return  # the server is going away: all have failed
        if errors:
            for req_id, assigned in self._assigned.items():
                own = errors.get(assigned.handle)
                self._failures[req_id] = Failure(RETRY, "") if own is None else Failure.of(own)

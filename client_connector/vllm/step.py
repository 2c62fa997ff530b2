"""A worker's forward pass: which rows have which adapter, and what goes to the server at each site.

    step.receive(plan); step.begin(...)                  once per forward pass
        pending = step.start(site, messages, ...)        before the engine's own GEMM
        step.finish(pending, add)                        after it
    failures = step.end()

This is the whole interface between an engine and the wire, so that kernels which send and wait by
themselves can take it over: slots are static memory, and a site's windows never change.
A failure never raises into the engine: the rest of the pass runs without deltas, and `end` names
the requests whose results are void.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from client_connector.client import Client
from client_connector.context import Context
from client_connector.exchange import Exchange, Window
from client_connector.routing import Batch, Message
from client_connector.vllm.plan import NO_PLAN, RETRY, Assigned, Failure, StepPlan
from client_connector.vllm.rejoin import Rejoin
from client_connector.vllm.staging import Staging
from lora_server.errors import AdapterError, LoraServerError, ShardUnavailableError, UnknownAdapterError
from lora_server.spec import Site
from lora_server.transport.session import Held

OUTAGE_SECONDS = 1.0
log = structlog.get_logger()


class Step:
    """One engine worker's; one thread. `active` is False where no row has an adapter: then nothing is done."""

    def __init__(self, client: Client, ready: Callable[[], bool] = lambda: False) -> None:
        """`ready` says, without waiting, whether the server is up."""
        self.client, self.context, self._ready = client, Context(client), ready
        self.active = False
        self._known: dict[int, Held] = {}
        self._assigned: dict[str, Assigned] = {}
        self._failures: dict[str, Failure] = {}
        self._plan = NO_PLAN
        self._server = client.terms.server
        self._rejoin = Rejoin(client.recover)
        self._staging = Staging()

    # -- once per forward pass

    def receive(self, plan: StepPlan) -> None:
        """Every step's plan, also where there is nothing to compute."""
        self._plan, self._failures = plan, {}
        self._learn(plan)

    def begin(self, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int]) -> None:
        """`counts` rows of each request lie together, in this order, from position `computed` on."""
        plan, self._plan = self._plan, NO_PLAN  # a pass that no scheduler planned (warm-up) has none
        self.context.batch, self.active = None, False
        self._assigned = plan.rows
        if not plan.rows:
            return
        try:
            runs, decode = self._runs(plan, req_ids, counts, computed)
            if runs:
                self._join_run_of(plan.server)
            self.context.batch = Batch.of_runs(runs, decode)
        except LoraServerError as error:
            self._fail(plan.rows, error)
        self.active = self.context.batch is not None

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

    def _join_run_of(self, server: str) -> None:
        """Handles mean something only to the run of the server that gave them."""
        if self.client.terms.server != server:
            self.client.broken = self.client.broken or ShardUnavailableError("the server was restarted")
        lost = self.client.lost()
        if lost is not None:
            # a run that the scheduler joined is up; otherwise only the first step of an outage waits, and a little
            up = self.client.terms.server != server or self._ready()
            seconds = self.client.timeout_seconds if up else 0.0 if self._rejoin.waited else OUTAGE_SECONDS
            if not self._rejoin.wait(seconds):
                raise lost
        if self.client.terms.server != server:
            raise ShardUnavailableError(
                f"server: this worker is joined to run {self.client.terms.server}, the step was planned for "
                f"run {server}: it restarted in between; send the request again"
            )

    def end(self) -> dict[str, Failure]:
        """The requests whose adapters did not act as they should in this pass."""
        self.context.batch, self.active = None, False
        return self._failures

    def close(self) -> None:
        """Leave the server."""
        self._rejoin.close()
        self.client.close()

    # -- at a site

    def start_dense(self, site: Site, x_TK: torch.Tensor, window: Window) -> Exchange | None:
        """Push the rows of a site with one weight for all rows."""
        return self._guard(lambda: self.context.start_dense(site, self._staging.host(x_TK), window))

    def start_experts(
        self, site: Site, experts_Tk: torch.Tensor, x: torch.Tensor, window: Window, **how: Any
    ) -> Exchange | None:
        """Push the rows of an expert site; `how`: see Client.start. Experts E and beyond are not here."""

        def start() -> Exchange | None:
            messages = self.context.route_experts(site, experts_Tk)
            batch = self.context.batch
            if not messages or batch is None:
                return None
            x_host = self._staging.host(x)
            return self.client.start(site, messages, x_host, decode=batch.decode, window=window, **how)

        return self._guard(start)

    def finish(self, exchange: Exchange, add: Callable[[Message, torch.Tensor], None]) -> None:
        """Wait and add."""
        if not self.active:
            return
        try:
            exchange.finish(add)
        except AdapterError as error:
            self._fail(self._assigned, error)
            self._spare_the_innocent(exchange)
        except LoraServerError as error:
            self._fail(self._assigned, error)

    def _guard(self, action: Callable[[], Exchange | None]) -> Exchange | None:
        if not self.active:
            return None
        try:
            return action()
        except LoraServerError as error:
            self._fail(self._assigned, error)
            return None

    def _fail(self, rows: dict[str, Assigned], error: LoraServerError) -> None:
        self.context.batch, self.active = None, False
        log.warning("adapter rows failed", requests=len(rows), error=str(error))
        self._failures = {req_id: Failure.of(error) for req_id in rows}

    def _spare_the_innocent(self, exchange: Exchange) -> None:
        """One bad adapter voids a message for all; ask for each alone, and let the good ones' requests start over."""
        errors: dict[int, LoraServerError] = {}
        for held in {assigned.handle: self._known[assigned.handle] for assigned in self._assigned.values()}.values():
            try:
                if exchange.site in held.sites:
                    exchange.probe(held.handle)
            except AdapterError as error:
                errors[held.handle] = error
            except LoraServerError:
                return  # the server is going away: all have failed
        if errors:
            for req_id, assigned in self._assigned.items():
                own = errors.get(assigned.handle)
                self._failures[req_id] = Failure(RETRY, "") if own is None else Failure.of(own)

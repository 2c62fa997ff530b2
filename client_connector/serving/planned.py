"""The forward pass of a serving engine's worker: its rows and adapters come with the scheduler's plan.

    forward.receive(plan); forward.begin(...)            once per forward pass
        forward.sites                                    at each site, see `sites`
    failures = forward.end()

This is the whole interface between a serving engine and the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from client_connector.client import Client
from client_connector.merged import row_segments
from client_connector.reconnect import Reconnector
from client_connector.routing import Batch, Run
from client_connector.serving.plan import NO_PLAN, Failure, StepPlan
from client_connector.serving.sites import HostSites, PassFailures, SiteSteps
from client_connector.session import Session
from lora_server.errors import LoraServerError, ShardUnavailableError, UnknownAdapterError
from lora_server.timings import Timings
from lora_server.wire.terms import Held, Proof

MakeSites = Callable[[Client, PassFailures], SiteSteps]


class WorkerLease:
    """A worker's session: joined again when it is lost, for the run of the server that the scheduler is joined to."""

    def __init__(self, client: Client, ready: Callable[[], bool], outage_seconds: float) -> None:
        self.client, self._ready, self._outage_seconds = client, ready, outage_seconds
        self._lender: tuple[Session, Proof] | None = None  # the session that borrows, and the lender's proof
        self._reconnector = Reconnector(client.recover, "worker")

    def follow(self, server: str, holder: Proof | None) -> None:
        """Ensure that this worker is joined to a run of the server, and borrow what the scheduler holds there.

        Raises ShardUnavailableError while the server is away. Only the first step of an outage waits, and a little; if
        the server is up, so long as joining takes.
        """
        if self.client.terms.server != server:
            self.client.give_up(ShardUnavailableError("the server was restarted"))
        lost = self.client.lost()
        if lost is not None:
            up = self.client.terms.server != server or self._ready()
            if not self._reconnector.wait(self.client.timeout_seconds if up else self._outage_seconds, once=not up):
                raise lost
        if self.client.terms.server != server:
            raise ShardUnavailableError(
                f"server: this worker is joined to run {self.client.terms.server}, the step was planned for "
                f"run {server}: it restarted in between; send the request again"
            )
        if holder is not None and self._lender != (self.client.session, holder):
            self.client.session.borrow(holder)
            self._lender = self.client.session, holder

    def close(self) -> None:
        """Leave the server."""
        self._reconnector.close()
        self.client.close()


class PlannedPass:
    """One engine worker's; one thread. `sites` is what its layers call."""

    def __init__(
        self,
        client: Client,
        ready: Callable[[], bool] = lambda: False,
        outage_seconds: float = Timings.outage_step,
        make_sites: MakeSites = HostSites,
    ) -> None:
        """`ready` says, without waiting, whether the server is up; `outage_seconds` bounds the wait of the first step
        of an outage."""
        self.client = client
        self.failures = PassFailures()
        self.sites = make_sites(client, self.failures)
        self._lease = WorkerLease(client, ready, outage_seconds)
        self._known: dict[int, Held] = {}  # of one run of the server
        self._server = client.terms.server
        self._plan = NO_PLAN

    def receive(self, plan: StepPlan) -> None:
        """Take every step's plan, also that of a step with nothing to compute."""
        self._plan = plan
        self.failures.clear()
        if plan.server and plan.server != self._server:
            self._known, self._server = {}, plan.server
        for handle in plan.gone:
            self._known.pop(handle, None)
        self._known |= {held.handle: held for held in plan.new}

    def begin(self, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int]) -> None:
        """Begin a pass: `counts` rows of each request lie together, in this order, from position `computed` on."""
        plan, self._plan = self._plan, NO_PLAN  # a pass that no scheduler planned (warm-up) has none
        self.failures.watch(plan.rows, self._known)
        batch = None
        if plan.rows:
            try:
                runs, decode = self._runs(plan, req_ids, counts, computed)
                if runs:
                    self._lease.follow(plan.server, plan.holder)
                batch = Batch.of(runs, decode)
            except LoraServerError as error:
                self.failures.fail(error)
        self.sites.begin(batch)

    def end(self) -> dict[str, Failure]:
        """End the pass; return the requests that did not get their adapter's delta, each with its failure."""
        self.sites.end()
        return self.failures.by_request

    def rehearse(self, with_adapters: bool) -> AbstractContextManager[None]:
        """See SiteSteps.rehearse."""
        return self.sites.rehearse(with_adapters)

    def close(self) -> None:
        """Leave the server."""
        self.sites.close()
        self._lease.close()

    def _runs(
        self, plan: StepPlan, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int]
    ) -> tuple[list[Run], bool]:
        runs: list[Run] = []
        merged = self._held(plan.merged) if plan.merged else None
        first, decode = 0, True
        for req_id, count, position in zip(req_ids, counts, computed, strict=True):
            assigned = plan.rows.get(req_id)
            if assigned is not None:
                skipped = min(max(assigned.start - int(position), 0), int(count))
                held = None if assigned.is_base else self._held(assigned.handle)
                runs.append(Run(row_segments(None, merged), first, skipped))
                runs.append(Run(row_segments(held, merged), first + skipped, int(count) - skipped))
                decode = decode and count == 1
            first += int(count)
        return [run for run in runs if run.rows and run.segments], decode

    def _held(self, handle: int) -> Held:
        if handle not in self._known:
            raise UnknownAdapterError(f"handle {handle}: this worker was not told of it; send the request again")
        return self._known[handle]

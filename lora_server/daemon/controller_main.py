"""The controller's process, started by the node of rank 0.

It holds no state that its shards or its database do not have too, so it may be killed at any time: the node restarts
it, it reads their state again, and steps go on meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from lora_server.access.gate import Gate
from lora_server.access.tls import certificate_of
from lora_server.adapters import find_adapters, is_adapter
from lora_server.adapters.scan import escaped, is_text
from lora_server.address import Address
from lora_server.config import ProcessConfig
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.adapters.resolver import Resolver
from lora_server.control.adapters.watch import DirectoryWatch
from lora_server.control.controller import Controller
from lora_server.control.events.keys import ReaderKeys
from lora_server.control.events.log import EventLog
from lora_server.control.events.publisher import AdviceNews, EventPublisher
from lora_server.control.events.sockets import EventSocket, IpcEvents, TcpEvents
from lora_server.control.http import page
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.leases import Leases
from lora_server.control.members.nodes import NodeTable
from lora_server.control.reports.metrics import ControllerCollector
from lora_server.control.resize import ResizeSupport
from lora_server.control.rpc.events import EventsService
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.daemon.child_main import open_fetcher, run_child
from lora_server.daemon.guard import cannot_listen
from lora_server.daemon.heap import give_back_large
from lora_server.daemon.http import listen_http
from lora_server.daemon.processes import Up, say
from lora_server.errors import ConfigError
from lora_server.merge.checkpoint import base_weights
from lora_server.placement import Layout
from lora_server.registry.database import Database, database_of
from lora_server.registry.layouts import Layouts
from lora_server.registry.versions import Ledger
from lora_server.slo import NO_CLASSES
from lora_server.sources.copies import Copies
from lora_server.spec import ModelSpec

COPIES = "adapters"  # in --data-dir
EVENTS = "events.sock"  # in the run directory
log = structlog.get_logger()


class ControllerProcess:
    """Controller, gRPC and HTTP, put together."""

    def __init__(self, config: ProcessConfig, database: Database | None = None, leader_epoch: int = 0) -> None:
        """`database`, `leader_epoch`: of a controller that leads; without, the server's only controller opens its own
        database. Raises ConfigError for an address that cannot be had."""
        self.config, self._timings = config, config.timings
        self._stopping = threading.Event()
        self._stack = contextlib.ExitStack()
        self._found = self._find_adapters()
        self.database = database_of(config) if database is None else database
        self._stack.callback(self.database.close)
        spec, layouts = ModelSpec.from_json(config.spec_json), self._layouts()
        given = replace(Agreement.of(config, spec), base_weights=base_weights(config.base_model))
        agreement = given if config.why_fixed else self._placed(given, layouts)
        events = EventLog()
        self.controller = controller = Controller(
            agreement,
            Leases(config.lease_seconds, most_per_token=config.clients_per_token),
            config.restarted,
            config.require_all_adapters,
            config.max_active_adapters,
            open_fetcher(config, spec),
            Allowed.of(config),
            Ledger(self.database, config.spec_json),
            _copies(config, spec),
            config.timings,
            classes=config.classes or NO_CLASSES,
            events=events,
            resize=ResizeSupport(layouts, config.why_fixed),
            nodes=NodeTable(given, config.nodes),
        )
        controller.start.leader_epoch = leader_epoch
        self.gate = Gate(self.database, config.require_tokens, config.secret, config.timings.token_look)
        self._stack.callback(self.gate.close)
        self.gate.cache.on_change = self._end_revoked
        controller.adapters.sync.sends = not config.no_copy
        resolver = None
        if config.resolve:
            resolver = Resolver(config.resolve, again_seconds=config.timings.resolve_again)
            self._stack.callback(resolver.close)
        certificate = certificate_of(config)
        collector = ControllerCollector(controller, certificate)
        self.control: ControlServer | None = None
        pages = page.answers(controller, lambda name: self.gate.names.owner(name), events)
        self.http = listen_http(config, self._stack, self._not_ready, collector, pages, self.gate, certificate)
        try:
            door = Doorkeeper(config.secret, config.nodes > 1 and config.join_token_file is None)
            tls = certificate.grpc() if certificate is not None else None
            listen, reflection = str(config.listen), config.grpc_reflection
            control = ControlServer(
                controller,
                listen,
                door,
                reflection,
                self.gate,
                tls,
                held=True,
                resolver=resolver,
                events=self._publish(events),
            )
        except RuntimeError as error:
            raise cannot_listen("--listen", config.listen, OSError("gRPC could not bind it")) from error
        self.control = control
        collector.refusals = control.refused
        self._stack.callback(control.close, config.timings.grace)
        self._stack.callback(controller.shards.close)
        self._stack.callback(controller.nodes.close)

    def _layouts(self) -> Layouts:
        config = self.config
        server = str(Address(config.advertise, config.listen.port))
        if config.has_standby and config.controller is not None:
            server = ",".join(sorted(map(str, config.controller.addresses)))  # the same, whichever of the two leads
        return Layouts(self.database, server, config.layout)

    def _placed(self, given: Agreement, layouts: Layouts) -> Agreement:
        """Return what to serve: the layout of the flags, or the one that the server was resized to."""
        placed = layouts.current()
        if placed.layout != self.config.layout:
            log.info("serving the layout that the server was resized to", given=self.config.layout, **placed._asdict())
        return replace(given, layout=Layout.parse(placed.layout, given.layout.replicas), generation=placed.generation)

    def _publish(self, events: EventLog) -> EventsService:
        """Publish events until the process stops, unless `--events off`. Raises ConfigError."""
        if self.config.events == "off":
            return EventsService(events, "")
        socket: EventSocket
        keys, address = None, self.config.events_address
        if address is None:
            socket = IpcEvents(f"ipc://{self.config.run_dir / EVENTS}")
        else:
            keys = ReaderKeys()
            self.gate.cache.on_change = partial(self._end_revoked, keys)
            try:
                socket = TcpEvents(address, keys, events.introduce, held=True)
            except OSError as error:
                raise cannot_listen("--events", address, error) from error
        events.viewers = lambda name: self.gate.names.viewers(name)
        advice = AdviceNews(self.controller, events)
        self._stack.callback(EventPublisher(events, socket, advice.note, self._timings).close)
        return EventsService(events, socket.endpoint, keys)

    def _find_adapters(self) -> dict[str, Path]:
        """Return adapters of the start-up directory; only a restarted controller tolerates that it is gone."""
        if self.config.adapters is None:
            return {}
        try:
            return find_adapters(self.config.adapters)
        except ConfigError as error:
            if not self.config.restarted:
                raise
            log.error("the start-up directory is gone", reason=str(error))
            return {}

    def run(self) -> int:
        """Serve until stopped."""
        control = self.control
        assert control is not None
        say(Up())
        registering = threading.Thread(target=self._register, daemon=True, name="register")
        registering.start()
        following = threading.Thread(target=self._follow_registry, daemon=True, name="registry")
        following.start()
        swept = time.monotonic()
        while not self._stopping.wait(self._timings.sweep):
            late, swept = time.monotonic() - swept - self._timings.sweep, time.monotonic()
            try:
                self._sweep(control, late)
            except Exception:
                log.exception("sweep failed; trying again")
        self._stack.close()
        registering.join(self._timings.grace)
        following.join(self._timings.grace)
        return 0

    def _sweep(self, control: ControlServer, late: float) -> None:
        stalled, stall, sweep = control.stalled(), self._timings.stall, self._timings.sweep
        if stall < stalled <= stall + sweep:
            log.warning("controller stalled; lease expiry suspended")
        if max(stalled, late) > stall:
            self.controller.clients.leases.excuse(sweep + max(0.0, late))
        else:
            self.controller.shards.end_silent(self._timings.twin_silence)
        self.controller.clients.expire()
        self.controller.arrivals.settle()
        self.controller.adapters.admission.cut_off()
        self.controller.adapters.admission.tell_ended()
        self.controller.adapters.admission.admit()
        control.set_ready(not self._not_ready())

    def _end_revoked(self, keys: ReaderKeys | None = None) -> None:
        """End the leases, and readers of events, with a token that was revoked or has expired."""
        if keys is not None:
            keys.void_where(lambda who: not self.gate.is_good(who.tenant, who.token))
        self.controller.clients.end_where(
            lambda lease: not self.gate.is_good(*lease.engine.credentials), "its token was revoked"
        )

    def _not_ready(self) -> str:
        stalled = self.control.stalled() if self.control is not None else 0.0
        busy = f"too busy to hear clients for {stalled:.1f} s" if stalled > self._timings.stall else ""
        return self.controller.not_ready() or busy

    def stop(self) -> None:
        """Stop `run`, from any thread."""
        self.controller.shards.closed = True  # what leaves from now on is no loss
        self._stopping.set()

    def _register(self) -> None:
        """Register the start-up directory once every shard has reported what it keeps; with --watch, follow it."""
        self._name_ignored()
        while not self.controller.start.settled.wait(self._timings.sweep):
            if self._stopping.is_set():
                return
        start, source, directory = self.controller.start, self.controller.adapters.directory, self.config.adapters
        if not self.config.watch or directory is None:
            gc.disable()  # records stay, and commands about them until shards answer: collections would walk them all
            try:
                source.register(self._found)
            finally:
                gc.enable()
            self._registered()
            return
        watch = DirectoryWatch(source, start, directory, self._stopping, self._timings)
        if not start.registered.is_set():
            watch.run(start.registered.is_set)
            self._registered()
        watch.run(self._stopping.is_set)

    def _follow_registry(self) -> None:
        """Apply changes of other servers that share the database, and delete unused copies from this disk."""
        adapters, said = self.controller.adapters, ""
        while not self._stopping.wait(self._timings.registry_look):
            try:
                if self.controller.start.settled.is_set() and self.database.shared:
                    adapters.peers.refresh()
                adapters.files.tidy()
                said = ""
            except Exception as error:
                if str(error) != said:
                    log.warning("cannot read the registry; trying again", reason=str(error))
                said = str(error)

    def _registered(self) -> None:
        catalog = self.controller.adapters.catalog
        gc.collect()  # or what is garbage now would stay, too
        gc.freeze()  # records stay: collections that walked all of them would stop calls for as long
        self.controller.arrivals.announce()
        log.info(
            "adapters registered", count=len(catalog.records()), refused=[one.name for one in catalog.refusals.listed()]
        )

    def _name_ignored(self) -> None:
        """Warn about everything in the start-up directory that is not served: it is probably a mistake."""
        directory = self.config.adapters
        if directory is None or not directory.is_dir():
            return
        children = [child.name for child in directory.iterdir() if child.is_dir()]
        unnamed = sorted(escaped(name) for name in children if not is_text(name))
        if unnamed and not self.config.watch:  # which says it itself, of each that comes
            log.warning("directories are skipped: their names are not UTF-8; rename them", names=unnamed)
        if ignored := sorted(set(filter(is_text, children)) - set(self._found)):
            log.warning("no adapters, or hidden or temporary; ignored", directories=ignored)
        if is_adapter(directory):
            log.warning("adapter files beside the adapters' directories; ignored", directory=str(directory))
        if not self._found:
            log.warning("no adapters in the start-up directory", directory=str(directory))


def _copies(config: ProcessConfig, spec: ModelSpec) -> Copies | None:
    """Return the store of adapters' copies; None with --no-copy, or where no adapter outlives the server."""
    if config.data_dir is None or config.no_copy:
        return None
    return Copies(config.data_dir.resolve() / COPIES, spec)


def main() -> None:
    """Entry point of the controller's process, after the fork."""
    give_back_large()
    run_child(ControllerProcess)

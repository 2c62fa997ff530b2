"""What names mean, kept for good: against a dictionary, in SQLite and in a real PostgreSQL; several that change it."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete, text

from lora_server.access.store import Store, Tenant
from lora_server.errors import AdapterExistsError, ConfigError, ServerUnavailableError
from lora_server.registry.database import Database, counters
from lora_server.registry.versions import EARLIER, HANDLES, Ledger, Seen, Version
from tests.support.postgres import DATABASES, database_of

MODEL = '{"name": "tiny"}'
NAMES = st.sampled_from(["law", "acme/law", "code"])


@pytest.fixture(scope="module", params=DATABASES)
def url(request, tmp_path_factory):
    with database_of(request.param, tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def ledger(url):
    database = Database(url)
    yield Ledger(database, MODEL)
    database.close()


def version(handle, name, digest):
    return Version(listed=True, pinned=False, added=1.0, record="{}", handle=handle, name=name, version=digest)


class LedgerMachine(RuleBasedStateMachine):
    """`history`: by name, the versions that it had, the one that it means first."""

    url = ""

    @initialize()
    def start(self):
        self.database = Database(self.url)
        self.ledger, self.history, self.handles = Ledger(self.database, MODEL), {}, iter(())
        for one in self.ledger.listed():
            self.ledger.remove(one.name)
        self.highest = 0

    def next_handle(self):
        handle = next(self.handles, None)
        if handle is None:
            self.handles = iter(self.ledger.take_handles())
            handle = next(self.handles)
        assert handle > self.highest, "no handle is given twice, whoever opens it again"
        self.highest = handle
        return handle

    @rule(name=NAMES, digest=st.integers(0, 11))
    def put(self, name, digest):
        history = self.history.get(name, [])
        new = version(self.next_handle(), name, f"v{digest}")
        if history and history[0].version == new.version:
            return
        self.ledger.list(new, history[0] if history else None)
        before = [one._replace(listed=False, pinned=False) for one in history if one.version != new.version]
        self.history[name] = [new, *before[:EARLIER]]

    @rule(name=NAMES)
    def add_what_is_taken(self, name):
        if name in self.history:
            with pytest.raises(AdapterExistsError, match="changed by another call meanwhile"):
                self.ledger.list(version(self.next_handle(), name, "other"))

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name, pinned):
        if name in self.history:
            self.history[name][0] = self.history[name][0]._replace(pinned=pinned)
            self.ledger.rewrite(self.history[name][0])

    @rule(name=NAMES)
    def remove(self, name):
        self.history.pop(name, None)
        self.ledger.remove(name)

    @rule()
    def reopen(self):
        self.database.close()
        self.database = Database(self.url)
        self.ledger, self.handles = Ledger(self.database, MODEL), iter(())

    @invariant()
    def holds(self):
        if hasattr(self, "ledger"):
            kept = {one.name: one for one in self.ledger.listed()}
            assert kept == {name: history[0] for name, history in self.history.items()}
            for name, history in self.history.items():
                assert self.ledger.of(name) == history

    def teardown(self):
        self.database.close()


def test_a_ledger_equals_a_dictionary(url):
    machine = type("Machine", (LedgerMachine,), {"url": url})
    limits = settings(max_examples=4, stateful_step_count=20, deadline=None, database=None)
    run_state_machine_as_test(machine, settings=limits)


def test_concurrent_servers_give_each_handle_and_name_once(url):
    """Two servers of one database, two threads each: every name is given once."""
    opened = [Database(url) for _ in range(2)]
    ledgers, handles, winners = [Ledger(one, MODEL) for one in opened], [], []

    def change(ledger, number):
        taken = ledger.take_handles()
        handles.extend(taken)
        for name in range(5):
            with contextlib.suppress(AdapterExistsError):
                ledger.list(version(taken[name], f"name-{name}", f"by-{number}"))
                winners.append(name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(change, ledgers * 2, range(4)))
    before = ledgers[0].changes()
    for name in range(5):
        ledgers[1].remove(f"name-{name}")
    assert ledgers[0].changes() == before + 5, "who looks sees that somebody changed it"
    for one in opened:
        one.close()
    assert sorted(winners) == list(range(5)) and len(set(handles)) == len(handles) == 4 * HANDLES


def test_a_database_of_an_earlier_release_gets_the_columns_that_it_lacks(url):
    """Its rows keep what they say, and a new column has its default."""
    database = Database(url)
    acme = Tenant("acme", weight=2.0, max_rate=5.0)
    Store(database).set_tenant(replace(acme, slo_class="gold"))
    database.write(lambda one: one.execute(text("ALTER TABLE tenants DROP COLUMN slo_class")))
    database.close()
    for expected in (acme, replace(acme, slo_class="gold")):
        database = Database(url)
        store = Store(database)
        assert store.tenant("acme") == expected and store.load().tenants["acme"] == expected
        store.set_tenant(replace(acme, slo_class="gold"))
        database.close()


def test_a_directory_is_remembered_with_its_pins(ledger):
    counter = itertools.count()
    read = [Seen(f"/adapters/{next(counter)}", "stamp", False, "{}") for _ in range(3)]
    ledger.see(read)
    ledger.pin_seen(read[0].uri, True)
    ledger.pin_seen("/adapters/new", True)
    seen = ledger.seen()
    assert {uri for uri, one in seen.items() if one.pinned} == {read[0].uri, "/adapters/new"}
    ledger.see([read[1]._replace(stamp="other")])
    assert (ledger.seen()[read[1].uri].stamp, ledger.seen()[read[0].uri].stamp) == ("other", "stamp")


def test_another_base_model_needs_another_registry(ledger, url):
    ledger.list(version(ledger.take_handles()[0], "mine", "v1"))
    database = Database(url)
    with pytest.raises(ConfigError, match="belongs to another base model"):
        Ledger(database, "another")
    for name in {one.name for one in ledger.all()}:  # other tests' too
        ledger.remove(name)
    if ledger.shared:
        with pytest.raises(ConfigError, match="belongs to another base model"):
            Ledger(database, "another")
        ledger.take_handles()
    else:  # a file has one server, which may begin with another base model
        Ledger(database, "another")
        Ledger(database, MODEL)
    database.close()


def test_of_several_base_models_that_start_at_once_one_is_kept(ledger, url):
    """What a write of the others would change stays as it is."""
    ledger.see([])
    databases, began, ended = [Database(url) for _ in range(4)], threading.Barrier(4), []
    databases[0].write(lambda connection: connection.execute(delete(counters).where(counters.c.name.like("model %"))))

    def start(number):
        began.wait(60)
        try:
            opened = Ledger(databases[number], f"model {number}")
            began.wait(60)
            opened.attempts.keep("law", f"by {number}")
        except ConfigError:
            began.wait(60)
            ended.append("refused at its start")
        except ServerUnavailableError as error:
            ended.append("refused" if "another base model" in str(error) else str(error))
        else:
            ended.append("kept")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))
    try:
        assert sorted(ended) == sorted(["kept", *["refused at its start" if ledger.shared else "refused"] * 3])
        with pytest.raises(ServerUnavailableError, match="another base model"):
            ledger.take_handles()
    finally:
        databases[0].checks.clear()
        databases[0].write(lambda one: one.execute(delete(counters).where(counters.c.name.like("model %"))))
        for database in databases:
            database.close()

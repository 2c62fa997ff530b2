"""What the database keeps of tokens, tenants, shared adapters and changes: however many, and whatever becomes of it."""

import contextlib
import json
import sqlite3
import threading

import pytest
from sqlalchemy import delete, event, insert, text
from structlog.testing import capture_logs

from lora_server import errors
from lora_server.access import audit, tables
from lora_server.access.audit import Audit
from lora_server.access.gate import Gate
from lora_server.access.identity import ANYBODY, Identity, Role
from lora_server.access.limits import Bucket
from lora_server.access.store import CHANGES, MAX_SHARES, MAX_TOKENS, REVOKED_KEPT, Store, Tenant
from lora_server.registry.database import FILE, Database, count
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from tests.support.gated import as_, cli
from tests.support.postgres import read_only

HASTY = Timings(database=0.1)


@contextlib.contextmanager
def many(gated, table, rows):
    """While these rows are there, too, as if each had been made by a call."""
    gated.database.write(lambda one: (count(one, CHANGES), one.execute(insert(table), rows)))
    gated.gate.cache.refresh()
    yield
    keys = [next(iter(row.values())) for row in rows]
    added = table.c[next(iter(rows[0]))].between(min(keys), max(keys))
    gated.database.write(lambda one: (count(one, CHANGES), one.execute(delete(table).where(added))))
    gated.gate.cache.refresh()


def rows_of_tokens(tenant, number, revoked=0.0):
    fixed = {"tenant": tenant, "role": "viewer", "note": "\N{SNOWMAN}" * 200, "digest": "d", "old_digest": ""}
    fixed |= {"old_until": 0.0, "created": 1.0, "revoked": revoked}
    return [{"id": f"{one:012x}", **fixed} for one in range(number)]


def rows_of_tenants(number):
    limits = dict.fromkeys(("max_adapters", "max_bytes", "max_active", "max_rate", "removed"), 0)
    return [{"name": f"{one:05}{'x' * 59}", "weight": 1.0, **limits} for one in range(number)]


def test_lists_of_any_length_come_in_messages_that_fit(gated, monkeypatch):
    """gRPC takes messages of 4 MiB; 8,000 tokens are 5 MB, and 1,000 audit entries, too."""
    monkeypatch.setenv("LORA_SERVER_TOKEN", gated.tokens["", Role.ADMIN])
    for kind, table, rows in (
        ("tokens", tables.tokens, rows_of_tokens("", 8000)),
        ("tenants", tables.tenants, rows_of_tenants(3000)),
    ):
        with many(gated, table, rows):
            told = cli(kind, "list", "--server", gated.address, "--json")
            assert told.exit_code == 0, told.output
            assert len(json.loads(told.stdout)) >= len(rows)
    reason = "\N{SNOWMAN}" * audit.MAX_REASON
    for _ in range(audit.WAITING):
        gated.gate.audit.note(None, "Adapters/Add", "\N{SNOWMAN}" * audit.MAX_SUBJECT, errors.ConfigError(reason))
    entries = as_(gated, "", Role.ADMIN, "Access", "Audit", pb.AuditRequest()).entries
    newest = gated.gate.audit.read(0, 1, None)[0].serial
    assert [one.serial for one in entries] == list(range(newest - len(entries) + 1, newest + 1)) and len(entries) > 100
    gated.database.write(lambda one: one.execute(delete(tables.audit).where(tables.audit.c.reason == reason)))


def test_a_change_reads_no_more_than_what_it_changed(gated):
    with many(gated, tables.tokens, rows_of_tokens("", 3000)):
        before = dict(gated.gate.cache.known.tokens)
        made = as_(gated, "acme", Role.ADMIN, "Access", "CreateToken", pb.CreateTokenRequest(role="viewer"))
        as_(gated, "acme", Role.ADMIN, "Access", "RevokeToken", pb.RevokeTokenRequest(id=made.id))
        known = gated.gate.cache.known.tokens
        assert len(before) > 3000 and known[made.id].revoked
        assert all(known[token_id] is token for token_id, token in before.items()), "what is known is not read again"


@contextlib.contextmanager
def another(gated):
    """Another controller's gate to the same database, which looks at it when it is told to."""
    with contextlib.closing(Database(gated.url)) as database:
        with contextlib.closing(Gate(database, look_seconds=3600)) as gate:
            yield database, gate


def test_a_controller_that_missed_many_changes_knows_all_of_them(gated):
    with another(gated) as (_, one):
        store = gated.gate.store
        tenants = [store.set_tenant(Tenant(f"tenant-{number}")).name for number in range(5)]
        one.cache.refresh()
        token, secret = store.create_token("tenant-0", Role.VIEWER)
        store.share("law", "tenant-1", False, ANYBODY)
        one.cache.refresh()
        assert one.identify(str(secret)).token == token.id and one.names.shared["law"] == {"tenant-1"}
        store.share("law", "", True, ANYBODY)
        for name in tenants:
            store.remove_tenant(name)
        one.cache.refresh()
        assert "law" not in one.names.shared and all(one.tenant(name).removed for name in tenants)
        with pytest.raises(errors.UnauthenticatedError):
            one.identify(str(secret))


def test_a_change_while_tokens_are_read_is_seen_by_the_next_look(gated):
    made = []

    def change(connection, cursor, statement, *_):
        if "FROM tokens" in statement and not made:
            made.append("")
            made.append(str(gated.gate.store.create_token("acme", Role.VIEWER)[1]))

    with another(gated) as (database, one):
        gated.gate.store.set_tenant(Tenant("acme"))
        event.listen(database._engine, "after_cursor_execute", change)
        one.cache.refresh()
        one.cache.refresh()
        assert one.identify(made[1]).tenant == "acme"


def test_known_tokens_count_while_the_database_is_away(tmp_path):
    file = tmp_path / FILE
    with contextlib.closing(Database(f"sqlite:///{file}", HASTY)) as database:
        with contextlib.closing(Gate(database, look_seconds=3600)) as gate:
            secret = gate.store.create_token("", Role.VIEWER)[1]
            gate.cache.refresh()
            database._engine.dispose()
            file.unlink()
            file.mkdir()
            with pytest.raises(errors.ServerUnavailableError):
                gate.store.load()
            gate.cache.refresh()
            assert gate.identify(str(secret)).role is Role.VIEWER


def test_a_transaction_that_a_postgresql_ended_while_its_process_was_stopped_is_run_again(gated):
    if not gated.database.shared:
        pytest.skip("an SQLite file ends no transaction")
    runs, idle = [], threading.Event()

    def work(connection):
        runs.append(connection)
        if len(runs) == 1:
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 1"))  # ms
            for _ in range(1000):
                idle.wait(0.05)
                connection.execute(text("SELECT 1"))
        return connection.execute(text("SELECT 7")).scalar()

    assert gated.database.read(work) == 7 and len(runs) == 2


def test_a_token_that_was_revoked_while_it_was_rotated_stays_revoked(gated):
    store, ended = gated.gate.store, []
    token = store.create_token("acme", Role.VIEWER)[0]

    def revoke(connection, cursor, statement, *_):
        if "FROM tokens" in statement:
            with contextlib.suppress(errors.ServerUnavailableError):  # it has to wait for the rotation
                ended.append(store.revoke_token(token.id, ANYBODY))

    with contextlib.closing(Database(gated.url)) as database, contextlib.closing(Database(gated.url, HASTY)) as other:
        store = Store(other)
        event.listen(database._engine, "after_cursor_execute", revoke)
        _, secret = Store(database).rotate_token(token.id, 0.0, ANYBODY)
    gated.gate.cache.refresh()
    known = gated.gate.cache.known.tokens[token.id]
    assert bool(known.revoked) == bool(ended) and known.is_proven_by(secret, 0.0) != bool(ended)


def test_a_tenant_has_a_limit_of_tokens_and_shares(gated):
    store, acme = gated.gate.store, Identity("acme", Role.ADMIN)
    good = len([one for one in store.tokens("acme", "", 9999) if not one.revoked])
    with many(gated, tables.tokens, rows_of_tokens("acme", MAX_TOKENS - good)):
        for tenant, role in (("acme", Role.ADMIN), ("", Role.ADMIN)):
            with pytest.raises(errors.LimitError, match=r"tenant acme: got 1,001 tokens, 1,000 may be; end some"):
                as_(gated, tenant, role, "Access", "CreateToken", pb.CreateTokenRequest(tenant="acme", role="viewer"))
        store.create_token("rival", Role.VIEWER)
        as_(gated, "acme", Role.ADMIN, "Access", "RevokeToken", pb.RevokeTokenRequest(id=f"{0:012x}"))
        store.create_token("acme", Role.VIEWER)
    shares = [{"adapter": "acme/bot", "tenant": f"tenant-{number}"} for number in range(MAX_SHARES)]
    with many(gated, tables.shares, shares):
        share = pb.ShareRequest(name="bot", tenant="rival")
        with pytest.raises(errors.LimitError, match="tenant acme: got 10,001 shares of its adapters, 10,000 may be"):
            as_(gated, "acme", Role.PUBLISHER, "Access", "Share", share)
        store.share("acme/bot", "tenant-0", False, acme)
        store.share("acme/bot", "tenant-0", True, acme)
        assert "rival" in as_(gated, "acme", Role.PUBLISHER, "Access", "Share", share).tenants


def test_revoked_tokens_are_kept_for_the_list_but_not_for_ever(gated):
    with many(gated, tables.tokens, rows_of_tokens("acme", 3 * REVOKED_KEPT, revoked=1.0)):
        last = gated.gate.store.create_token("acme", Role.VIEWER)[0]
        as_(gated, "acme", Role.ADMIN, "Access", "RevokeToken", pb.RevokeTokenRequest(id=last.id))
        known = [one for one in gated.gate.cache.known.tokens.values() if one.tenant == "acme" and one.revoked]
        assert len(known) == REVOKED_KEPT and last.id in {one.id for one in known}
        stored = [one.id for one in gated.gate.store.tokens("acme", "", 9999) if one.revoked]
        assert sorted(one.id for one in known) == stored


# -- the audit


def test_changes_and_refusals_are_audited_and_each_tenant_reads_its_own(gated):
    with capture_logs() as lines:
        with pytest.raises(errors.PermissionDeniedError):
            as_(gated, "rival", Role.VIEWER, "Adapters", "Remove", pb.RemoveAdapterRequest(name="secret"))
        with pytest.raises(errors.AdapterSourceError):
            as_(gated, "rival", Role.ADMIN, "Adapters", "Add", pb.AddAdapterRequest(name="x", uri="/nowhere"))
    assert [one["event"] for one in lines] == ["audit", "audit"], "a refusal is one line"
    as_(gated, "rival", Role.PUBLISHER, "Access", "Share", pb.ShareRequest(name="bot", tenant="acme"))
    as_(gated, "rival", Role.PUBLISHER, "Access", "Share", pb.ShareRequest(name="bot", stop=True))
    with pytest.raises(errors.UnknownAdapterError):
        as_(gated, "rival", Role.ADMIN, "Adapters", "Remove", pb.RemoveAdapterRequest(name="none"))
    entries = as_(gated, "rival", Role.ADMIN, "Access", "Audit", pb.AuditRequest()).entries
    assert {one.tenant for one in entries} == {"rival"}
    told = [(one.role, one.call, one.subject, one.outcome) for one in entries][-5:]
    assert told == [
        ("viewer", "Adapters/Remove", "", "permission_denied"),
        ("admin", "Adapters/Add", "name=x", "adapter_source"),
        ("publisher", "Access/Share", "name=bot tenant=acme", "ok"),
        ("publisher", "Access/Share", "name=bot stop=True", "ok"),
        ("admin", "Adapters/Remove", "name=none", "unknown_adapter"),
    ]
    newer = pb.AuditRequest(after=entries[-1].serial)
    assert not as_(gated, "rival", Role.ADMIN, "Access", "Audit", newer).entries
    whole = as_(gated, "", Role.ADMIN, "Access", "Audit", pb.AuditRequest(most=5)).entries
    assert len(whole) == 5 and [one.serial for one in whole] == sorted(one.serial for one in whole)


NEVER = {"lone surrogate": "\ud800", "NUL": "\0"}  # what no database holds, and what PostgreSQL does not


@pytest.mark.parametrize("text", NEVER.values(), ids=NEVER)
def test_an_audit_entry_that_can_never_be_written_is_dropped_and_fails_no_change(gated, text):
    held = text == NEVER["NUL"] and not gated.database.shared
    with capture_logs() as lines:
        for subject in ("before", f"bad {text}"):
            gated.gate.audit.note(None, "Adapters/Remove", subject, errors.ConfigError("no"))
        made = as_(gated, "acme", Role.ADMIN, "Access", "CreateToken", pb.CreateTokenRequest(role="viewer"))
    assert made.text and not gated.gate.audit._waiting
    entries = gated.gate.audit.read(0, 3 if held else 2, None)
    assert [one.subject for one in entries] == ["before", *[f"bad {text}"] * held, "role=viewer"]
    dropped = [one for one in lines if one["event"].startswith("audit entry dropped")]
    assert len(dropped) == (not held) and all("Adapters/Remove" in one["entry"] for one in dropped)


@contextlib.contextmanager
def unwritable(gated):
    """While the database answers, and takes no change."""
    if gated.database.shared:
        with read_only(gated.url):
            yield
        return
    holder = sqlite3.connect(gated.url.removeprefix("sqlite:///"), isolation_level=None)
    with contextlib.closing(holder):
        holder.execute("BEGIN IMMEDIATE")
        yield
        holder.execute("ROLLBACK")


def test_audit_entries_wait_while_the_database_takes_no_change(gated):
    kept = Audit(gated.database)
    with unwritable(gated), capture_logs() as lines:
        kept.note(None, "Adapters/Remove", "waits", errors.ConfigError("no"))
        kept.flush(seconds=0.0)
        assert len(kept._waiting) == 1 and "cannot write the audit log now" in [one["event"] for one in lines]
    kept.flush()
    assert not kept._waiting and [one.subject for one in kept.read(0, 1, None)] == ["waits"]


def test_a_flood_of_tries_is_counted_and_pushes_no_change_out(gated, clock):
    flooded = Audit(gated.database, Bucket(audit.REFUSED_RATE, audit.REFUSED_AT_ONCE, lambda: 0.0))
    gated.gate.audit.flush()
    kept_before = len(gated.gate.audit.read(0, 1000, None))
    for _ in range(300):
        flooded.note(None, "Adapters/Add", "", errors.UnauthenticatedError("no"))
    flooded.flush()
    assert len(gated.gate.audit.read(0, 1000, None)) == kept_before + audit.REFUSED_AT_ONCE
    flooded = Audit(gated.database, Bucket(1.0, 1.0, clock.now), refused_kept=3)
    for _ in range(2):
        flooded.note(None, "Adapters/Add", "", errors.UnauthenticatedError("no"))
    clock.advance(1.0)
    flooded.note(None, "Adapters/Add", "", errors.UnauthenticatedError("no"))
    flooded.flush()
    entries = gated.gate.audit.read(0, 1000, None)
    assert sum(one.outcome in audit.REFUSALS for one in entries) == 3
    assert any(one.outcome == "ok" for one in entries) and "more tries since" in entries[-1].reason

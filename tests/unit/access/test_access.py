"""Tokens and tenants: names, leases, limits and the audit."""

import contextlib
import json
import stat
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server import errors
from lora_server.access import tokens
from lora_server.access.gate import Gate
from lora_server.access.identity import OPERATOR, Role
from lora_server.access.limits import Bucket
from lora_server.access.names import Names
from lora_server.access.store import Tenant
from lora_server.control.rpc.scope import Scopes
from lora_server.registry.database import Database, metadata
from lora_server.slo import SloClasses
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.proofs import Counts, Freshness, Signed, sign_call
from lora_server.wire.rpc import open_channel
from tests.support.gated import ADAPTERS, as_, cli
from tests.support.postgres import DATABASES, database_of
from tests.support.serving import HANG_SECONDS, until
from tests.support.signed import borrow, proof_of, signed

pytestmark = pytest.mark.usefixtures("quiet")  # the server logs in this process, and would into what `cli` prints


def get(gated, tenant, name, role=Role.VIEWER, **more):
    return as_(gated, tenant, role, "Adapters", "Get", pb.GetAdapterRequest(name=name, **more)).name


def listed(gated, tenant, role=Role.VIEWER):
    return [one.name for one in as_(gated, tenant, role, "Adapters", "List", pb.ListAdaptersRequest()).adapters]


def acquire(gated, tenant, proof, *names, role=Role.ENGINE, **more):
    request = signed(pb.AcquireRequest(names=names, **more), proof)
    return as_(gated, tenant, role, "Clients", "Acquire", request).adapters


# -- names

PARTS = st.sampled_from(["acme", "rival", "gone", "org", "bot", "law", "a", "x@1"])
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
SHARED = st.dictionaries(NAMES, st.frozensets(st.sampled_from(["", "acme", "rival"]), max_size=2), max_size=4)


@given(tenant=st.sampled_from(["acme", "rival"]), name=NAMES, shared=SHARED)
def test_a_name_never_means_an_adapter_that_the_tenant_does_not_see(tenant, name, shared):
    names = Names(frozenset({"acme", "rival", "gone"}), shared)
    own = names.own(tenant, name)
    assert names.owner(own) == tenant and names.own(tenant, own) == own, "what it adds is its own, however it says it"
    meant = names.meant(tenant, name)
    assert meant[0] == own and all(names.sees(tenant, full) for full in meant)
    for full in meant[1:]:
        assert full == name and (names.owner(full) in ("", tenant) or shared[full] & {"", tenant})
    assert names.meant(OPERATOR, name) == ([name] if names.sees(OPERATOR, name) else [])
    assert Names(names.tenants).sees(tenant, f"gone/{name}") is False, "a removed tenant's stay hidden"


def test_a_tenant_sees_its_own_adapters_and_the_operators(gated):
    assert listed(gated, "acme") == ["acme/bot", "acme/taxes", "law", "org/art"]
    assert listed(gated, "rival") == ["law", "org/art", "rival/bot", "rival/secret"]
    assert listed(gated, "") == sorted(ADAPTERS)
    assert listed(gated, "", Role.ENGINE) == ["law", "org/art"], "an engine's requests may be anybody's"
    assert [get(gated, "acme", name) for name in ("bot", "acme/bot", "law")] == ["acme/bot", "acme/bot", "law"]
    pages = as_(gated, "acme", Role.VIEWER, "Adapters", "List", pb.ListAdaptersRequest(page_size=3))
    more = pb.ListAdaptersRequest(page_size=3, page_token=pages.next_page_token)
    assert "rival" not in pages.next_page_token
    assert [one.name for one in as_(gated, "acme", Role.VIEWER, "Adapters", "List", more).adapters] == ["org/art"]


def said(gated, tenant, name, role=Role.VIEWER):
    with pytest.raises(errors.UnknownAdapterError) as refused:
        get(gated, tenant, name, role)
    return str(refused.value)


def test_another_tenants_adapter_reads_as_if_it_did_not_exist(gated):
    """What an attacker read on 2026-11-21: "known: tenant-1/support-bot, ..."."""
    hidden, missing = said(gated, "acme", "rival/secret"), said(gated, "acme", "rival/nothing")
    assert hidden.replace("rival/secret", "rival/nothing") == missing
    assert "(known: acme/bot, acme/taxes, law, org/art)" in missing and "rival/bot" not in missing
    assert "acme" not in said(gated, "", "rival/secret", Role.ENGINE)
    proof = gated.join("acme")
    with pytest.raises(errors.UnknownAdapterError, match=r"'rival/secret': not registered here \(known: acme/bot"):
        acquire(gated, "acme", proof, "bot", "rival/secret")
    with pytest.raises(errors.UnknownAdapterError):
        as_(gated, "acme", Role.PUBLISHER, "Adapters", "Remove", pb.RemoveAdapterRequest(name="rival/secret"))
    with pytest.raises(errors.PermissionDeniedError, match="'law': belongs to another tenant; expected one of acme"):
        as_(gated, "acme", Role.PUBLISHER, "Adapters", "Remove", pb.RemoveAdapterRequest(name="law"))
    assert get(gated, "", "law") == "law"


def test_a_shared_adapter_is_seen_by_the_tenants_it_is_shared_with(gated):
    def share(tenant, name, whom="", stop=False):
        return as_(gated, tenant, Role.PUBLISHER, "Access", "Share", pb.ShareRequest(name=name, tenant=whom, stop=stop))

    assert list(share("rival", "bot", "acme").tenants) == ["acme"]
    assert get(gated, "acme", "rival/bot") == "rival/bot" and get(gated, "acme", "bot") == "acme/bot"
    assert "rival/bot" not in listed(gated, "", Role.ENGINE)
    with pytest.raises(errors.PermissionDeniedError, match="belongs to another tenant"):
        share("acme", "rival/bot", "acme")
    assert share("rival", "bot").all and "rival/bot" in listed(gated, "", Role.ENGINE)
    assert not share("rival", "bot", stop=True).tenants
    said(gated, "acme", "rival/bot")


# -- leases


def test_a_lease_is_for_the_token_that_it_was_made_with(gated):
    proof = gated.join("acme")
    (held,) = acquire(gated, "acme", proof, "bot")
    assert (held.name, held.handle) == ("bot", gated.handles["acme/bot"]), "under the name that was asked for"
    for tenant, role in (("rival", Role.ENGINE), ("acme", Role.ADMIN), ("", Role.ADMIN)):
        with pytest.raises(errors.LeaseError, match="made with another token"):
            acquire(gated, tenant, proof, "law", role=role)
        with pytest.raises(errors.LeaseError, match="made with another token"):
            as_(gated, tenant, role, "Clients", "Leave", signed(pb.LeaveRequest(), proof))
        other = gated.join(tenant, role)
        with pytest.raises(errors.LeaseError, match="made with another token"):
            as_(gated, tenant, role, "Clients", "Borrow", borrow(other, proof))
    grant = gated.shard.memory.grants[proof.client]
    assert (grant.tenant, grant.weight) == ("acme", 1.0)
    as_(gated, "acme", Role.ENGINE, "Clients", "Leave", signed(pb.LeaveRequest(), proof))


def test_a_client_cannot_restore_holds_that_it_never_had(gated):
    """A client says what it holds after a restart alone, and then of what its tenant sees."""
    proof, every = gated.join("acme"), sorted(gated.handles.values())

    def restore():
        request = signed(pb.RestoreRequest(handles=every), proof)
        as_(gated, "acme", Role.ENGINE, "Clients", "Restore", request)

    restore()
    assert gated.controller.adapters.admission.holds.of(proof.client, every) == set()
    gated.controller.adapters.admission.holds.expect(proof.client)
    restore()
    names = {"acme/bot", "acme/taxes", "law", "org/art"}
    assert gated.controller.adapters.admission.holds.of(proof.client, every) == {gated.handles[name] for name in names}


def test_an_engine_of_the_operator_acts_for_the_tenant_it_names(gated):
    proof = gated.join("")
    (held,) = acquire(gated, "", proof, "bot", on_behalf_of="rival")
    assert held.handle == gated.handles["rival/bot"]
    for tenant, name in (("acme", "rival/secret"), ("", "acme/bot")):
        with pytest.raises(errors.UnknownAdapterError):
            acquire(gated, "", proof, name, on_behalf_of=tenant)
    assert get(gated, "", "bot", Role.ENGINE, on_behalf_of="acme") == "acme/bot"
    own = gated.join("acme")
    with pytest.raises(errors.PermissionDeniedError, match="on behalf of 'rival': got a token of engine of tenant"):
        acquire(gated, "acme", own, "bot", on_behalf_of="rival")
    for tenant, role, whom in (("acme", Role.ADMIN, "rival"), ("", Role.VIEWER, "acme"), ("", Role.ENGINE, "nobody")):
        with pytest.raises(errors.PermissionDeniedError):
            get(gated, tenant, "bot", role, on_behalf_of=whom)
    shown = pb.WhoIsRequest(token=gated.tokens["acme", Role.VIEWER])
    caller = as_(gated, "", Role.ENGINE, "Access", "WhoIs", shown)
    assert (caller.tenant, caller.role) == ("acme", "viewer")
    with pytest.raises(errors.PermissionDeniedError):
        as_(gated, "rival", Role.ENGINE, "Access", "WhoIs", shown)


# -- tokens


def test_a_revoked_token_ends_its_leases_and_a_rotated_one_does_not(gated):
    made = as_(gated, "acme", Role.ADMIN, "Access", "CreateToken", pb.CreateTokenRequest(role="engine", note="a"))
    assert made.tenant == "acme" and made.text.startswith(f"ls_{made.id}_")
    lease = gated.ask(made.text, "Clients", "Join", pb.JoinRequest(instance="x"))

    def beat(text):
        gated.ask(text, "Clients", "Heartbeat", signed(pb.HeartbeatRequest(), proof_of(lease)))

    rotate = pb.RotateTokenRequest(id=made.id, overlap_seconds=3600)
    again = as_(gated, "acme", Role.ADMIN, "Access", "RotateToken", rotate)
    assert again.id == made.id and again.text != made.text
    for text in (made.text, again.text):
        beat(text)
    at_once = pb.RotateTokenRequest(id=made.id, overlap_seconds=0)
    last = as_(gated, "acme", Role.ADMIN, "Access", "RotateToken", at_once)
    for text in (made.text, again.text):
        with pytest.raises(errors.UnauthenticatedError, match="not good here, or not any more"):
            beat(text)
    beat(last.text)
    as_(gated, "acme", Role.ADMIN, "Access", "RevokeToken", pb.RevokeTokenRequest(id=made.id))
    with pytest.raises(errors.UnauthenticatedError):
        beat(last.text)
    assert gated.controller.clients.leases.find(lease.client, lease.epoch) is None
    until(lambda: lease.client not in gated.shard.memory.grants, "the shard was told")
    rows = as_(gated, "acme", Role.ADMIN, "Access", "ListTokens", pb.ListTokensRequest()).tokens
    assert {one.tenant for one in rows} == {"acme"} and not any(one.text for one in rows)


def test_changes_by_another_controller_are_seen_here(gated):
    """Of the same database, as of lora-server tokens --data-dir."""
    token, secret = gated.gate.store.create_token("rival", Role.ENGINE)
    until(lambda: gated.gate.is_good("rival", token.id), "it is known")
    lease = gated.ask(str(secret), "Clients", "Join", pb.JoinRequest(instance="x"))
    gated.gate.store.remove_tenant(gated.gate.store.set_tenant(Tenant("short-lived")).name)
    gated.gate.store.revoke_token(token.id, token.identity)
    until(lambda: gated.controller.clients.leases.find(lease.client, lease.epoch) is None, "its lease ended")
    with pytest.raises(errors.UnauthenticatedError):
        gated.ask(str(secret), "Access", "WhoIs", pb.WhoIsRequest())


@pytest.mark.parametrize(("who", "method", "request_", "error"), [
    ("acme", "CreateToken", pb.CreateTokenRequest(tenant="rival", role="viewer"), errors.PermissionDeniedError),
    ("acme", "CreateToken", pb.CreateTokenRequest(role="king"), errors.ConfigError),
    ("", "CreateToken", pb.CreateTokenRequest(tenant="nobody", role="viewer"), errors.ConfigError),
    ("", "CreateToken", pb.CreateTokenRequest(role="viewer", note="x" * 300), errors.ConfigError),
    ("acme", "RevokeToken", pb.RevokeTokenRequest(id="0" * 12), errors.ConfigError),
    ("", "RotateToken", pb.RotateTokenRequest(id="x", overlap_seconds=-1), errors.ConfigError),
    ("", "SetTenant", pb.Tenant(name="../x"), errors.ConfigError),
    ("", "SetTenant", pb.Tenant(name="org"), errors.ConfigError),
    ("", "SetTenant", pb.Tenant(name="acme", weight=-1), errors.ConfigError),
    ("", "SetTenant", pb.Tenant(name="acme", slo_class="gold"), errors.ConfigError),
    ("", "RemoveTenant", pb.RemoveTenantRequest(name="nobody"), errors.ConfigError),
])  # fmt: skip
def test_an_invalid_change_is_refused(gated, who, method, request_, error):
    with pytest.raises(error):
        as_(gated, who, Role.ADMIN, "Access", method, request_)


def header(gated, request, method="WhoIs", secret=""):
    token = tokens.parse(gated.tokens["acme", Role.VIEWER])
    return str(sign_call(token.id, secret or token.secret, f"Access/{method}", request.SerializeToString()))


def show(gated, authorization, request, method="WhoIs"):
    """A call with this header."""
    with open_channel(gated.address, Credentials()) as channel:
        asked = getattr(rpc.AccessStub(channel), method)
        return asked(request, timeout=HANG_SECONDS, metadata=[("authorization", authorization)])


def test_a_signed_call_is_good_once_for_its_message_and_for_a_while(gated):
    request, other = pb.WhoIsRequest(), pb.WhoIsRequest(token="x")
    good = header(gated, request)
    assert tokens.parse(gated.tokens["acme", Role.VIEWER]).secret not in good
    parts = good.split(" ")
    late = " ".join([*parts[:2], str(float(parts[2]) - 3600), *parts[3:]])
    another_call, another_secret = header(gated, request, "ListTokens"), header(gated, request, secret="a" * 43)
    of_a_node = str(sign_call("node", "", "Access/WhoIs", b""))
    bad = dict.fromkeys((another_call, another_secret, late, of_a_node), "not good here")
    bad |= dict.fromkeys((" ".join(parts[:4]), "Signed a b c d e"), "incomplete")
    bad[header(gated, other)] = "another message"
    for shown, said in bad.items():
        with pytest.raises(grpc.RpcError, match=said):
            show(gated, shown, request)
    assert show(gated, good, request).tenant == "acme"
    with pytest.raises(grpc.RpcError, match="used before"):
        show(gated, good, request)
    assert show(gated, f"Bearer {gated.tokens['acme', Role.VIEWER]}", request).tenant == "acme", "as curl shows it"


def test_a_signature_of_another_hour_is_refused(clock):
    fresh = Freshness(60.0, clock.now)
    for when, good in (("941", True), ("1059", True), ("939", False), ("1061", False), ("nan", False)):
        signed = Signed("id", when, f"nonce {when}", "", b"")
        with contextlib.nullcontext() if good else pytest.raises(errors.UnauthenticatedError, match="clocks"):
            fresh.check(signed)
    clock.advance(1000.0)
    fresh.check(Signed("id", "2000", "another", "", b""))
    assert len(fresh._seen) == 1, "nothing is kept for longer than it can be used"


def test_a_count_is_taken_once():
    counts = Counts()
    order = [1, 3, 2, 2, 3, 5000, 4000, 905, 904, 4000, 1 << 63, 5001]
    assert [counts.take(one) for one in order] == [
        True, True, True, False, False, True, True, True, False, False, True, False,
    ]  # fmt: skip


def test_a_tenants_admin_cannot_revoke_another_tenants_token(gated):
    theirs = tokens.parse(gated.tokens["rival", Role.VIEWER]).id
    with pytest.raises(errors.ConfigError) as hidden:
        as_(gated, "acme", Role.ADMIN, "Access", "RevokeToken", pb.RevokeTokenRequest(id=theirs))
    assert str(hidden.value) == f"token: got '{theirs}', expected the id of one; see lora-server tokens list"
    gated.ask(gated.tokens["rival", Role.VIEWER], "Access", "WhoIs", pb.WhoIsRequest())


def test_secrets_are_neither_stored_nor_printed(gated):
    """Neither in the database, and its file, nor in what is printed of a token."""
    secret = tokens.parse(gated.tokens["acme", Role.ENGINE])
    rows = gated.database.read(lambda one: [str(one.execute(t.select()).all()) for t in metadata.sorted_tables])
    content = "".join(rows).encode()
    if not gated.database.shared:
        directory = Path(gated.database.shown.partition("///")[2]).parent
        content += b"".join(file.read_bytes() for file in directory.iterdir())
    assert secret.secret.encode() not in content and secret.digest.encode() in content
    assert secret.secret not in repr(secret) and secret.digest not in repr(gated.gate.cache.known.tokens[secret.id])


def make_beside(file, beside):
    done = cli("tokens", "create", "--role", "admin", *beside, "--file", str(file))
    assert done.exit_code == 0, done.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and tokens.parse(file.read_text().strip())
    shown = cli("audit", *beside, "--json")
    assert '"call": "Access/CreateToken"' in shown.stdout
    made = cli("tenants", "set", "acme", "--max-bytes", "10GiB", "--json", *beside)
    assert json.loads(made.stdout)[0]["max_bytes"] == 10 << 30
    assert "10.0 GiB" in cli("tenants", "list", *beside).stdout
    listed = cli("tokens", "list", *beside)
    assert "admin" in listed.stdout and "good" in listed.stdout


@pytest.mark.parametrize("kind", DATABASES)
def test_the_first_token_is_made_beside_the_database(tmp_path, kind):
    with database_of(kind, tmp_path) as url:
        beside = ["--data-dir", str(tmp_path)] if kind == "sqlite" else ["--registry", url]
        make_beside(tmp_path / "admin", beside)
        database = Database(url)
        with contextlib.closing(database), contextlib.closing(Gate(database)) as gate:
            assert gate.required and gate.identify((tmp_path / "admin").read_text().strip()).role is Role.ADMIN
            assert gate.tenant("acme").max_bytes == 10 << 30
    none = cli("tokens", "list", "--data-dir", str(tmp_path / "none"))
    assert (none.exit_code, "got no directory" in none.stderr) == (2, True)
    first = cli("tokens", "create", "--role", "admin", "--data-dir", str(tmp_path / "before" / "its start"))
    assert (first.exit_code, first.stdout[:3]) == (0, "ls_")


def test_the_cli_shows_what_the_token_may_see(gated, monkeypatch):
    monkeypatch.setenv("LORA_SERVER_TOKEN", gated.tokens["acme", Role.VIEWER])
    commands = "status", "adapters list", "adapters show bot", "adapters show secret"
    status, _, shown, _ = told = [cli(*command.split(), "--server", gated.address) for command in commands]
    assert [one.exit_code for one in told] == [0, 0, 0, 1]
    assert "adapters: 4," in status.stdout, "its own two, and the operator's"
    assert "acme/bot" in shown.stdout and not any("rival" in one.output for one in told)


def test_a_tenants_class_is_one_of_the_servers_and_orders_its_requests(gated, monkeypatch):
    known = {
        "gold": {"slo": "ttft_p99=1s,tpot_avg=1s"},
        "silver": {"slo": "ttft_p99=4s,tpot_avg=1s", "adapters": ["law"]},
    }
    admission = gated.controller.adapters.admission
    monkeypatch.setattr(admission.classes, "known", SloClasses.parse(known))
    assert admission.classes.of(["law"]).name == "silver" and admission.classes.of(["law"], "gold").name == "gold"
    assert admission.classes.of(["org/art", "law"]).name == "silver", "the strictest"
    gated.gate.store.set_tenant(Tenant("acme", slo_class="gold"))
    gated.gate.cache.refresh()
    acquire(gated, "acme", gated.join("acme"), "bot")
    acquire(gated, "rival", gated.join("rival"), "bot")
    assert {name: sum(one.counts) for name, one in admission.queue.counters.waits_by_class.items()} == {"gold": 1}
    monkeypatch.setenv("LORA_SERVER_TOKEN", gated.tokens["", Role.ADMIN])
    told = cli("tenants", "list", "--server", gated.address, "--json")
    assert [one["slo_class"] for one in json.loads(told.stdout) if one["name"] in ("acme", "rival")] == ["gold", None]
    assert "gold" in cli("tenants", "list", "--server", gated.address).stdout
    assert "ttft_p99=4000ms,tpot_avg=1000ms; requests" in cli("status", "--server", gated.address).stdout
    shown = cli("adapters", "show", "law", "--server", gated.address, "--json")
    assert json.loads(shown.stdout)["slo_class"] == "silver"


def test_an_engine_joins_with_a_class_its_own_or_its_tenants(gated, monkeypatch):
    known = {name: {"slo": f"ttft_p99=1s,tpot_avg={tpot}ms"} for name, tpot in (("gold", 8), ("fast", 2))}
    monkeypatch.setattr(gated.controller.adapters.admission.classes, "known", SloClasses.parse(known))
    gated.gate.store.set_tenant(Tenant("acme", slo_class="gold"))
    gated.gate.cache.refresh()
    sites = gated.controller.agreement.spec.layers * 4

    def joined(tenant, slo_class=""):
        request = pb.JoinRequest(instance="engine", slo_class=slo_class)
        lease = gated.ask(gated.tokens[tenant, Role.ENGINE], "Clients", "Join", request)
        told = gated.shard.memory.grants[lease.client]
        assert told.slo_class == lease.slo_class
        return lease, told.step_us

    assert joined("rival")[1] == 0
    assert joined("acme")[1] == 8000 // sites
    lease, step_us = joined("", "fast")
    assert step_us == 2000 // sites
    before = gated.controller.adapters.admission.queue.counters.waits_by_class
    acquire(gated, "", proof_of(lease), "org/art")
    assert sum(before["fast"].counts) == 1
    with pytest.raises(errors.ConfigError, match="SLO class: got 'brass', expected one of"):
        joined("", "brass")
    monkeypatch.setenv("LORA_SERVER_TOKEN", gated.tokens["", Role.ADMIN])
    assert "class fast; " in cli("status", "--server", gated.address).stdout
    gated.gate.store.set_tenant(Tenant("acme"))
    gated.gate.cache.refresh()
    gated.controller.clients.end_all()


# -- limits


def test_a_tenants_limits_are_enforced(gated, monkeypatch):
    store, gate = gated.gate.store, gated.gate
    gated.controller.clients.end_all()
    proof = gated.join("acme")

    def limit(**limits):
        store.set_tenant(Tenant("acme", **limits))
        gate.cache.refresh()

    rollout = gated.controller.adapters.rollout
    monkeypatch.setattr(rollout, "allowed", rollout.allowed._replace(roots=("/adapters",)))
    for limits, text in (
        ({"max_adapters": 2}, "tenant acme: got 3 adapters, 2 may be; remove some"),
        ({"max_bytes": 1}, "tenant acme: got adapters of 2 B, 1 B may be"),
    ):
        limit(**limits)
        with pytest.raises(errors.LimitError, match=text):
            Scopes(gated.controller, gate).add(gate.tenant("acme"), "acme/x", "/adapters/acme/x", 1.0)
    limit(max_active=1)
    acquire(gated, "acme", proof, "law", "org/art")
    acquire(gated, "acme", proof, "bot")
    with pytest.raises(errors.LimitError, match="tenant acme: got 2 adapters in use, 1 may be"):
        acquire(gated, "acme", proof, "taxes")
    limit(max_rate=0.01)
    acquire(gated, "acme", proof, "law")
    with pytest.raises(errors.LimitError, match=r"more than 0\.01 adds and acquires a second; ask less often"):
        acquire(gated, "acme", proof, "law")
    limit(max_rate=0.02)
    for _ in range(3):
        acquire(gated, "acme", proof, "law", ticket=5)  # a client that waits asks again: that counts once
    with pytest.raises(errors.LimitError, match=r"more than 0\.02 adds and acquires a second"):
        acquire(gated, "acme", proof, "law", ticket=6)
    acquire(gated, "rival", gated.join("rival"), "law")
    with pytest.raises(errors.AdapterSourceError, match="leads elsewhere"):
        as_(gated, "acme", Role.PUBLISHER, "Adapters", "Add", pb.AddAdapterRequest(name="x", uri="/adapters/rival/x"))
    limit()


def test_a_bucket_gives_its_rate_and_no_more(clock):
    bucket = Bucket(2.0, 3.0, clock.now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    clock.advance(0.5)
    assert [bucket.take() for _ in range(2)] == [True, False]
    clock.advance(1000.0)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]

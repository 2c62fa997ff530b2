"""Who gets in: every entry point by every role, tenant and no token; TLS both ways, and what may be open without."""

import base64
import contextlib
import itertools
import shutil
import ssl
import threading

import grpc
import pytest
from cryptography import x509
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from lora_server import errors
from lora_server.access import exposure, tls
from lora_server.access.identity import Identity, Role
from lora_server.access.remote import RemoteGate
from lora_server.access.rights import CHANGES, RIGHTS
from lora_server.address import Address
from lora_server.config import ServeConfig
from lora_server.control.http import page
from lora_server.control.http.server import HttpServer
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import AUTHORIZATION, Credentials
from lora_server.wire.rpc import call, open_channel, translate
from tests.support.certificates import Authority
from tests.support.gated import ADAPTERS, TENANTS, Gated
from tests.support.serving import HANG_SECONDS, until
from tests.support.signed import signed_by_shard

DAY = 86400.0
SERVICES = pb.DESCRIPTOR.services_by_name
CALLS = {f"{service}/{one.name}": one for service in SERVICES for one in SERVICES[service].methods}
STREAMS = {f"Shards/{one}" for one in ("Register", "LeaseRank", "FollowLayouts", "Files", "Read")} | {"Health/Check"}
NOT_GOOD = {
    "nobody": "", "no token": "hello", "a node's secret, as a token": "of this run's nodes",
    "one that was never made": "ls_0123456789ab_" + "a" * 43, "a bound too long": "ls_0123456789ab_" + "a" * 5000,
}  # fmt: skip


def test_the_table_has_every_entry_point_and_no_other():
    paths = {"/livez", "/readyz", "/metrics", "/status.json", "/status.events", *page.FILES}
    assert set(RIGHTS) == set(CALLS) | {"Health/Check"} | paths
    assert set(CALLS) >= CHANGES


def request_of(method):
    """One that names another tenant's adapter in every field that may."""
    request = message_factory.GetMessageClass(method.input_type)()
    for field in method.input_type.fields:
        if field.name == "name":
            request.name = "rival/secret"
        elif field.name == "names":
            request.names.append("rival/secret")
    return request


@pytest.mark.parametrize("call", sorted(set(CALLS) - STREAMS))
def test_a_caller_without_the_right_gets_nothing(gated, call):
    """By their kind, errors say whether the gate was passed: what comes behind it is about the request."""
    service, method = call.split("/")
    request = request_of(CALLS[call])
    assert set(gated.tokens) == set(itertools.product(TENANTS, Role))
    for (tenant, role), token in gated.tokens.items():
        if not RIGHTS[call].allows(Identity(tenant, role)):
            with pytest.raises(errors.PermissionDeniedError, match=f"{call}: got a token of {role}") as denied:
                gated.ask(token, service, method, request)
            assert not any(name in str(denied.value) for name in ADAPTERS)
    for token in NOT_GOOD.values():
        with pytest.raises(errors.UnauthenticatedError):
            gated.ask(token, service, method, request)


READS = ("Adapters/Get", "Adapters/List", "Server/Status", "Access/WhoIs", "Access/ListTokens", "Access/Audit")
FORGED = tuple(f"Clients/{name}" for name in ("Heartbeat", "Acquire", "Await", "Release", "Hold", "Restore"))


@pytest.mark.parametrize("call", [*READS, *FORGED, "Clients/Join", "Adapters/Remove", "Adapters/Add", "Access/Share"])
def test_a_caller_with_the_right_is_told_nothing_of_other_tenants(gated, call):
    """The same calls by those who may make them: no answer and no error has anything of another's in it."""
    service, method = call.split("/")
    request = request_of(CALLS[call])
    for role in Role:
        if not RIGHTS[call].allows(Identity("acme", role)):
            continue
        try:
            said = str(gated.ask(gated.tokens["acme", role], service, method, request))
        except errors.LoraServerError as error:
            said = str(error)
            assert not isinstance(error, errors.UnauthenticatedError)
        said = said.replace("rival/secret", "", 1) if "adapter 'rival/secret'" in said else said  # what was asked for
        assert "rival" not in said, (call, role)


def test_an_unauthenticated_caller_learns_only_whether_it_serves(gated):
    with open_channel(gated.address) as channel:
        told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
        unknown = channel.unary_unary("/lora_server.v1.Adapters/Anything")
        with pytest.raises(grpc.RpcError) as ended:
            unknown(b"", timeout=60)
        assert ended.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert gated.get("/readyz")[:2] == (503, "registering adapters; a token of the operator shows more\n")


MIXED_UP = {  # the address, whose authority is trusted, and what is said
    "the HTTP port": ("127.0.0.1:{http}", "none", "an HTTP server answers there; give the port of --listen"),
    "TLS to a server without": ("127.0.0.1:{plain}", "its own", "it has no TLS there; unset LORA_SERVER_TLS_CA"),
    "no TLS to a server with it": (
        "127.0.0.1:{tls}", "none", "it ended the connection: if it has TLS, set LORA_SERVER_TLS_CA"
    ),
    "another authority": ("127.0.0.1:{tls}", "another", "LORA_SERVER_TLS_CA did not sign its certificate"),
    "another name": ("localhost:{tls}", "its own", "its certificate is of another name"),
    "no such host": ("nohost.invalid:7400", "none", "its name is not known here"),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED_UP)
def test_a_mixed_up_address_says_what_to_give(gated, served, authorities, case):
    where, trusts, words = MIXED_UP[case]
    ports = {"http": gated.http.port, "plain": gated.control.port, "tls": served[0].control.port}
    address, ca = where.format(**ports), {"its own": authorities[0].ca, "another": authorities[1].ca}.get(trusts)
    with open_channel(address, Credentials(tls_ca=ca)) as channel, pytest.raises(errors.ServerUnavailableError) as told:
        call(rpc.ServerStub(channel).Status, pb.StatusRequest(), server=address, seconds=HANG_SECONDS)
    assert str(told.value).startswith(f"server {address}: {words}"), told.value


def test_files_are_for_shards_whatever_the_token(gated):
    """Of any tenant, and of the operator; tests/unit/control/test_node0_files.py has what a shard gets."""
    guesses = ("", "1", "of this run's nodes", gated.shard.memory.instance[::-1])
    for token, guess in itertools.product([*gated.tokens.values(), *NOT_GOOD.values()], guesses):
        request = signed_by_shard(pb.FilesRequest(version="v1"), 0, guess)
        header = Credentials(token=token).authorization("Shards/Files", request.SerializeToString())
        with open_channel(gated.address, Credentials()) as channel, pytest.raises(grpc.RpcError) as denied:
            rpc.ShardsStub(channel).Files(request, metadata=((AUTHORIZATION, header),), timeout=HANG_SECONDS)
        error = translate(denied.value, gated.address)
        assert isinstance(error, errors.PermissionDeniedError) and "not of the registered process" in str(error)


@pytest.mark.parametrize("path", sorted(path for path in RIGHTS if path.startswith("/")))
def test_http_answers_callers_with_the_right(gated, path):
    right = RIGHTS[path]
    for (tenant, role), token in gated.tokens.items():
        password = base64.b64encode(f"anything:{token}".encode()).decode()
        for header in (f"Bearer {token}", f"Basic {password}"):
            status, body, _ = gated.get(path, header)
            may = right.allows(Identity(tenant, role))
            assert (status not in (401, 403)) == may, (path, tenant, role)
            assert may or not any(name in body for name in ADAPTERS)
    for token in NOT_GOOD.values():
        status, body, head = gated.get(path, f"Bearer {token}" if token else "")
        assert (status == 401) != right.public
        assert not any(name in body for name in ADAPTERS)
        assert right.public or "WWW-Authenticate: Basic" in head.replace("www-authenticate: ", "WWW-Authenticate: ")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours")), Authority(tmp_path_factory.mktemp("theirs"), "stranger")


@pytest.fixture(scope="module")
def served(tmp_path_factory, authorities):
    ours, _ = authorities
    cert, key = ours.issue("server")
    config = ServeConfig(base_model="x", tls_cert=cert, tls_key=key, tls_ca=ours.ca, tls_client_ca=ours.ca)
    with contextlib.ExitStack() as stack:
        gated = Gated(tmp_path_factory.mktemp("served"), stack, tls=tls.ServerCertificate(config).grpc())
        yield gated, config


def who(gated, **shown):
    credentials = Credentials(token=gated.tokens["acme", Role.VIEWER], **shown)
    with open_channel(gated.address, credentials) as channel:
        asked = rpc.AccessStub(channel).WhoIs
        return call(asked, pb.WhoIsRequest(), server=gated.address, seconds=HANG_SECONDS).tenant


def test_only_certificates_of_the_authority_are_accepted(served, authorities):
    gated, _ = served
    ours, theirs = authorities
    (cert, key), (forged, forged_key) = ours.issue("engine"), theirs.issue("engine")
    good = {"tls_ca": ours.ca, "tls_cert": cert, "tls_key": key}
    assert who(gated, **good) == "acme"
    bad = [{}, {"tls_ca": ours.ca}, good | {"tls_cert": forged, "tls_key": forged_key}]
    for refused in (*bad, good | {"tls_ca": theirs.ca}, good | {"tls_name": "another.example"}):
        with pytest.raises(errors.ServerUnavailableError, match=r"did not sign|another name|it ended the connection"):
            who(gated, **refused)


def serial(address):
    host, _, port = address.rpartition(":")
    shown = ssl.get_server_certificate((host, int(port)), timeout=HANG_SECONDS)
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


BAD_CERTIFICATES = {  # how it is made, and what a start says
    "expired": ({"begins": -3, "ends": -1}, "got a certificate that is good from .*, expected one that is good now"),
    "not good yet": ({"begins": 1, "ends": 3}, "got a certificate that is good from"),
    "another address": ({"address": "192.0.2.1"}, "own processes would not connect .*127.0.0.1.* give its name as"),
}


@pytest.mark.parametrize("case", BAD_CERTIFICATES)
def test_a_certificate_that_cannot_serve_is_refused(authorities, tmp_path, case):
    made, said = BAD_CERTIFICATES[case]
    ours, _ = authorities
    cert, key = Authority(tmp_path).issue("server")
    bad, bad_key = ours.issue("bad", **made)
    config = {"base_model": "x", "tls_ca": ours.ca}
    with pytest.raises(errors.ConfigError, match=said):
        tls.check(ServeConfig(**config, tls_cert=bad, tls_key=bad_key))
    with pytest.raises(errors.ConfigError, match="got what does not fit together"):
        tls.check(ServeConfig(**config, tls_cert=bad, tls_key=key))
    with pytest.raises(errors.ConfigError, match="own processes would not connect"):
        tls.check(ServeConfig(**config, tls_cert=cert, tls_key=key))


def test_clients_certificates_are_asked_of_the_servers_own_processes_too(authorities):
    ours, theirs = authorities
    cert, key = ours.issue("own")
    config = ServeConfig(base_model="x", tls_cert=cert, tls_key=key, tls_ca=ours.ca, tls_client_ca=theirs.ca)
    with pytest.raises(errors.ConfigError, match="own processes would not connect"):
        tls.check(config)
    assert tls.check(config.model_copy(update={"tls_client_ca": ours.ca})) > 80_000
    other = config.model_copy(update={"nodes": 2, "node_rank": 1})
    assert tls.check(other) > 80_000, "which certificates node 0 wants, that node knows"
    for wrong in (key, key.with_name("none")):
        with pytest.raises(errors.ConfigError, match=r"--tls-ca .*: cannot be read"):
            tls.check(other.model_copy(update={"tls_ca": wrong}))


def test_a_certificate_is_renewed_while_it_serves(authorities, tmp_path, clock, stack):
    ours, _ = authorities
    cert, key = ours.issue("renewed")
    config = ServeConfig(base_model="x", tls_cert=cert, tls_key=key, tls_ca=ours.ca)
    shown = tls.ServerCertificate(config, clock)
    gated = Gated(tmp_path, stack, tls=shown.grpc())
    http = stack.enter_context(contextlib.closing(HttpServer("127.0.0.1", 0, lambda: "", None, tls=shown.http())))
    addresses = gated.address, f"127.0.0.1:{http.port}"

    def serials():
        return [serial(address) for address in addresses]

    before = serials()
    ours.issue("renewed", ends=2)
    renewed = serials()
    assert all(new > old for new, old in zip(renewed, before, strict=True))
    left = shown.seconds_left
    cert.write_text("nonsense")
    assert serials() == renewed, "what cannot be read changes nothing"
    for made in (one for one, _ in BAD_CERTIFICATES.values()):
        ours.issue("renewed", **made)
        with capture_logs() as logs:
            assert serials() == serials() == renewed, f"{made} locks nobody out"
        (said,) = (one for one in logs if one["log_level"] == "error")
        assert str(cert) in said["files"] and "expected" in said["reason"]
    assert shown.seconds_left == left
    ours.issue("renewed")
    key.unlink()
    assert serials() == renewed, "a file that is being replaced"
    ours.issue("renewed")
    assert all(new > old for new, old in zip(serials(), renewed, strict=True))
    assert shown.seconds_left < left
    newest = serials()
    clock.advance(-0.6 * DAY)
    ours.issue("renewed", begins=-0.5)
    assert serials() == newest
    clock.advance(0.6 * DAY)
    assert all(new > old for new, old in zip(serials(), newest, strict=True)), "it is tried again, and good by now"


@pytest.mark.long
def test_certificates_are_renewed_under_load(authorities, tmp_path):
    """Calls over new connections while files are replaced: whole, the key a moment before, and by bad pairs."""
    ours, theirs = authorities
    cert, key = ours.issue("loaded")
    config = ServeConfig(base_model="x", tls_cert=cert, tls_key=key, tls_ca=ours.ca)
    failed, done, stop = [], [], threading.Event()
    with contextlib.ExitStack() as stack:
        gated = Gated(tmp_path, stack, tls=tls.ServerCertificate(config).grpc())
        kept = Credentials(token=gated.tokens["acme", Role.VIEWER], tls_ca=ours.ca)
        channel = stack.enter_context(open_channel(gated.address, kept))

        def calls(anew):
            while not stop.is_set():
                try:
                    if anew:
                        assert who(gated, tls_ca=ours.ca) == "acme"
                    else:
                        asked = rpc.AccessStub(channel).WhoIs
                        call(asked, pb.WhoIsRequest(), server=gated.address, seconds=HANG_SECONDS)
                    done.append(anew)
                except Exception as error:
                    failed.append(error)

        callers = [threading.Thread(target=calls, args=(number < 4,)) for number in range(6)]
        for one in callers:
            one.start()
        try:
            before = serial(gated.address)
            for how in ("whole", "torn", "bad", "overwritten", "torn", "bad", "whole"):
                if how == "bad":
                    theirs_cert, theirs_key = theirs.issue("bad")
                    shutil.copyfile(theirs_cert, cert), shutil.copyfile(theirs_key, key)
                    assert serial(gated.address) == before, "it is not shown"
                new_cert, new_key = ours.issue("next")
                if how == "overwritten":
                    shutil.copyfile(new_key, key), shutil.copyfile(new_cert, cert)
                else:
                    new_key.replace(key)
                    if how != "whole":
                        assert serial(gated.address) == before, "half of a pair is not shown"
                    new_cert.replace(cert)
                newest, begun = serial(gated.address), len(done)
                assert newest > before, how
                before = newest
                until(lambda begun=begun: sum(done[begun:]) > 20 and not all(done[begun:]), "calls go on")
        finally:
            stop.set()
            for one in callers:
                one.join(HANG_SECONDS)
    assert failed == []


NODE_1 = {"nodes": 2, "node_rank": 1, "controller": "10.0.0.1:7400"}


@pytest.mark.parametrize(("settings", "missing"), [
    ({}, None),
    ({"listen": "10.0.0.1:7400"}, "no tokens and no TLS"),
    ({"http": "0.0.0.0:7401"}, "--http 0.0.0.0:7401: got no tokens"),
    ({"advertise": "10.0.0.1"}, "--advertise 10.0.0.1:0"),
    ({"listen": "10.0.0.1:7400", "require_tokens": True}, "got no TLS"),
    ({"listen": "10.0.0.1:7400", "tls_cert": "a", "tls_key": "b", "tls_ca": "c"}, "got no tokens"),
    ({"listen": "10.0.0.1:7400", "tls_cert": "a", "tls_key": "b", "tls_ca": "c", "require_tokens": True}, None),
    ({"listen": "10.0.0.1:7400", "insecure": True}, None),
    ({"nodes": 2, "node_rank": 1, "controller": "10.0.0.1:7400"}, "--controller 10.0.0.1:7400: got no TLS"),
    ({"nodes": 2, "node_rank": 1, "controller": "10.0.0.1:7400", "tls_ca": "c"}, None),
    ({"nodes": 2, "node_rank": 1, "controller": "127.0.0.1:7400"}, None),
    (NODE_1 | {"tls_ca": "c", "http": "0.0.0.0:7401"}, "--http 0.0.0.0:7401: got no TLS .* --tls-cert, --tls-key"),
    (NODE_1 | {"http": "0.0.0.0:7401"}, "--controller 10.0.0.1:7400, --http 0.0.0.0:7401: got no TLS .* --tls-cert"),
    (NODE_1 | {"tls_ca": "c", "tls_cert": "a", "tls_key": "b", "http": "0.0.0.0:7401"}, None),
    (NODE_1 | {"http": "0.0.0.0:7401", "insecure": True}, None),
])  # fmt: skip
def test_public_addresses_need_tokens_and_tls_or_insecure(settings, missing):
    config = ServeConfig(base_model="x", layout="ep2-pp1", **settings)
    if missing is None:
        exposure.check(config)
    else:
        with pytest.raises(errors.ConfigError, match=f"{missing}.*--insecure"):
            exposure.check(config)


@pytest.mark.parametrize(("settings", "said"), [
    ({"tls_cert": "a"}, "expected both or neither"),
    ({"tls_cert": "a", "tls_key": "b"}, "--tls-cert needs --tls-ca"),
    ({"tls_client_ca": "a"}, "tls-client-ca: got one without --tls-cert"),
    ({"LORA_SERVER_TLS_CERT": "/x"}, "without LORA_SERVER_TLS_CA"),
    ({"LORA_SERVER_TLS_CA": "/x", "LORA_SERVER_TLS_KEY": "/y"}, "expected both or neither"),
    ({"LORA_SERVER_TLS_CA": "/none/such"}, "/none/such cannot be read"),
])  # fmt: skip
def test_an_incomplete_set_of_certificates_is_refused(settings, said):
    """By the server's settings, and by a caller's environment."""
    with pytest.raises((ValueError, errors.ConfigError), match=said):
        if settings.keys() & {"tls_cert", "tls_client_ca"}:
            ServeConfig(base_model="x", **settings)
        else:
            open_channel("127.0.0.1:1", Credentials.of(settings))


def test_the_token_file_is_read_again_for_each_call(tmp_path):
    file = tmp_path / "token"
    shown = Credentials.of({"LORA_SERVER_TOKEN_FILE": str(file)})
    with pytest.raises(errors.ConfigError, match=r"LORA_SERVER_TOKEN_FILE: .* cannot be read"):
        shown.authorization("Server/Status")
    for text in ("first", "second"):
        file.write_text(f"{text}\n")
        assert shown.authorization("Server/Status") == f"Bearer {text}"
    own = Credentials.of({"LORA_SERVER_TOKEN_FILE": str(file), "LORA_SERVER_TOKEN": "own"})
    assert own.authorization("Server/Status") == "Bearer own"
    file.write_text("\x1b[2J")
    for bad in (shown, Credentials(token="two\nlines"), Credentials(token="ls_\u00e9")):
        with pytest.raises(errors.ConfigError, match="expected one token"):
            bad.authorization("Server/Status")


CONTROLS = ("\x1b[2J", "ls_0123456789ab_\x7f", "\x80", "\u00ff", "a\tb")


@pytest.mark.parametrize("token", [*NOT_GOOD.values(), *CONTROLS, "a" * 15_000])
def test_a_bad_token_is_refused_over_http_on_every_node(gated, token):
    """Node 0 knows its tokens; the others ask it, in gRPC's metadata, which does not take every character."""
    remote = RemoteGate(Address.parse(gated.address), ServeConfig(base_model="x"))
    good = gated.tokens["", Role.VIEWER]
    with contextlib.closing(HttpServer("127.0.0.1", 0, lambda: "", None, gate=remote)) as http:
        for port in (gated.http.port, http.port):
            assert gated.get("/metrics", f"Bearer {good}", port)[0] == 200
            assert gated.get("/metrics", f"Bearer {token}", port)[0] == 401

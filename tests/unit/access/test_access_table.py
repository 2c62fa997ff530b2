"""Who gets in: every entry point by every role, tenant and no token; TLS both ways, and what may be open without."""

import base64
import contextlib
import itertools
import ssl

import grpc
import pytest
from cryptography import x509
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lora_server import errors
from lora_server.access import exposure, tls
from lora_server.access.identity import Identity, Role
from lora_server.access.rights import CHANGES, RIGHTS
from lora_server.config import ServeConfig
from lora_server.control.http import page
from lora_server.control.http.server import HttpServer
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel
from tests.support.certificates import Authority
from tests.support.gated import ADAPTERS, TENANTS, Gated
from tests.support.serving import HANG_SECONDS

SERVICES = pb.DESCRIPTOR.services_by_name
CALLS = {f"{service}/{one.name}": one for service in SERVICES for one in SERVICES[service].methods}
STREAMS = {"Shards/Register", "Shards/Files", "Shards/Read", "Health/Check"}
NOT_GOOD = {
    "nobody": "", "no token": "hello", "a node's secret, as a token": "of this run's nodes",
    "one that was never made": "ls_0123456789ab_" + "a" * 43, "a bound too long": "ls_0123456789ab_" + "a" * 5000,
}  # fmt: skip


def test_the_table_has_every_entry_point_and_no_other():
    paths = {"/livez", "/readyz", "/metrics", "/status.json", *page.FILES}
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
FORGED = ("Clients/Heartbeat", "Clients/Acquire", "Clients/Await", "Clients/Release", "Clients/Restore")


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


def test_files_are_for_shards_whatever_the_token(gated):
    """Of any tenant, and of the operator; tests/unit/control/test_node0_files.py has what a shard gets."""
    guesses = ("", "1", "of this run's nodes", gated.shard.memory.instance[::-1])
    for token, guess in itertools.product([*gated.tokens.values(), *NOT_GOOD.values()], guesses):
        proof = pb.ShardProof(shard=0, instance=guess)
        with pytest.raises(errors.PermissionDeniedError, match="not of the registered process"):
            gated.ask(token, "Shards", "Files", pb.FilesRequest(proof=proof, version="v1"))


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
        assert (status == 401) != right.everybody
        assert not any(name in body for name in ADAPTERS)
        assert right.everybody or "WWW-Authenticate: Basic" in head.replace("www-authenticate: ", "WWW-Authenticate: ")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours")), Authority(tmp_path_factory.mktemp("theirs"), "stranger")


@pytest.fixture(scope="module")
def served(tmp_path_factory, authorities):
    ours, _ = authorities
    cert, key = ours.issue("server")
    config = ServeConfig(base_model="x", tls_cert=cert, tls_key=key, tls_ca=ours.ca, tls_client_ca=ours.ca)
    with contextlib.ExitStack() as stack:
        gated = Gated(tmp_path_factory.mktemp("served"), stack, tls=tls.server_credentials(config))
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
        with pytest.raises(errors.ServerUnavailableError, match="cannot be reached"):
            who(gated, **refused)


def serial(address):
    host, _, port = address.rpartition(":")
    shown = ssl.get_server_certificate((host, int(port)), timeout=HANG_SECONDS)
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


def test_a_certificate_is_renewed_while_it_serves(served, authorities, tmp_path):
    gated, config = served
    ours, _ = authorities
    with contextlib.closing(HttpServer("127.0.0.1", 0, lambda: "", None, tls=tls.context(config))) as http:
        addresses = gated.address, f"127.0.0.1:{http.port}"
        before = [serial(address) for address in addresses]
        ours.issue("server")
        renewed = [serial(address) for address in addresses]
        assert all(new > old for new, old in zip(renewed, before, strict=True))
        config.tls_cert.write_text("nonsense")
        with pytest.raises(errors.ConfigError, match=r"--tls-cert .*: got what does not fit together"):
            tls.context(config)
        assert serial(addresses[1]) == renewed[1], "what cannot be read changes nothing"
        ours.issue("server")
        assert serial(addresses[0]) > renewed[0]


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
    ({"tls_cert": "a", "tls_key": "b"}, "tls-ca: got none with --tls-cert"),
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
        shown.authorization()
    for text in ("first", "second"):
        file.write_text(f"{text}\n")
        assert shown.authorization() == f"Bearer {text}"
    own = Credentials.of({"LORA_SERVER_TOKEN_FILE": str(file), "LORA_SERVER_TOKEN": "own"})
    assert own.authorization() == "Bearer own"

"""Every entry point, every role of every tenant, and no token: a caller without the right gets nothing."""

import base64
import itertools

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lora_server.access.identity import Identity, Role
from lora_server.access.rights import CHANGES, RIGHTS
from lora_server.control.http import page
from lora_server.errors import LoraServerError, PermissionDeniedError, UnauthenticatedError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.rpc import open_channel
from tests.support.gated import ADAPTERS, TENANTS

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
    refused = 0
    for (tenant, role), token in gated.tokens.items():
        if RIGHTS[call].allows(Identity(tenant, role)):
            continue
        with pytest.raises(PermissionDeniedError, match=f"{call}: got a token of {role}") as denied:
            gated.ask(token, service, method, request)
        assert not any(name in str(denied.value) for name in ADAPTERS)
        refused += 1
    for token in NOT_GOOD.values():
        with pytest.raises(UnauthenticatedError):
            gated.ask(token, service, method, request)
        refused += 1
    expected = sum(not RIGHTS[call].allows(Identity(*one)) for one in itertools.product(TENANTS, Role))
    assert refused == expected + len(NOT_GOOD)


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
        except LoraServerError as error:
            said = str(error)
            assert not isinstance(error, UnauthenticatedError)
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
        with pytest.raises(PermissionDeniedError, match="not of the registered process"):
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

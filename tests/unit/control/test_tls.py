"""TLS of the control plane: certificates both ways, renewed while it serves; and what may be open without."""

import contextlib
import ssl

import pytest
from cryptography import x509

from lora_server.access import exposure, tls
from lora_server.access.identity import Role
from lora_server.config import ServeConfig
from lora_server.control.http.server import HttpServer
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel
from tests.support.certificates import Authority
from tests.support.gated import Gated
from tests.support.serving import HANG_SECONDS


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
        with pytest.raises(ServerUnavailableError, match="cannot be reached"):
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
        with pytest.raises(ConfigError, match=r"--tls-cert .*: got what does not fit together"):
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
        with pytest.raises(ConfigError, match=f"{missing}.*--insecure"):
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
    with pytest.raises((ValueError, ConfigError), match=said):
        if settings.keys() & {"tls_cert", "tls_client_ca"}:
            ServeConfig(base_model="x", **settings)
        else:
            open_channel("127.0.0.1:1", Credentials.of(settings))


def test_the_token_file_is_read_again_for_each_call(tmp_path):
    file = tmp_path / "token"
    shown = Credentials.of({"LORA_SERVER_TOKEN_FILE": str(file)})
    with pytest.raises(ConfigError, match=r"LORA_SERVER_TOKEN_FILE: .* cannot be read"):
        shown.authorization()
    for text in ("first", "second"):
        file.write_text(f"{text}\n")
        assert shown.authorization() == f"Bearer {text}"
    own = Credentials.of({"LORA_SERVER_TOKEN_FILE": str(file), "LORA_SERVER_TOKEN": "own"})
    assert own.authorization() == "Bearer own"

"""The certificate that identifies a shard to its clients. Its key never leaves this process."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from lora_server.access.tls import load_pem
from lora_server.transport.tls import ShardCertificate

# it lasts as long as its process, whatever other hosts' clocks say
BEGINS, ENDS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def shard_certificate(shard: int) -> ShardCertificate:
    """Create a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"lora-server shard {shard}")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(BEGINS).not_valid_after(ENDS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    signed = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return ShardCertificate(signed.public_bytes(Encoding.DER), _context(signed.public_bytes(Encoding.PEM) + private))


def _context(pem: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.num_tickets = 0  # nothing outlives a connection
    load_pem(made, pem)
    return made

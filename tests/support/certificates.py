"""Certificates for tests, by an authority of their own."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """`ca` is its certificate's file."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory, self._key, self._name = directory, ec.generate_private_key(ec.SECP256R1()), _named(name)
        self._serial = 0
        self._certificate = self._sign(self._name, self._key, None)
        self.ca = directory / f"{name}.pem"
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, begins: float = -1, ends: float = 1, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """Files of a certificate for an address and its key; again under the same name, others in their place.

        It is good between two days from now."""
        key, files = (
            ec.generate_private_key(ec.SECP256R1()),
            (self._directory / f"{name}.crt", self._directory / f"{name}.key"),
        )
        subject = x509.IPAddress(ipaddress.ip_address(address))
        certificate = self._sign(_named(name), key, subject, begins, ends)
        shown = certificate.public_bytes(serialization.Encoding.PEM)
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        for file, content in zip(files, (shown, private), strict=True):
            file.with_suffix(".new").write_bytes(content)
            file.with_suffix(".new").replace(file)
        return files

    def _sign(self, subject, key, address, begins=-1.0, ends=1.0):
        self._serial += 1
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(self._serial)
        builder = builder.not_valid_before(now + begins * DAY).not_valid_after(now + ends * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=address is None, path_length=None), critical=True)
        if address is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

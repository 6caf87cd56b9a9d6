"""Signatures by the keys of the startup kits, so that a site knows which party sent a message.

FLARE names the caller of a message by a routing header. A signature does not depend on that header.
Only the holder of the server's key can send requests to a site, only the holder of a site's key can
answer for the site, and only the lead can submit a plan. A signature covers its purpose, the job,
the site and the content, so it cannot be used for another message.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from fedbilevel.errors import PolicyError, SettingError

LEAD = "lead"  # the role in the lead's certificate
_PSS = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=32)


def _covered(purpose: str, parts: tuple[bytes | str, ...]) -> bytes:
    """Return the bytes that a signature covers. Every part has its own hash, so different lists of
    parts never give the same bytes."""
    hashes = [hashlib.sha256(part.encode() if isinstance(part, str) else part).digest() for part in (purpose, *parts)]
    return b"fedbilevel" + b"".join(hashes)


class Signer:
    """Signs with the key of a kit's owner: the server, a site or the lead."""

    def __init__(self, kit: Path) -> None:
        startup = kit / "startup"
        name = "server" if (startup / "server.key").is_file() else "client"
        try:
            key = load_pem_private_key((startup / f"{name}.key").read_bytes(), password=None)
            self.certificate = x509.load_pem_x509_certificate((startup / f"{name}.crt").read_bytes()).public_bytes(
                Encoding.DER
            )
        except (OSError, ValueError) as error:
            raise SettingError(
                f"the key or certificate in {startup} cannot be read ({error}): make the kit again."
            ) from None
        if not isinstance(key, rsa.RSAPrivateKey):
            raise SettingError(
                f"{startup / name}.key is not an RSA key, expected one: make the kit again with nvflare 2.9."
            )
        self._key = key

    def sign(self, purpose: str, *parts: bytes | str) -> bytes:
        return self._key.sign(_covered(purpose, parts), _PSS, SHA256())


class Party:
    """A party with a certificate from the federation's authority."""

    def __init__(self, certificate: bytes, root: Path) -> None:
        try:
            found = x509.load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(x509.load_pem_x509_certificate(root.read_bytes()))
        except (ValueError, TypeError, InvalidSignature):
            raise PolicyError(
                "the caller's certificate is not from this federation's authority: use a kit that its lead made."
            ) from None
        if not found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc:
            raise PolicyError(
                "the caller's certificate has expired or is not valid yet: renew it, or set the clock right."
            )
        self._key = found.public_key()
        self.name, self.role = (_attribute(found, oid) for oid in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME))

    def signed(self, signature: bytes, purpose: str, *parts: bytes | str) -> bool:
        if not isinstance(self._key, rsa.RSAPublicKey):
            return False
        try:
            self._key.verify(signature, _covered(purpose, parts), _PSS, SHA256())
        except InvalidSignature:
            return False
        return True


def _attribute(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> str:
    found = certificate.subject.get_attributes_for_oid(oid)
    return str(found[0].value) if len(found) == 1 else ""


def root_of(kit: Path) -> Path:
    return kit / "startup" / "rootCA.pem"


def server_of(kit: Path) -> str:
    """Return the name in the server's certificate, as a site's kit states it."""
    return str(json.loads((kit / "startup" / "fed_client.json").read_text())["servers"][0]["identity"])

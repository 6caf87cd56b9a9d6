"""Signatures by the keys of kits: what they cover, and whose they must be."""

from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fedbilevel.errors import PolicyError, SettingError
from fedbilevel.sites.flare import configuration, identity, job, kits
from fedbilevel.sites.flare.identity import Party, Signer, root_of
from fedbilevel.sites.plan import plan_digest

PLAN = {"name": "cleaning", "sites": ["north", "west"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity")
    kits.init(folder / "federation.toml", sites=["north", "west"])
    return kits.provision(folder / "federation.toml", folder / "kits")


def test_a_signature_covers_purpose_job_site_and_message(made):
    server = Signer(made["server"])
    party = Party(server.certificate, root_of(made["north"]))
    signature = server.sign("call", "job-1", "north", b"message")
    assert (party.name, party.name) == ("localhost", identity.server_of(made["north"]))
    assert party.signed(signature, "call", "job-1", "north", b"message")
    others = [
        ("answer", "job-1", "north", b"message"),
        ("call", "job-2", "north", b"message"),
        ("call", "job-1", "west", b"message"),
        ("call", "job-1", "north", b"messages"),
        ("call", "job-1north", b"message"),
        ("call", "job-1", "northmessage"),
    ]
    assert [party.signed(signature, *parts) for parts in others] == [False] * len(others)
    assert not party.signed(b"", "call", "job-1", "north", b"message")


def test_a_signature_of_another_kit_is_not_accepted(made):
    party = Party(Signer(made["server"]).certificate, root_of(made["north"]))
    assert not party.signed(Signer(made["west"]).sign("call", "job-1", "north", b"m"), "call", "job-1", "north", b"m")
    assert Party(Signer(made["west"]).certificate, root_of(made["north"])).name == "west"


def test_a_plan_counts_when_a_lead_signed_it(made):
    packed = configuration.packed(PLAN)
    found = job.submitted(made["north"], packed, configuration.sealed(made["lead@example.org"], packed), "job-1")
    assert found == (plan_digest(PLAN), "lead@example.org", "job-1")
    other = configuration.packed({**PLAN, "options": {"batch_size": 1}})
    for seal, plan in (
        (configuration.sealed(made["lead@example.org"], packed), other),
        (configuration.sealed(made["west"], packed), packed),
        (configuration.sealed(made["server"], packed), packed),
    ):
        with pytest.raises(PolicyError, match="not signed by a lead of this federation"):
            job.submitted(made["north"], plan, seal, "job-1")
    with pytest.raises(PolicyError, match="the job brings no plan that a lead has signed"):
        job.submitted(made["north"], packed, "", "job-1")


def certificate(key, issuer_key, issuer, *, days=10, name="localhost"):
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(1)
    )
    made = made.not_valid_before(now - timedelta(days=20)).not_valid_after(now + timedelta(days=days))
    return made.sign(issuer_key, SHA256())


def test_certificates_of_other_authorities_expired_or_damaged_are_refused(made, tmp_path):
    key, authority = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    root = certificate(authority, authority, None, name="authority")
    (tmp_path / "root.pem").write_bytes(root.public_bytes(Encoding.PEM))
    good = certificate(key, authority, root.subject).public_bytes(Encoding.DER)
    assert Party(good, tmp_path / "root.pem").name == "localhost"
    for bad in (good, b"no certificate"):
        with pytest.raises(PolicyError, match="not from this federation's authority"):
            Party(bad, root_of(made["north"]))
    with pytest.raises(PolicyError, match="has expired or is not valid yet"):
        Party(certificate(key, authority, root.subject, days=-1).public_bytes(Encoding.DER), tmp_path / "root.pem")
    elliptic = certificate(ec.generate_private_key(ec.SECP256R1()), authority, root.subject)
    assert not Party(elliptic.public_bytes(Encoding.DER), tmp_path / "root.pem").signed(b"x", "call")


def test_a_kit_without_a_usable_key_is_named(made, tmp_path):
    with pytest.raises(
        SettingError, match=r"the key or certificate in .*startup cannot be read .*: make the kit again"
    ):
        Signer(tmp_path)
    (tmp_path / "startup").mkdir()
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "startup" / "client.key").write_bytes(key)
    (tmp_path / "startup" / "client.crt").write_bytes((made["north"] / "startup" / "client.crt").read_bytes())
    with pytest.raises(SettingError, match=r"client\.key is not an RSA key"):
        Signer(tmp_path)

"""Certificates of kits: renewed for the same key, refused where they do not fit, announced before
they end."""

import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedbilevel[federation]'")

from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding

from fedbilevel.cli.main import cli
from fedbilevel.errors import FedBilevelError
from fedbilevel.sites.flare import certificates, kits, processes
from fedbilevel.sites.flare.local import LEAD, free_port
from support.sites.real_loopback import federation_of

pytestmark = pytest.mark.wait

SITES = ["north", "south"]
DAY = timedelta(days=1)


def provisioned(folder, sites=SITES):
    kits.init(folder / "federation.toml", sites=sites)
    return kits.provision(folder / "federation.toml", folder / "kits")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return provisioned(folder)


@pytest.fixture
def made(once, tmp_path):
    """The same kits for each test, which may spoil them."""
    shutil.copytree(once["server"].parent, tmp_path / "kits")
    return {name: tmp_path / "kits" / name for name in once}


def said(*words):
    done = CliRunner().invoke(cli, ["federation", *map(str, words)])
    if isinstance(done.exception, FedBilevelError):
        return str(done.exception)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def signed(out, name, end, begin=None, **changes):
    """A certificate of this authority with other dates, or for another owner or key."""
    authority = certificates.Authority.of(out)
    old = authority.certificate(name)
    public = changes.get("public", old.public_key())
    begin = begin or end - 10 * DAY
    builder = x509.CertificateBuilder(old.issuer, old.subject, public, x509.random_serial_number(), begin, end)
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(changes.get("key", authority.key), hashes.SHA256()).public_bytes(Encoding.PEM)


def replace(kit, content):
    """As if the kit and the authority's copy had been made then."""
    certificates.own(kit).write_bytes(content)
    certificates.keep(kit.parent / kits.AUTHORITY, kit.name, content)


def age(kit, end):
    replace(kit, signed(kit.parent, kit.name, end))


def soon():
    return datetime.now(UTC) + 5 * DAY


def test_a_renewal_is_the_same_certificate_for_longer_and_no_key_travels(made, tmp_path):
    age(made["north"], soon())
    key = (made["north"] / "startup/client.key").read_bytes()
    old = certificates.read(certificates.own(made["north"]))
    out = made["server"].parent
    assert "renewal-north.crt" in said("renew", "north", "--kits", out, "--out", tmp_path / "post")
    assert [path.name for path in (tmp_path / "post").iterdir()] == ["renewal-north.crt"]
    file = tmp_path / "post/renewal-north.crt"
    assert "PRIVATE" not in file.read_text()
    assert file.read_text().count("BEGIN CERTIFICATE") == 1
    assert "is valid until" in said("install-renewal", file, "--kit", made["north"])
    new = certificates.read(certificates.own(made["north"]))
    assert new.not_valid_after_utc > old.not_valid_after_utc + 300 * DAY
    assert (new.subject, new.issuer, new.public_key()) == (old.subject, old.issuer, old.public_key())
    assert [(one.oid, one.value) for one in new.extensions] == [(one.oid, one.value) for one in old.extensions]
    assert new.serial_number != old.serial_number
    assert (made["north"] / "startup/client.key").read_bytes() == key
    verified = subprocess.run(
        ["openssl", "verify", "-CAfile", made["server"] / "startup/rootCA.pem", certificates.own(made["north"])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert verified.stdout.strip().endswith("OK"), verified.stderr


def test_all_kits_are_renewed_where_none_is_named_also_after_they_were_given_away(made, tmp_path):
    for name, kit in made.items():
        age(kit, soon())
        kit.rename(tmp_path / name)
    files = certificates.renew(tmp_path / "kits", [], tmp_path)
    assert set(files) == set(made)
    for name, file in files.items():
        certificates.install(file, tmp_path / name)
        assert certificates.notices(tmp_path / name) == []


def test_the_authority_lasts_ten_years_and_a_kit_one(made):
    root = certificates.read(made["north"] / "startup" / certificates.ROOT)
    assert root.not_valid_after_utc - datetime.now(UTC) > 3600 * DAY
    assert 350 * DAY < certificates.ends(made["north"]) - datetime.now(UTC) < 370 * DAY


def test_an_authority_of_an_earlier_version_still_makes_kits(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "ROOT_DAYS", 360)
    provisioned(tmp_path, ["north"])
    monkeypatch.undo()
    toml = tmp_path / "federation.toml"
    toml.write_text(toml.read_text() + '\n[[site]]\nname = "south"\norg = "south"\n')
    assert kits.provision(toml, tmp_path / "kits")["south"].is_dir()
    shutil.rmtree(tmp_path / "kits" / kits.AUTHORITY / certificates.COPIES)  # which that version did not keep
    sentence = said("renew", "south", "--kits", tmp_path / "kits")
    assert "and no certificate can last longer: the lead has to make all kits anew, into another folder." in sentence


def other_name(made):
    return signed(made["server"].parent, "south", soon() + 500 * DAY)


def other_key(made):
    public = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    return signed(made["server"].parent, "north", soon() + 500 * DAY, public=public)


def other_authority(made):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return signed(made["server"].parent, "north", soon() + 500 * DAY, key=key)


def earlier(made):
    return signed(made["server"].parent, "north", soon())


REFUSED = {
    "of another site": (other_name, "is for south and not for north"),
    "of another key": (other_key, "is for another key than that of the kit"),
    "of another authority": (other_authority, "was not signed by the kit's authority"),
    "an earlier one": (earlier, "not later than the certificate that is there"),
    "junk": (lambda made: b"junk", "is not a certificate in PEM form"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_renewal_that_does_not_fit_changes_nothing(made, tmp_path, what):
    content, sentence = REFUSED[what]
    (tmp_path / "renewal.crt").write_bytes(content(made))
    before = certificates.own(made["north"]).read_bytes()
    assert sentence in said("install-renewal", tmp_path / "renewal.crt", "--kit", made["north"])
    assert certificates.own(made["north"]).read_bytes() == before


def test_a_kit_that_cannot_be_renewed_is_named(made, tmp_path):
    out = made["server"].parent
    assert "There is no kit named 'nort'. Did you mean 'north'?" in said("renew", "nort", "--kits", out)
    assert "there is no authority in" in said("renew", "--kits", made["north"])
    copy = out / kits.AUTHORITY / certificates.COPIES / "north.crt"
    copy.write_bytes(other_authority(made))
    assert "the certificate of north was not signed by the authority in" in said("renew", "north", "--kits", out)
    copy.unlink()
    made["north"].rename(tmp_path / "north")
    kept = f"no certificate of north is kept: put the .crt file in startup of its kit at {copy}."
    assert kept in said("renew", "--kits", out)
    south = made["south"]
    assert "holds no certificate in startup" in said("install-renewal", certificates.own(south), "--kit", tmp_path)
    (south / "startup/client.key").write_text("")
    assert "client.key is not a private key" in said("install-renewal", certificates.own(south), "--kit", south)
    (out / kits.AUTHORITY / "federation/state/cert.json").write_text("{")
    assert "does not hold the authority's key: put a copy back" in said("renew", "--kits", out)


def test_an_end_within_a_month_is_announced_and_an_end_in_the_past_refuses_the_start(made):
    lead = made["lead@example.org"]
    assert certificates.notices(lead) == []
    age(made["north"], soon())
    ended = datetime.now(UTC) - DAY
    age(made["south"], ended)
    first, second = certificates.notices(lead)  # of all kits: the authority lies beside the lead's
    remedy = "renew it with `fedbilevel federation renew`."
    assert first == f"the certificate of north ends on {soon():%Y-%m-%d}, in 4 days: {remedy}"
    assert second == f"the certificate of south ended on {ended:%Y-%m-%d}: {remedy}"
    certificates.check(made["north"])
    sentence = said("start-site", made["south"])
    assert f"client.crt ended on {ended:%Y-%m-%d}: ask the lead for `fedbilevel federation renew south`" in sentence
    assert processes.running(made["south"]) == {}


@pytest.mark.slow
def test_a_site_connects_with_a_renewed_certificate_and_not_with_one_that_has_ended(tmp_path):
    """Real processes, none of which has seen the renewed certificates of the others or of the
    server."""
    kits.init(tmp_path / "federation.toml", sites=SITES, port=free_port(), lead=LEAD)
    made = kits.provision(tmp_path / "federation.toml", tmp_path / "kits")
    for kit in made.values():
        age(kit, datetime.now(UTC) - DAY)
    with pytest.raises(FedBilevelError, match="ended on"), federation_of(tmp_path, SITES):
        pass
    for name, file in certificates.renew(tmp_path / "kits", [], tmp_path).items():
        certificates.install(file, made[name])
    with federation_of(tmp_path, SITES) as running:  # where the lead asks until both are connected
        assert running.pids("north")["parent"]

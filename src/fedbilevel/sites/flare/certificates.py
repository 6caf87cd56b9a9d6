"""Certificates of kits: their end dates, and their renewal for the same keys.

Only the owner of a kit has the kit's private key. The authority keeps a copy of every certificate,
which holds the public key, and renews that copy. The file that travels to the owner is therefore
not secret. FLARE signs no files of such kits (there is no startup/signature.json), so nothing else
has to change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.runs.record import make_folder, write_whole

AUTHORITY = "authority"  # folder beside the kits, with the key that signs them
COPIES = "certificates"  # in the authority's folder: NAME.crt of every kit
ROOT = "rootCA.pem"
SERVER = "server"
LIFE = timedelta(days=360)  # FLARE's default
ROOT_DAYS = 3650  # FLARE's default is 360, and no certificate can outlast the root
SOON = timedelta(days=30)


def own(kit: Path) -> Path:
    """Find the file with the certificate of the kit's owner."""
    found = [path for name in ("server.crt", "client.crt") if (path := kit / "startup" / name).is_file()]
    if not found:
        raise SettingError(f"{kit} holds no certificate in startup: name the folder of a kit.")
    return found[0]


def read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise SettingError(f"{path} is not a certificate in PEM form: name another file.") from None


def ends(kit: Path) -> datetime:
    """Return the time at which the kit expires: the earlier end of its own and the root
    certificate."""
    return min(read(path).not_valid_after_utc for path in (own(kit), own(kit).with_name(ROOT)))


def check(kit: Path) -> None:
    """Raise if a certificate of the kit has ended."""
    mine, root = own(kit), own(kit).with_name(ROOT)
    for path, remedy in ((root, _ANEW), (mine, _RENEW.format(_name(read(mine))))):
        if (end := read(path).not_valid_after_utc) <= datetime.now(UTC):
            raise SettingError(f"{path} ended on {end:%Y-%m-%d}: {remedy}.")


_ANEW = "the lead has to make all kits anew, into another folder"
_RENEW = "ask the lead for `fedbilevel federation renew {}`, then use `fedbilevel federation install-renewal`"


def notice(certificate: x509.Certificate) -> str | None:
    """Return a sentence if the certificate has ended or ends soon, otherwise None."""
    end, name, now = certificate.not_valid_after_utc, _name(certificate), datetime.now(UTC)
    if end - now > SOON:
        return None
    when = f"ended on {end:%Y-%m-%d}" if end <= now else f"ends on {end:%Y-%m-%d}, in {(end - now).days} days"
    return f"the certificate of {name} {when}: renew it with `fedbilevel federation renew`."


def notices(kit: Path) -> list[str]:
    """Return sentences about the certificate of this kit, or about those of all kits if the
    authority's folder is beside the kit."""
    paths = {path for path in (kit.resolve().parent / AUTHORITY / COPIES).glob("*.crt")} or {own(kit)}
    return [text for path in sorted(paths) if (text := notice(read(path)))]


def _name(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else "nobody"


def _is_issued_by(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


# ---- at the authority ------------------------------------------------------------------------------------


class Authority(NamedTuple):
    """The authority of a federation, read from its folder beside the kits."""

    folder: Path
    root: x509.Certificate
    key: RSAPrivateKey
    names: list[str]  # of the kits

    @classmethod
    def of(cls, kits: Path) -> Authority:
        folder = kits / AUTHORITY
        try:
            project = json.loads((folder / "project.yml").read_text())
        except (OSError, ValueError):
            raise SettingError(f"there is no authority in {folder}: name the folder that `provision` made.") from None
        names = [SERVER, *(one["name"] for one in project["participants"][1:])]
        return cls(folder, *_root(folder / project["name"]), names)

    def certificate(self, name: str) -> x509.Certificate:
        copy, kit = self.folder / COPIES / f"{name}.crt", self.folder.parent / name
        if not copy.is_file() and not kit.is_dir():
            raise SettingError(f"no certificate of {name} is kept: put the .crt file in startup of its kit at {copy}.")
        found = read(copy if copy.is_file() else own(kit))
        if not _is_issued_by(found, self.root):
            raise SettingError(f"the certificate of {name} was not signed by the authority in {self.folder}: {_ANEW}.")
        return found

    def renewed(self, old: x509.Certificate) -> x509.Certificate:
        """Make a certificate for the same owner, key and extensions, valid for another 360 days or
        until the root certificate ends."""
        now = datetime.now(UTC)
        end = min(now + LIFE, self.root.not_valid_after_utc)
        if end <= old.not_valid_after_utc:
            last = f"the authority in {self.folder} ends on {self.root.not_valid_after_utc:%Y-%m-%d}"
            raise SettingError(f"{last}, and no certificate can last longer: {_ANEW}.")
        key, number = old.public_key(), x509.random_serial_number()
        builder = x509.CertificateBuilder(old.issuer, old.subject, key, number, now, end)
        for extension in old.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        return builder.sign(self.key, hashes.SHA256())


def keep(authority: Path, name: str, certificate: bytes) -> None:
    """Keep a copy of a kit's certificate for its renewal, because the kit itself is given away."""
    make_folder(authority / COPIES)
    write_whole(authority / COPIES / f"{name}.crt", certificate)


def _root(place: Path) -> tuple[x509.Certificate, RSAPrivateKey]:
    """Read the certificate and key of the authority from FLARE's own file."""
    path = place / "state" / "cert.json"
    try:
        state = json.loads(path.read_text())
        key = load_pem_private_key(state["root_pri_key"].encode(), None)
        assert isinstance(key, RSAPrivateKey)  # FLARE makes no other
        return x509.load_pem_x509_certificate(state["root_cert"].encode()), key
    except (OSError, ValueError, KeyError):
        raise SettingError(f"{path} does not hold the authority's key: put a copy back, or {_ANEW}.") from None


def root_days(place: Path) -> int:
    """Return the number of days for which the authority's own certificate is valid. FLARE needs the
    same number each time it makes kits."""
    if not (place / "state" / "cert.json").is_file():
        return ROOT_DAYS
    root, _ = _root(place)
    return (root.not_valid_after_utc - root.not_valid_before_utc).days


def renew(kits: Path, names: Sequence[str], to: Path) -> dict[str, Path]:
    """Write a new certificate for each named kit, or for all kits if none is named. The files hold
    no secret."""
    authority = Authority.of(kits)
    for name in names:
        if name not in authority.names:
            raise UnknownNameError("kit", name, authority.names)
    made = {name: authority.renewed(authority.certificate(name)) for name in names or authority.names}
    make_folder(to)
    files = {name: to / f"renewal-{name}.crt" for name in made}
    for name, certificate in made.items():
        content = certificate.public_bytes(Encoding.PEM)
        write_whole(files[name], content)
        keep(authority.folder, name, content)
    return files


# ---- at the owner of a kit ----------------------------------------------------------------------------------


def install(file: Path, kit: Path) -> datetime:
    """Check a renewed certificate, put it into a kit, and return the time at which the certificate
    ends."""
    path, new = own(kit), read(file)
    secret = path.with_suffix(".key")
    old, root = read(path), read(path.with_name(ROOT))
    try:
        key = load_pem_private_key(secret.read_bytes(), None)
    except (OSError, ValueError):
        raise SettingError(f"{secret} is not a private key: the lead has to make this kit again.") from None
    end, before = new.not_valid_after_utc, old.not_valid_after_utc
    faults = {
        f"is for {_name(new)} and not for {_name(old)}": new.subject != old.subject,
        "is for another key than that of the kit": new.public_key() != key.public_key(),
        "was not signed by the kit's authority": not _is_issued_by(new, root),
        f"ends on {end:%Y-%m-%d}, not later than the certificate that is there": end <= before,
        f"ended on {end:%Y-%m-%d}": end <= datetime.now(UTC),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise SettingError(f"{file} {fault}: ask the lead for a renewal of {kit}, and leave the kit as it is.")
    write_whole(path, new.public_bytes(Encoding.PEM))
    return end

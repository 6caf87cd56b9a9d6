"""Startup kits: from federation.toml to one signed kit per organisation, in production mode."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.errors import SettingError
from fedbilevel.runs.record import write_whole
from fedbilevel.runs.runfile import NAME
from fedbilevel.sites.flare import certificates, production

PORT = 8002
AUTHORITY, SERVER = certificates.AUTHORITY, certificates.SERVER
SITES = "sites.json"  # in the lead's kit: the sites of a run that names none
_STARTED = ("startup/sub_start.sh", "local/resources.json", "local/authorization.json", "local/log_config.json")
FILES = {  # of a complete kit, by kind
    "server": ("startup/fed_server.json", "startup/server.crt", "startup/server.key", "startup/rootCA.pem", *_STARTED),
    "site": ("startup/fed_client.json", "startup/client.crt", "startup/client.key", "startup/rootCA.pem", *_STARTED),
    "lead": ("startup/fed_admin.json", "startup/client.crt", "startup/client.key", "startup/rootCA.pem"),
}
_ORG = re.compile(r"[A-Za-z0-9_]+")
_HOST, _MAIL = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*"), re.compile(r"[A-Za-z0-9._+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")

TEMPLATE = """\
# Who takes part. From this file `fedbilevel federation provision` makes one signed startup kit for each.

name = "{name}"
lead = "{lead}"    # who submits runs and watches them

[server]
host = "{host}"    # the name by which the sites reach the server; "localhost": on this machine only
port = {port}      # the one port that must be open, on the server only
{sites}"""
SITE_TEMPLATE = """
[[site]]
name = "{name}"
org = "{org}"
"""


@dataclass(frozen=True)
class FederationFile:
    name: str
    lead: str
    host: str
    port: int
    sites: dict[str, str]  # organisation by name of the site


def init(
    path: Path,
    *,
    sites: list[str],
    name: str = "federation",
    lead: str = "lead@example.org",
    host: str = "localhost",
    port: int = PORT,
) -> None:
    """Write a federation.toml for the user to edit."""
    if path.exists():
        raise SettingError(f"{path} exists: edit it, or give another name.")
    entries = "".join(SITE_TEMPLATE.format(name=site, org=re.sub(r"\W", "_", site)) for site in sites)
    text = TEMPLATE.format(name=name, lead=lead, host=host, port=port, sites=entries)
    for value in (name, lead, host, *sites):
        if set(value) & set('"\\\n'):
            raise SettingError(f"{value!r} cannot be a name: leave out quotes and line breaks.")
    _parsed(text, path)
    try:
        path.write_text(text)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error.strerror}): name another place.") from None


def read(path: Path) -> FederationFile:
    try:
        return _parsed(path.read_text(), path)
    except FileNotFoundError:
        raise SettingError(f"there is no {path}: write one with `fedbilevel federation init`.") from None
    except (OSError, UnicodeDecodeError) as error:
        fix = "name another file, or write one with `fedbilevel federation init`"
        raise SettingError(f"{path} cannot be read as a federation.toml ({error}): {fix}.") from None


def _parsed(text: str, path: Path) -> FederationFile:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path} is not TOML: {error}.") from None
    _known(content, {"name", "lead", "server", "site"}, f"{path}")
    server, entries = content.get("server", {}), content.get("site", [])
    if (
        not isinstance(server, dict)
        or not isinstance(entries, list)
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        expected = "one table [server] and one table [[site]] for each site"
        raise SettingError(f"{path} has server or site in another form, expected {expected}.")
    _known(server, {"host", "port"}, f"[server] of {path}")
    if not entries:
        raise SettingError(f"{path} names no site: add a table [[site]] with name and org for each.")
    sites: dict[str, str] = {}
    for number, entry in enumerate(entries, start=1):
        place = f"[[site]] number {number} of {path}"
        _known(entry, {"name", "org"}, place)
        site = _text(entry, "name", None, NAME, "letters, digits, - and _", place)
        if site in sites:
            raise SettingError(f"{path} names the site {site!r} twice: every site needs a name of its own.")
        if site.lower() in (SERVER, AUTHORITY, "localhost", str(server.get("host", "")).lower()):
            raise SettingError(f"{place} is named {site!r}, which is taken: choose another name.")
        sites[site] = _text(entry, "org", None, _ORG, "letters, digits and _", place)
    port = server.get("port", PORT)
    if type(port) is not int or not 0 < port < 65536:
        raise SettingError(f"port in [server] of {path} is {port!r}, expected a whole number from 1 to 65535.")
    return FederationFile(
        name=_text(content, "name", None, NAME, "letters, digits, - and _", f"{path}"),
        lead=_text(content, "lead", None, _MAIL, "an e-mail address", f"{path}"),
        host=_text(server, "host", "localhost", _HOST, "the name of a host", f"[server] of {path}"),
        port=port,
        sites=sites,
    )


def _known(table: dict[str, Any], names: set[str], place: str) -> None:
    unknown = sorted(set(table) - names)
    if unknown:
        raise SettingError(f"{place} has the unknown entry {unknown[0]!r}, expected {', '.join(sorted(names))}.")


def _text(
    table: dict[str, Any], name: str, default: str | None, pattern: re.Pattern[str], expected: str, place: str
) -> str:
    value = table.get(name, default)
    if value is None:
        raise SettingError(f'{place} has no {name}: add {name} = "...", {expected}.')
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise SettingError(f"{name} in {place} is {value!r}, expected {expected}.")
    return value


def provision(toml: Path, out: Path, *, allow: list[str] | None = None) -> dict[str, Path]:
    """Make the kits that `out` lacks, with one authority, and return the folders of all kits by
    name. Existing kits stay unchanged.

    allow: further classes on the allow-list of every kit, for tests.
    """
    federation = read(toml)
    authority = out / AUTHORITY
    kits = {
        SERVER: out / SERVER,
        **{site: out / site for site in federation.sites},
        federation.lead: out / federation.lead,
    }
    kinds = {SERVER: "server", federation.lead: "lead"}
    for name, kit in kits.items():
        if kit.exists():
            check_whole(kit, kinds.get(name, "site"))
    try:
        authority.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"the folder {authority} cannot be made ({error.strerror}): name another place.") from None
    authority.chmod(0o700)
    made = _issued(federation, toml, out)
    for name, kit in kits.items():
        if not kit.exists():
            source = made / (federation.host if name == SERVER else name)
            certificates.keep(authority, name, certificates.own(source).read_bytes())
            _make(source, kit, kinds.get(name, "site"), [*production.ALLOWED, *(allow or [])])
    write_whole(out / federation.lead / SITES, json.dumps(list(federation.sites)).encode())
    shutil.rmtree(made)
    state = authority / federation.name / "state" / "cert.json"
    root = {name: value for name, value in json.loads(state.read_text()).items() if name.startswith("root_")}
    write_whole(state, json.dumps(root).encode())
    state.chmod(0o600)  # holds the authority's own key; a kit's private key is only in that kit
    return kits


def _issued(federation: FederationFile, toml: Path, out: Path) -> Path:
    """Let FLARE make kits with new keys, and return the folder of these kits."""
    authority = out / AUTHORITY
    project, content = (
        authority / "project.yml",
        _project(federation, certificates.root_days(authority / federation.name)),
    )
    if (
        project.exists()
        and (before := json.loads(project.read_text())["participants"][0]) != content["participants"][0]
    ):
        old, new = f"{before['name']}:{before['fed_learn_port']}", f"{federation.host}:{federation.port}"
        raise SettingError(f"the kits in {out} are for a server at {old}, {toml} says {new}: use another folder.")
    write_whole(project, json.dumps(content, indent=2).encode())  # JSON is YAML
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.lighter.provision", "-p", str(project), "-w", str(authority), "--force"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    made = sorted((authority / federation.name).glob("prod_*"))
    if done.returncode or not made:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise SettingError(
            f"FLARE made no kits from {toml} ({said.rstrip('.')}): fix that file, or use another folder than {out}."
        )
    return made[-1]


def _make(source: Path, kit: Path, kind: str, allow: list[str]) -> None:
    """Make a kit beside its final path and rename it at the end, so that an interruption leaves no
    partial kit."""
    unfinished = kit.with_name(f".{kit.name}.unfinished")
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(mode=0o700)
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        unfinished.chmod(0o700)
        (unfinished / "startup").chmod(0o700)
        if kind != "lead":
            production.write_settings(unfinished, is_server=kind == "server", allow=allow)
        if kind == "server":
            production.settle(unfinished, kit)
        unfinished.rename(kit)
    except (OSError, shutil.Error) as error:
        raise SettingError(f"the kit {kit} cannot be made ({error}): make room, then run provision again.") from None


def check_whole(kit: Path, kind: str) -> None:
    """Raise if a kit is incomplete, for example after an interrupted provision."""
    for name in FILES[kind]:
        if not _is_whole(kit / name):
            what = "cut off" if (kit / name).is_file() else "missing"
            raise SettingError(
                f"the kit {kit} is incomplete ({name} is {what}): delete the kit folder and run provision again."
            )


def _is_whole(path: Path) -> bool:
    """Check whether a file that FLARE wrote is complete."""
    if not path.is_file():
        return False
    text = path.read_text(errors="replace").rstrip()
    if path.suffix == ".json":
        try:
            return isinstance(json.loads(text), dict)
        except ValueError:
            return False
    return path.suffix == ".sh" or text.endswith("-----")


def _project(federation: FederationFile, root_days: int) -> dict[str, Any]:
    part = "nvflare.lighter.impl"
    server = {
        "name": federation.host,
        "type": "server",
        "org": "server",
        "fed_learn_port": federation.port,
        "admin_port": federation.port,
    }
    sites = [{"name": name, "type": "client", "org": org} for name, org in federation.sites.items()]
    lead = {"name": federation.lead, "type": "admin", "org": "server", "role": "lead"}
    return {
        "api_version": 3,
        "name": federation.name,
        "description": "fedbilevel",
        "participants": [server, *sites, lead],
        "builders": [
            {"path": f"{part}.workspace.WorkspaceBuilder"},
            {"path": f"{part}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "grpc"}},
            {"path": f"{part}.cert.CertBuilder", "args": {"root_valid_days": root_days}},
            {"path": f"{part}.signature.SignatureBuilder"},
        ],
    }


def sites_of(kit: Path) -> list[str] | None:
    """Return all sites of the federation from the lead's kit, or None if the kit has no list of
    sites."""
    return json.loads((kit / SITES).read_text()) if (kit / SITES).is_file() else None

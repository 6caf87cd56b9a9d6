"""`fedbilevel federation`: runs between organisations, implemented in fedbilevel.sites.flare."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fedbilevel.cli import operator
from fedbilevel.cli.terminal import say, say_line
from fedbilevel.errors import SettingError
from fedbilevel.escapes import printable
from fedbilevel.sites import policy, view
from fedbilevel.sites.plan import read_plan

KIT = click.Path(exists=True, file_okay=False, path_type=Path)


@contextmanager
def _flare() -> Iterator[None]:
    """Raise a SettingError if an import in this context fails because FLARE is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("nvflare", "psutil", "cryptography"):
            raise
        raise SettingError(
            "federations between organisations need NVIDIA FLARE, which is not installed: "
            "pip install 'fedbilevel[federation]'."
        ) from None


def line(progress: dict[str, Any]) -> str:
    """Return a line on progress, cost, response times, and missing sites with the reasons."""
    parts = [
        f"outer iteration {progress.get('iteration')}"
        + (f"/{progress['num_iterations']}" if "num_iterations" in progress else "")
    ]
    if "rounds" in progress:
        parts.append(f"{progress['rounds']} rounds")
    if "megabytes" in progress:
        parts.append(f"{progress['megabytes']:.1f} MB")
    parts += [f"{name} {value:.4g}" for name, value in progress.get("figures", {}).items()]
    parts += [f"{site} {seconds:.2f} s" for site, seconds in progress.get("sites", {}).items()]
    for label, key in (("without", "missing"), ("flagged", "flagged"), ("capped", "capped")):
        parts += [f"{label} {site} ({reason})" for site, reason in progress.get(key, {}).items()]
    parts += [
        f"weight of {site} {'/'.join(map(str, weights))}" for site, weights in progress.get("weights", {}).items()
    ]
    for site, callers in progress.get("strangers", {}).items():
        parts += [f"{site} refused {times} calls of {caller}" for caller, times in callers.items()]
    return printable(", ".join(parts))


@click.group("federation")
def federation() -> None:
    """Run between organisations that share no data.

    Startup kits, a server, sites and runs, on NVIDIA FLARE with mutual TLS.
    """


@federation.command("init")
@click.argument("path", type=click.Path(path_type=Path), default=Path("federation.toml"))
@click.option("--sites", default="site-1,site-2", show_default=True, help="names of the sites (comma-separated list)")
@click.option("--name", default="federation", show_default=True, help="name of the federation")
@click.option(
    "--lead", default="lead@example.org", show_default=True, help="e-mail address of the lead, who submits runs"
)
@click.option("--host", default="localhost", show_default=True, help="host name of the server for the sites")
@click.option("--port", type=int, default=8002, show_default=True, help="port of the server")
def init_command(path: Path, sites: str, name: str, lead: str, host: str, port: int) -> None:
    """Write a federation.toml for you to edit."""
    with _flare():
        from fedbilevel.sites.flare import kits
    kits.init(
        path,
        sites=[part.strip() for part in sites.split(",") if part.strip()],
        name=name,
        lead=lead,
        host=host,
        port=port,
    )
    say(f"Written: {path}. Edit it, then: fedbilevel federation provision {path}")


@federation.command("provision")
@click.argument("toml", type=click.Path(path_type=Path), default=Path("federation.toml"))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("kits"),
    show_default=True,
    help="folder for the kits; existing kits are kept",
)
def provision_command(toml: Path, out: Path) -> None:
    """Make a signed startup kit for the server, each site and the lead."""
    with _flare():
        from fedbilevel.sites.flare import kits
    made = kits.provision(toml, out)
    for name, kit in made.items():
        say(f"{name:<24} {kit}")
    say(
        "Give each organisation its own folder, by a safe way: it holds a private key. "
        f"Keep {out / kits.AUTHORITY}, which signs kits, to yourself."
    )


@federation.command("renew")
@click.argument("names", nargs=-1)
@click.option(
    "--kits",
    "folder",
    type=KIT,
    default=Path("kits"),
    show_default=True,
    help="folder of the kits and the authority, from `provision`",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="folder for the new certificates (default: the current folder)",
)
def renew_command(names: tuple[str, ...], folder: Path, out: Path) -> None:
    """Make new certificates for the kits NAMES (default: all kits). Private keys do not change."""
    with _flare():
        from fedbilevel.sites.flare import certificates
    for name, path in certificates.renew(folder, names, out).items():
        say(f"{name:<24} {path}")
    say("Send each owner its file, which is not secret. The owner runs:")
    say("fedbilevel federation install-renewal FILE --kit KIT")


@federation.command("install-renewal")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kit", type=KIT, required=True, help="your startup kit")
def install_renewal_command(file: Path, kit: Path) -> None:
    """Install the renewed certificate FILE in KIT."""
    with _flare():
        from fedbilevel.sites.flare import certificates
    end = certificates.install(file, kit)
    say(f"{kit} is valid until {end:%Y-%m-%d}. A running server or site uses it after its next start.")


def with_metrics(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "serve /healthz and /metrics (Prometheus) on this port; 0: any free port (default: not served)"
    host = click.option("--metrics-host", default="127.0.0.1", show_default=True, help="address for --metrics-port")
    return click.option("--metrics-port", type=click.IntRange(0, 65535), default=None, help=text)(host(command))


@federation.command("start-server")
@click.argument("kit", type=KIT)
@with_metrics
def start_server_command(kit: Path, metrics_host: str, metrics_port: int | None) -> None:
    """Run the server of KIT until Ctrl-C, and restart it after a crash."""
    with _flare():
        from fedbilevel.sites.flare import processes
    if processes.name_of(kit) != "server":
        raise SettingError(f"{kit} is the kit of the site {processes.name_of(kit)!r}: use start-site.")
    _keep(processes.Supervised(kit, say=say_line), metrics_host, metrics_port)


@federation.command("start-site")
@click.argument("kit", type=KIT)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    default=None,
    help="this site's data; replaces `data` in its site.toml",
)
@with_metrics
def start_site_command(kit: Path, data: Path | None, metrics_host: str, metrics_port: int | None) -> None:
    """Run the site of KIT until Ctrl-C, and restart it after a crash.

    The path of the data never leaves this machine.
    """
    with _flare():
        from fedbilevel.sites.flare import job, processes
    if processes.name_of(kit) == "server":
        raise SettingError(f"{kit} is the kit of the server: use start-server.")
    settings = policy.read_settings(kit / job.SITE)
    if data or settings.data:
        policy.check_data(settings, (data or Path(settings.data)).resolve())
    follower = view.Follower(kit)

    def follow() -> None:
        for text in follower.lines(view.look(kit / job.SITE)):
            say_line(text)

    environment = {policy.DATA: str(data.resolve())} if data else {}
    _keep(processes.Supervised(kit, environment=environment, say=say_line), metrics_host, metrics_port, follow)


def _keep(
    supervised: Any, metrics_host: str, metrics_port: int | None, follow: Callable[[], None] = lambda: None
) -> None:
    """Run a supervised process until it ends or a signal stops it.

    follow: function that is called twice a second.
    """
    from fedbilevel.sites.flare.metrics import Endpoint

    endpoint = None if metrics_port is None else Endpoint(supervised, host=metrics_host, port=metrics_port)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervised.ask_to_stop())
    supervised.start()
    say(f"{supervised.name} runs; its log is {supervised.kit / 'log.txt'}. Ctrl-C stops it.")
    if endpoint is not None:
        say(f"{supervised.name} serves {endpoint.url}/metrics and {endpoint.url}/healthz.")
    try:
        while not supervised.wait(0.5):
            follow()
    finally:
        supervised.stop()
        if endpoint is not None:
            endpoint.close()
    say(f"{supervised.name} stopped.")


def with_kit(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--kit", type=KIT, required=True, help="the lead's startup kit")(command)


def with_start_timeout(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "seconds for all sites to connect and begin; time spent waiting for approval does not count"
    kind = click.FloatRange(min=1)
    return click.option("--start-timeout", type=kind, default=600.0, show_default=True, help=text)(command)


@federation.command("submit")
@click.argument("run", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@with_kit
@click.option("--detach", is_flag=True, help="submit only; the run is not restarted after a fault until you use resume")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="how often the run is started again after faults",
)
@with_start_timeout
def submit_command(run: Path, kit: Path, detach: bool, max_restarts: int, start_timeout: float) -> None:
    """Start the run in the TOML file RUN, follow it to its end, and restart it after faults."""
    with _flare():
        from fedbilevel.sites.flare import connection, follow, jobs, kits
    connection.check_lead(kit)
    plan = read_plan(run, kits.sites_of(kit)).asdict()
    if detach:
        name, job = plan["name"], jobs.submit(kit, plan)
        say(f"Submitted {name} as job {job}. To follow it: fedbilevel federation resume {name} --kit {kit}")
        return
    jobs.check_free(kit, plan)
    options = {"notice": say_line, "max_restarts": max_restarts, "start_timeout": start_timeout}
    _end(plan["name"], kit, follow.watch(kit, plan, _show, **options))


@federation.command("resume")
@click.argument("name")
@with_kit
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="how often the run is started again after faults",
)
@with_start_timeout
def resume_command(name: str, kit: Path, max_restarts: int, start_timeout: float) -> None:
    """Follow the run NAME, and resume it first if it was stopped or interrupted."""
    with _flare():
        from fedbilevel.sites.flare import follow
    options = {"notice": say_line, "max_restarts": max_restarts, "start_timeout": start_timeout}
    _end(name, kit, follow.resume(kit, name, _show, **options))


def _show(progress: dict[str, Any]) -> None:
    say(line(progress))


def _end(name: str, kit: Path, outcome: str) -> None:
    say(
        f"{name} is finished."
        if outcome == "finished"
        else f"{name} stopped. To resume: fedbilevel federation resume {name} --kit {kit}"
    )


@federation.command("status")
@with_kit
def status_command(kit: Path) -> None:
    """List connected sites, and the progress of all runs."""
    with _flare():
        from fedbilevel.sites.flare import certificates, jobs
    found = jobs.status(kit)
    for text in certificates.notices(kit):
        say_line(text)
    say_line(f"{len(found['sites'])} sites connected: {', '.join(sorted(found['sites'])) or 'none'}")
    for name, entry in found["runs"].items():
        say_line(f"{name}: {entry['outcome']}" + (f", {line(entry['latest'])}" if entry["latest"] else ""))


@federation.command("stop")
@click.argument("name")
@with_kit
def stop_command(name: str, kit: Path) -> None:
    """Ask the run NAME to stop after its current outer iteration."""
    with _flare():
        from fedbilevel.sites.flare import jobs
    jobs.stop(kit, name)
    say(f"{name} stops after its current outer iteration.")


@federation.command("try")
@click.option(
    "--sites", "num_sites", type=click.IntRange(min=1, max=20), default=3, show_default=True, help="number of sites"
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=None,
    help="folder for all files, which is kept (default: a temporary folder)",
)
def try_command(num_sites: int, folder: Path | None) -> None:
    """Try a whole federation on this machine.

    Makes kits, starts a server and sites as separate processes with mutual TLS over loopback, and
    does a small run.
    """
    with _flare():
        from fedbilevel.sites.flare import local
    from fedbilevel.sites.trial import prepare  # the plan of a small run, and data for every site

    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as temporary:
        place = folder or Path(temporary)
        plan, data = prepare(place / "data", [f"site-{number}" for number in range(1, num_sites + 1)])
        with local.Loopback(place, plan["sites"], data=data, auto_approve=True, say=say_line) as federation_here:
            say(
                f"{num_sites} sites are connected to the server, in {place}. "
                "They approve the plan automatically, because this is a trial."
            )
            federation_here.watch(plan, _show, notice=say_line)
    say(
        "Finished, and all processes ended."
        + (f" The record is in {place / 'kits' / 'server' / 'runs' / plan['name']}." if folder else "")
    )


for command in operator.site.commands.values():
    federation.add_command(command)

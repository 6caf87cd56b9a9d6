"""Cases that `test_distributed` runs in several processes.

    python -c "from support import ranks; ranks.start(FOLDER, SIZE, ...)"
`start` forks the ranks of every world, so that torch is imported once:

    python -c "from support import ranks; ranks.start(FOLDER, SIZE, ...)"

Every rank writes its results to FOLDER/SIZE/rankR.json. The records of rank 0 are in the same
folder; tests compare them with those of the simulation.
"""

import dataclasses
import io
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedbilevel.aggregation.attacks import Attack
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.clustered_fl import ClusteredFL
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg_plus import FedAvgPlus
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedbioacc_local import FedBiOAccLocal
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.cli.main import main
from fedbilevel.cli.terminal import complaints, console
from fedbilevel.engines import distributed, simulate
from fedbilevel.engines.contract import check_engine
from fedbilevel.errors import FedBilevelError, RankLostError, RecoveryWarning, ScopeWarning
from fedbilevel.federation.algorithm import Cohort, phase
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support import provoked

provoked.listen()
NUM = 7
DIRECTED = Network(kind="random_directed", lowest=0.2, highest=0.6, seed=3)
UNDIRECTED = Network(kind="random_undirected", lowest=0.3, highest=0.7, seed=3)


def quadratic(**settings: Any) -> Built:
    return Quadratic(num_clients=NUM, **settings).build()


def with_figures() -> Built:
    """Clients weighted by samples, sums of statistics, and a figure that needs single clients."""
    built = quadratic(client_weights="by_samples")
    statistics = {
        "val": lambda x, y, batch: {
            "far": (batch["weight"] * (batch["D"] ** 2).sum(tuple(range(1, batch["D"].ndim)))).sum() * y["y"].sum()
        }
    }
    figures = {
        "statistics": statistics,
        "metrics": lambda sums: {"sum_far": sums["far"]},
        "across": lambda found: {"median": float(found["far"].median())},
    }
    return Built(dataclasses.replace(built.problem, **figures), built.clients)


def drawn() -> Built:
    """Losses with random numbers of every sample, drawn anew for every batch."""
    built = quadratic(client_weights="by_samples")

    def disturbed(loss: Any) -> Any:
        def of(x: Any, y: Any, batch: Any) -> torch.Tensor:
            numbers = batch["draw"].prod(-1) if "draw" in batch else torch.full_like(batch["weight"], 0.25)
            return loss(x, y, batch) + (batch["weight"] * numbers).sum() * (y["y"] - 1).square().sum()

        return of

    changed = {"upper": disturbed(built.problem.upper), "lower": disturbed(built.problem.lower)}
    problem = dataclasses.replace(built.problem, **changed, draws={"train": 2, "val": 3})
    return built._replace(problem=problem)


def cleaning() -> Built:
    """Private weights, one per sample, of unequal number."""
    built = DataCleaning(num_clients=NUM, num_clean=4, test_share=0.9).build()
    ragged = [
        {
            role: {name: value[: len(value) - i] for name, value in fields.items()} if role == "train" else fields
            for role, fields in client.items()
        }
        for i, client in enumerate(built.clients)
    ]
    return built._replace(clients=ragged)


def begun(built: Built) -> Built:
    """Return a problem whose y starts away from zero."""
    y0 = {name: 0.01 * torch.arange(leaf.numel()).cos().view(leaf.shape) for name, leaf in built.problem.y0.items()}
    return built._replace(problem=dataclasses.replace(built.problem, y0=y0))


def some_missing(iteration: int, call: int) -> set[int]:
    return {(iteration + call) % NUM, 0}


NOISY = {"batch_size": 2, "seed": 5}
SHUFFLED = {"ids": (3, 0, 6, 1, 5, 2, 4)}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "fedbio": (FedBiO(num_local_steps=(1, 3, 2, 2, 1, 3, 2)), with_figures, NOISY),
    "drawn": (
        FedBiO(num_local_steps=(1, 3, 2, 2, 1, 3, 2)),
        drawn,
        {**NOISY, **SHUFFLED, "cohort": Cohort(0.6)},
    ),
    "drawn_peers": (
        HGP(num_terms=2, num_lower_steps=2, lr_lower=0.05, lr_system=0.05),
        drawn,
        {**NOISY, "network": DIRECTED},
    ),
    "auto": (
        FedBiO(lr_upper="auto", lr_lower="auto", lr_system="auto", num_local_steps=2),
        lambda: quadratic(upper="private"),
        {**NOISY, "cohort": Cohort(0.6)},
    ),
    "fbo_aggitd": (
        FBOAggITD(lr_lower=0.1, lr_system=0.1, num_lower_rounds=2, num_local_steps=2, estimator="sampled"),
        lambda: quadratic(client_weights="by_samples"),
        {**NOISY, "cohort": Cohort(0.6, replacement=True)},
    ),
    "fedbioacc": (FedBiOAcc(num_local_steps=2, delta=10.0, offset=1e3), quadratic, NOISY),
    "adafbio": (AdaFBiO(num_local_steps=2, num_terms=3), quadratic, {**NOISY, **SHUFFLED, "cohort": Cohort(0.5)}),
    "fedbioacc_local": (
        FedBiOAccLocal(num_local_steps=2, num_factors=2, delta=10.0, offset=1e3),
        lambda: quadratic(lower="local"),
        {**NOISY, "cohort": Cohort(0.5)},
    ),
    "cleaning": (
        FBOAggITD(lr_upper=20.0, lr_lower=0.5, lr_system=0.5, num_lower_rounds=2, num_local_steps=2),
        cleaning,
        {**NOISY, **SHUFFLED, "cohort": Cohort(0.5)},
    ),
    "returning": (  # diverges at once, so that it goes back twice and then fails
        FBOAggITD(lr_upper=20.0, lr_lower=1e7, lr_system=0.5, num_lower_rounds=2, num_local_steps=2),
        lambda: begun(cleaning()),
        {**NOISY, **SHUFFLED, "cohort": Cohort(0.5), "measure_every": 1},
    ),
    "fednest": (
        FedNest(lr_lower=0.1, lr_system=0.1, num_local_steps=2),
        lambda: quadratic(client_weights="by_samples", num_samples=1),
        {**NOISY, "cohort": Cohort(0.6)},
    ),
    "clustered_fl": (ClusteredFL(num_local_steps=2, tolerance_mean=10.0, tolerance_max=1e-6), quadratic, NOISY),
    "commfedbio": (CommFedBiO(num_kept=2, num_local_steps=2), quadratic, {**NOISY, "drops": some_missing}),
    "fedavg_plus": (FedAvgPlus(num_local_steps=2), quadratic, {**NOISY, "cohort": Cohort(0.5), "sampling": "epochs"}),
    "layer": (
        FedBiO(num_local_steps=2),
        with_figures,
        {**NOISY, **SHUFFLED, "cohort": Cohort(0.5), "aggregation": Aggregation(clip=1.0, compress="topk:0.3")},
    ),
    "layer_robust": (
        FedNest(lr_lower=0.1, lr_system=0.1, num_local_steps=2),
        lambda: quadratic(client_weights="by_samples"),
        {**NOISY, "cohort": Cohort(0.6), "aggregation": Aggregation(robust="trimmed:0.2", compress="int8")},
    ),
    "layer_private": (
        FedBiO(num_local_steps=2),
        with_figures,
        {**NOISY, **SHUFFLED, "aggregation": Aggregation(secure=True, clip=1.0, noise=1.0, epsilon=1e4)},
    ),
    "layer_groups": (
        FedBiO(num_local_steps=2),
        lambda: Quadratic(num_clients=11, client_weights="by_samples").build(),
        {**NOISY, "aggregation": Aggregation(secure=True, robust="median", groups=3)},
    ),
    "hgp_layer": (
        HGP(num_terms=2, num_lower_steps=2, lr_lower=0.05, lr_system=0.05, lower_solver="mix"),
        quadratic,
        {
            **NOISY,
            **SHUFFLED,
            "network": Network(kind="ring"),
            "averaging": Averaging(kind="gossip", num_steps=3),
            "aggregation": Aggregation(compress="int8", robust="centred:1.0"),
        },
    ),
    "layer_examples": (  # ranks have clients with different numbers of steps, and so of releases
        FedBiO(num_local_steps=(1, 3, 2, 2, 1, 3, 2)),
        with_figures,
        {
            **SHUFFLED,
            "seed": 5,
            "cohort": Cohort(0.3),
            "aggregation": Aggregation(level="example", rate=0.5, clip=1.0, noise=1.0, epsilon=1e4),
        },
    ),
    "sgp": (SGP(num_lower_steps=3), lambda: quadratic(client_weights="by_samples"), {**NOISY, "network": DIRECTED}),
    "hgp": (
        HGP(num_terms=3, num_lower_steps=2, lr_lower=0.05, lr_system=0.05),
        quadratic,
        {**NOISY, **SHUFFLED, "network": DIRECTED, "averaging": Averaging(num_steps=2, weights="kept")},
    ),
    "hgp_cleaning": (
        HGP(num_terms=2, num_lower_steps=2, lr_lower=0.1, lr_system=0.1, optimiser="adam"),
        cleaning,
        {**NOISY, "network": Network(kind="ring"), "averaging": Averaging(tolerance=0.5)},
    ),
    "hgp_exact": (
        HGP(num_terms=2, num_lower_steps=2, lr_lower=0.05, lr_system=0.05, lower_solver="mix"),
        with_figures,
        {**NOISY, "averaging": Averaging(kind="exact")},
    ),
    "many": (
        SGP(num_lower_steps=1),
        lambda: Quadratic(num_clients=66).build(),
        {**NOISY, "network": Network(kind="ring")},
    ),
    "sparkle": (
        Sparkle(lr_lower=0.05, lr_system=0.05),
        lambda: quadratic(lower="local"),
        {**NOISY, "network": UNDIRECTED},
    ),
    "sparkle_push": (
        Sparkle(lr_lower=0.05, lr_system=0.05, exchange="push"),
        lambda: quadratic(upper="private"),
        {**NOISY, "network": DIRECTED},
    ),
}
EXACT = {"dtype": torch.float32, "strategy": "loop"}
CLOSE = {"dtype": torch.float64}
SOLVED = (
    "fbo_aggitd",
    "fedbioacc_local",
    "cleaning",
    "hgp",
)  # one system of all clients, of each its own; private x; points of their own
# rows that stay at clients, memory, weights of the network, what compression left
RESUMED = ("cleaning", "adafbio", "hgp", "layer")


def compared(size: int) -> list[tuple[str, str, dict[str, Any]]]:
    """float32 always; float64 and many peers with two ranks, and in some cases elsewhere."""
    close = [name for name in CASES if size == 2 or name in ("cleaning", "hgp")]
    exact = [name for name in CASES if size == 2 or name != "many"]
    return [*((name, "exact", EXACT) for name in exact), *((name, "close", CLOSE) for name in close)]


def go(name: str, kind: dict[str, Any], num_iterations: int, **options: Any) -> Any:
    algorithm, build, given = CASES[name]
    looks = {"measure_every": 2, "residuals": True, "stationarity": name in SOLVED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecoveryWarning)
        return solve(
            *build(),
            algorithm,
            num_iterations=num_iterations,
            checkpoint_every=2,
            **{**looks, **given, **kind, **options},
        )


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoilt(FedBiO):
    """Something happens in the second outer iteration where client 5 lives."""

    how: str = ""

    @phase
    def local_steps(self, clients, x, y, u):
        new = FedBiO.local_steps(self, clients, x, y, u)
        hit = (clients.ids > 0 if self.how == "nans" else clients.ids == 5).nonzero()[:, 0]
        if clients.iteration == 2 and len(hit):
            if self.how.startswith("nan"):
                new["y"][hit] = float("nan")
            elif self.how == "bug":
                raise KeyError("oh")
            elif self.how == "interrupt":
                signal.raise_signal(signal.SIGINT)
            elif self.how == "freeze" and "RANK" in os.environ:
                os.kill(os.getpid(), signal.SIGSTOP)
        return new


def failing(what: Any) -> list[str]:
    try:
        result = what()
        return [result.stopped, str(result.iteration)]
    except (FedBilevelError, KeyError) as error:
        return [type(error).__name__, str(error)]


def spoilt(how: str, **options: Any) -> list[str]:
    return failing(
        lambda: solve(
            *quadratic(),
            Spoilt(how=how),
            residuals=False,
            num_iterations=4,
            checkpoint_every=1,
            recover=False,
            **options,
        )
    )


def one_rank_starts_elsewhere() -> Any:
    built = quadratic()
    y0 = {"y": torch.full((6,), float(os.environ["RANK"]))}
    return solve(
        dataclasses.replace(built.problem, y0=y0),
        built.clients,
        FedBiO(),
        residuals=False,
        num_iterations=1,
        engine="distributed",
    )


def bad_data_of_the_last_client() -> Any:
    built = quadratic()
    spoilt = {**built.clients[-1], "train": {name: value[:0] for name, value in built.clients[-1]["train"].items()}}
    return solve(
        built.problem, [*built.clients[:-1], spoilt], FedBiO(), residuals=False, num_iterations=1, engine="distributed"
    )


def failures(folder: Path, size: int) -> dict[str, Any]:
    there = {"engine": "distributed"}
    (folder / "file").write_text("")
    robust = {"network": Network(loss=0.1), "averaging": Averaging(kind="robust")}
    return {
        "nan": spoilt("nan", record=folder / "nan", **there),
        "nans": spoilt("nans", **there),
        "bug": spoilt("bug", **there),
        "interrupt": spoilt("interrupt", record=folder / "interrupt", **there),
        "callback": spoilt("", callbacks=[lambda now: now.iteration == 3], record=folder / "callback", **there),
        "callback_bug": spoilt("", callbacks=[lambda now: {}["no"]], **there),
        "unwritable": spoilt("", record=folder / "file" / "under", **there),
        "few": failing(
            lambda: solve(
                *Quadratic(num_clients=size - 1).build(), FedBiO(), residuals=False, num_iterations=1, **there
            )
        )
        if size > 1
        else None,
        "robust": failing(
            lambda: solve(
                *quadratic(),
                HGP(lower_solver="mix", lr_system=0.05),
                residuals=False,
                num_iterations=1,
                **robust,
                **there,
            )
        ),
        "attack": failing(
            lambda: solve(*quadratic(), FedBiO(), num_iterations=1, attack=Attack(kind="scaling"), **there)
        ),
        "elsewhere": failing(one_rank_starts_elsewhere),
        "data": failing(bad_data_of_the_last_client),
        "timeout": failing(
            lambda: solve(*quadratic(), FedBiO(), residuals=False, num_iterations=1, timeout=0, **there)
        ),
    }


# ---- what is done, and not done ------------------------------------------------------------------------------------


class FromFiles(Sequence):
    """Notes which clients are asked for."""

    def __init__(self, clients):
        self.clients, self.asked = clients, []

    def __len__(self):
        return len(self.clients)

    def __getitem__(self, place):
        self.asked.append(place)
        return self.clients[place]


def counted(size: int) -> dict[str, Any]:
    """Numbers of exchanges, held data, and messages between peers on a ring of eight."""
    group, seen = distributed.join(), {"sums": 0, "passed": []}
    sum_, swapped = group.sum, group.swapped

    def counting(parts):
        seen["sums"] += 1
        return sum_(parts)

    def weighing(parts, lengths):
        seen["passed"].append([len(part) for part in parts])
        return swapped(parts, lengths)

    group.sum, group.swapped = counting, weighing
    asked = FromFiles(quadratic().clients)
    fed = simulate(FedBiOAcc(num_local_steps=2), quadratic().problem, asked, group=group)
    seen["asked"] = asked.asked
    state = FedBiOAcc(num_local_steps=2).init(fed)
    fed.begin(1)
    FedBiOAcc(num_local_steps=2).round(fed, state)
    seen["rounds"], seen["hosted"] = fed.ledger.rounds, fed.host.ids.tolist()
    seen["samples"] = len(fed.host.data.fields["train"]["A"])
    seen["rows"] = sorted(
        {len(rows) for rows in fed.host.memory.rows.values()} | {len(rows) for rows in fed.host.kept.rows.values()}
    )
    peers = simulate(
        SGP(num_lower_steps=1), *Quadratic(num_clients=8).build(), network=Network(kind="ring"), group=group
    )
    peers.begin(1)
    SGP(num_lower_steps=1).round(peers, SGP().init(peers))
    del group.sum, group.swapped
    return seen


def contract() -> list[str]:
    """Check the engine contract of the ranks, with a server and between peers.

    Returns one report per engine, empty if the engine keeps the contract."""
    group, options = distributed.join(), {"dtype": torch.float64, "strategy": "loop", **NOISY}
    weighted = lambda: quadratic(client_weights="by_samples")
    reports = []
    for algorithm, build, more in (
        (FedBiO(num_local_steps=2), weighted, {}),
        (FedBiOAcc(num_local_steps=2, delta=10.0, offset=1e3), weighted, {"cohort": Cohort(0.5)}),
        (AdaFBiO(num_local_steps=2, num_terms=2), lambda: quadratic(upper="private"), {}),
        (SGP(num_lower_steps=2), weighted, {"network": DIRECTED}),
    ):
        built = build()
        engine = simulate(algorithm, *built, group=group, **options, **more)
        report = check_engine(engine, built.clients, show=False)
        reports.append("" if report.ok else str(report))
    return reports


def commands(folder: Path) -> dict[str, list[str]]:
    fedbio = ["quadratic", "-a", "fedbio", "--num-clients", "3", "--strategy", "loop", "--checkpoint-every", "1"]
    return {
        "run": [
            "run",
            *fedbio,
            "--num-iterations",
            "2",
            "--engine",
            "distributed",
            "--log",
            "jsonl",
            "--out",
            str(folder / "command"),
        ],
        "resume": [
            "resume",
            str(folder / "command" if os.environ["RANK"] == "0" else folder / "nowhere"),
            "--num-iterations",
            "3",
        ],
        "misspelt": ["run", "quadratik", "-a", "fedbio"],
        "unknown": ["run", "quadratic", "-a", "fedbio", "--colour", "red"],
        "again": ["run", *fedbio, "--engine", "distributed", "--out", str(folder / "command")],
    }


def command(*args: str) -> list[Any]:
    """The exit status and what was said."""
    said = io.StringIO()
    sys.argv = ["fedbilevel", *args]
    console.file = complaints.file = said
    try:
        with redirect_stdout(said), redirect_stderr(said):
            main()
    except SystemExit as ended:
        return [ended.code, said.getvalue()]
    return [None, said.getvalue()]


def same_on_all(result: Any) -> list[float]:
    trees = [tree for value in (result.x, result.y) for tree in (value if isinstance(value, list) else [value])]
    return [float(leaf.double().sum()) for tree in trees for leaf in tree.values()]


def rank(folder: Path, size: int) -> None:
    me = int(os.environ["RANK"])
    if folder.name == "frozen":
        (folder / f"rank{me}.json").write_text(json.dumps(frozen(folder)))
        os._exit(0)
    place = lambda name: folder / name if me == 0 else folder / f"nowhere-{name}"  # only rank 0 needs the folder
    seen: dict[str, Any] = {"solution": {}, "ledger": {}}
    for name, label, kind in compared(size):
        result = go(name, kind, 3, record=place(f"{name}-{label}"), engine="distributed")
        seen["solution"][f"{name}-{label}"], seen["ledger"][f"{name}-{label}"] = same_on_all(result), result.ledger
    for name in RESUMED:
        go(name, EXACT, 4, record=place(f"{name}-begun"), resume=True, engine="distributed")
    seen["failures"] = failures(folder, size)
    seen["counted"] = counted(size)
    seen["contract"] = contract()
    seen["command"] = {name: command(*args) for name, args in commands(folder).items()} if size == 2 else {}
    (folder / f"rank{me}.json").write_text(json.dumps(seen))


def frozen(folder: Path) -> list[Any]:
    """Messages when a rank is lost, and when the others try again."""
    found = []
    for _ in range(2):
        try:
            solve(
                *quadratic(),
                Spoilt(how="freeze"),
                residuals=False,
                num_iterations=4,
                checkpoint_every=1,
                record=folder / "run",
                engine="distributed",
                timeout=1.5,
                strategy="loop",
            )
        except RankLostError as error:
            found += [str(error), error.speaks]
    return found


def world(folder: Path, size: int) -> list[int]:
    """Fork the ranks and return their exit statuses. A stopped rank is killed after the others end."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for number in range(size):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(number),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            status = 1
            try:
                rank(folder, size)
                dist.destroy_process_group()
                status = 0
            except BaseException:  # noqa: BLE001 - a forked child must not go on as its parent
                (folder / f"rank{number}.error").write_text(traceback.format_exc())
            os._exit(status)
        children[child] = number
    status = [None] * size
    while children:
        child, code = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(code):
            continue
        status[children.pop(child)] = os.waitstatus_to_exitcode(code)
        if folder.name == "frozen":
            stopped = [left for left in children if Path(f"/proc/{left}/stat").read_text().split(") ")[1][0] == "T"]
            for left in stopped if len(stopped) == len(children) else ():
                os.kill(left, signal.SIGKILL)
    return status


def start(where: str, *names: str) -> None:
    warnings.simplefilter("ignore", ScopeWarning)
    torch.set_num_threads(1)
    go(
        "fedbio", CLOSE, 1
    )  # what torch loads and compiles at the first derivative is then there before ranks are forked
    found = {name: world(Path(where) / name, 3 if name == "frozen" else int(name)) for name in names}
    (Path(where) / "status.json").write_text(json.dumps(found))

"""A site's kit without FLARE: what its operator's commands and page read, as the site's job would
write it."""

import hashlib
import json
import os
import time

from fedbilevel.sites import operator
from fedbilevel.sites.audit import AuditLog

PLAN = {
    "name": "cleaning",
    "sites": ["north", "south"],
    "num_iterations": 10,
    "measure_every": 5,
    "task": {"name": "data_cleaning", "num_classes": 10},
    "algorithm": {"name": "fbo_aggitd", "lr_upper": 0.1},
    "options": {"seed": 1, "batch_size": 32},
}
LEAVES = {
    "rounds_per_iteration": 7,
    "floats_per_iteration": 3709,
    "total_rounds": 70,
    "total_bytes": 148_360,
    "by_phase": {"lower_steps": 3250, "partial_grad": 459},
    "stays_here": ["x"],
}
SERVER = "fl.north.example:8002"


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


ONE, TWO = digest_of("one"), digest_of("two")


def make_kit(folder, server=SERVER):
    settings = {"servers": [{"service": {"target": server}}], "client": {"fqsn": "north"}}
    (folder / "startup").mkdir(parents=True)
    (folder / "startup" / "fed_client.json").write_text(json.dumps(settings))
    (folder / "site").mkdir()
    return folder


def ask(folder, digest=ONE, *, who="lead@north.example", run="cleaning", **plan):
    operator.ask(folder, digest, who, run, {**PLAN, "name": run, **plan}, LEAVES)


def write_status(folder, **changes):
    """As the job of this very process."""
    content = {
        "time": time.time(), "job": "job-1", "run": "cleaning", "digest": ONE, "state": "computing", "iteration": 4,
        "num_iterations": 10, "phase": "lower_steps", "answers": 31, "bytes": 261_234, "rounds_run": 28,
        "rounds_total": 28, "max_rounds": 10_000,
        "norms": {"y": 2.51, "x": 0.334}, "last_error": None, "started": time.time(), "pid": os.getpid(),
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps({**content, **changes}))


def log_answers(folder, number=3):
    log = AuditLog(folder)
    for iteration in range(number):
        arrays = [{"name": "y", "shape": [3], "dtype": "float64", "norm": 1.5 + iteration}]
        log.append({"run": "cleaning", "kind": "phase", "iteration": iteration, "bytes": 500_000, "arrays": arrays})


def log_refusal(folder, text="no", **more):
    AuditLog(folder).append({"run": None, "kind": "error", "text": text, "bytes": 90, "arrays": [], **more})

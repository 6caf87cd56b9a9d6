"""Records written by hand, in the form in which runs write them."""

import json

HOSTILE = "</script><img src=x onerror=document.title='owned'><b>&amp;%{x}"
COSTS = ("floats_up", "floats_down", "bytes_up", "bytes_down", "gy", "gx", "fx", "fy", "hvp", "jvp", "samples")


def rows_of(k, num=6, **figures):
    """Measurements whose every number is another one; k shifts them all."""
    rows = []
    for i in range(num):
        paid = {name: (j + 2) * i * 10 + k * i for j, name in enumerate(COSTS)}
        row = {
            "iteration": 5 * i,
            "seconds": 0.25 * i + 0.01 * k * i,
            "megabytes": (paid["bytes_up"] + paid["bytes_down"]) / 1e6,
            "rounds": 7 * i,
            **paid,
        }
        own = {
            "upper_loss": 2.0 / (i + 1) + 0.01 * k,
            "test_accuracy": 0.1 + 0.15 * i - 0.01 * k * i,
            "f1": 0.12 * i + 0.001 * k,
            "lower_gradient": 0.5**i,
            "residual": 0.3**i,
        }
        rows.append({**row, **own, **{name: make(i) for name, make in figures.items()}})
    return rows


def config_of(algorithm="fedbio", seed=0, *, task="data_cleaning", iterations=25, **settings):
    chosen = {"lr_upper": 30.0, "lr_lower": 1.0, **settings}
    return {
        "engine": "simulation",
        "ranks": 1,
        "task": task,
        "task_settings": {"noise": 0.4, "data_seed": seed, "num_clients": 3},
        "options": {"seed": seed, "fraction": 1.0, "dtype": "float32"},
        "run": {"num_iterations": iterations, "measure_every": 5, "checkpoint_every": 10},
        "identity": {
            "algorithm": algorithm,
            "settings": chosen,
            "seed": seed,
            "num_clients": 3,
            "problem": task,
            "data": f"hash{seed}",
        },
        "versions": {"fedbilevel": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    }


def phases_of(row):
    """Two phases that add up to the row, as a ledger of one run."""
    first = {name: row[name] // 3 for name in ("rounds", *COSTS)}
    return {"lower_steps": first, "hypergradient": {name: row[name] - first[name] for name in first}}


FINDINGS = [
    {
        "kind": "histogram",
        "title": "Learned weights",
        "about": "of all",
        "x": "weight",
        "edges": [0.0, 0.5, 1.0],
        "groups": [{"name": "clean", "counts": [1, 40]}, {"name": "corrupted", "counts": [23, 2]}],
    },
    {
        "kind": "images",
        "title": "Most suspicious",
        "about": "",
        "shape": [2, 2],
        "items": [
            {"pixels": "AECA/w==", "facts": {"client": 1, "sample": 17, "label": 3, "weight": 0.0123456, "wrong": True}}
        ],
    },
    {
        "kind": "ranking",
        "title": "Ranked",
        "about": "",
        "columns": ["client", "change", "wrong"],
        "rows": [[2, -0.125, True], [0, 0.5, False]],
    },
    {
        "kind": "by_client",
        "title": "Accuracy of every client",
        "about": "",
        "values": {"test_accuracy": [0.5, None, 0.75]},
    },
]
CLIENTS = {
    "num_clients": 3,
    "sizes": {"train": [10, 20, 5], "val": [2, 3, 4]},
    "labels": {"train": {"values": [0, 1], "counts": [[4, 20, 1], [6, 0, 4]]}},
}


def write_run(folder, algorithm="fedbio", seed=0, *, rows=None, whole=True, end=None, **settings):
    """Write a run.

    whole: with all files of this version; otherwise those of older ones. end: content of end.json.
    """
    folder.mkdir(parents=True)
    rows = rows_of(seed) if rows is None else rows
    (folder / "config.json").write_text(json.dumps(config_of(algorithm, seed, **settings)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if end is not None:
        (folder / "end.json").write_text(json.dumps(end))
    if whole:
        ledger = {
            "totals": {},
            "phases": phases_of(rows[-1]),
            "clients": {name: [rows[-1][name], 0, 1] for name in COSTS},
            "edges": {},
        }
        (folder / "ledger.json").write_text(json.dumps(ledger))
        (folder / "clients.json").write_text(json.dumps(CLIENTS))
        (folder / "findings.json").write_text(json.dumps(FINDINGS))
        (folder / "run.toml").write_text(
            f'iterations = 25\n[algorithm]\nname = "{algorithm}"\n[options]\nseed = {seed}\n'
        )
    return folder


def write_comparison(folder, repetitions=3, target=("test_accuracy", 0.6)):
    """Two algorithms; the second diverges in its last repetition."""
    folder.mkdir(parents=True)
    lost = ("fedavg", repetitions - 1)
    runs = [
        {
            "algorithm": name,
            "repetition": r,
            "settings": {"lr_upper": 1.0},
            "rows": rows_of(r + 10 * i),
            "diverged": "too long" if (name, r) == lost else None,
        }
        for r in range(repetitions)
        for i, name in enumerate(("fedbio", "fedavg"))
    ]
    content = {
        "task": "data_cleaning",
        "task_settings": {"noise": 0.4, "data_seed": 4, "num_clients": 3},
        "seed": 9,
        "options": {"cohort": "Cohort()"},
        "versions": {"fedbilevel": "0.1.0"},
        "target": {"metric": target[0], "value": target[1]} if target else None,
        "outcomes": [],
        "runs": runs,
    }
    (folder / "comparison.json").write_text(json.dumps(content))
    return folder


def write_influence(folder, num=50):
    folder.mkdir(parents=True)
    sign = lambda i: (-1) ** i
    ranked = [
        {"client": i % 3, "sample": i, "label": i % 10, "wrong": i % 4 == 0, "prediction": sign(i) * (1 - i / num)}
        | {"actual": sign(i) * (0.9 - i / num) if i < 8 else None}
        for i in range(num)
    ]
    content = {
        "task": {"data": "digits", "model": "logistic"},
        "method": "cg",
        "settings": {},
        "scores": {"r2": 0.97, "f1": 1.0, "pearson": None},
        "ranked": ranked,
        "num_removed": 8,
        "loss": 1.7,
        "lower_gradient": 1e-15,
        "val_accuracy": 0.91,
        "residual": 4e-11,
        "disagreement": None,
        "noise": 0.0,
        "cost": {"rounds": 48, "hvp": 141},
        "seconds": {"training": 2.5},
        "versions": {"fedbilevel": "0.1.0"},
    }
    (folder / "influence.json").write_text(json.dumps(content))
    return folder


def write_personalisation(folder, *, accuracies=True):
    folder.mkdir(parents=True)
    outcomes = [
        {
            "network": network,
            "method": method,
            "repetition": r,
            "iteration": 3,
            "test_accuracy": 0.8 + 0.01 * r + 0.05 * i,
            "bottom_decile": 0.6 + 0.01 * r,
            "validation_accuracy": 0.81,
            "rounds": 90 * i,
            "megabytes": 1.5 * i,
            "seconds": 2.0 + r,
        }
        | ({"accuracies": [0.5 + 0.1 * i, 0.75, 1.0]} if accuracies else {})
        for r in range(2)
        for i, method in enumerate(("local", "hgp_pl"))
        for network in ("complete", "random_directed")
    ]
    (folder / "personalisation.json").write_text(
        json.dumps({"task": {"data": "digits"}, "plan": {}, "seed": 0, "outcomes": outcomes, "versions": {}})
    )
    return folder


def reopened(folder, name, change):
    """A JSON file of a record, changed."""
    place = folder / name
    value = json.loads(place.read_text())
    place.write_text(json.dumps(change(value)))


def hostile(tmp_path):
    """A record whose every word is an attack."""
    folder = write_run(tmp_path / "run", HOSTILE)
    rows = [{**row, HOSTILE: 1.0} for row in rows_of(0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reopened(
        folder,
        "config.json",
        lambda config: {
            **config,
            "task": HOSTILE,
            "engine": "peers",
            "peers": [HOSTILE] * 3,
            "versions": {HOSTILE: HOSTILE},
        },
    )
    reopened(
        folder,
        "ledger.json",
        lambda bill: {**bill, "phases": {HOSTILE: bill["phases"]["lower_steps"]}, "edges": {"bytes": [[0, 1, 2]] * 3}},
    )
    reopened(
        folder,
        "clients.json",
        lambda who: {**who, "labels": {"train": {"values": [HOSTILE, "b"], "counts": [[1, 2, 3], [4, 5, 6]]}}},
    )
    reopened(
        folder,
        "findings.json",
        lambda some: [
            {
                **some[0],
                "title": HOSTILE,
                "about": HOSTILE,
                "x": HOSTILE,
                "groups": [{"name": HOSTILE, "counts": [1, 2]}],
            },
            {**some[1], "items": [{"pixels": "AECA/w==", "facts": {HOSTILE: HOSTILE, "label": HOSTILE}}]},
            {**some[2], "columns": [HOSTILE, "b", "c"], "rows": [[HOSTILE, 1, True]]},
            {**some[3], "values": {HOSTILE: [0.5, 0.6, 0.7]}},
            {"kind": HOSTILE, "title": HOSTILE},
        ],
    )
    (folder / "run.toml").write_text(HOSTILE)
    return folder

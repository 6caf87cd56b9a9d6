import io

from rich.console import Console

from fedbilevel.report import tables
from fedbilevel.studies.comparison import AlgorithmOutcome, Comparison, Spread, Target

ROW = {
    "iteration": 3,
    "rounds": 7,
    "megabytes": 1.25,
    "gy": 1,
    "gx": 2,
    "fx": 3,
    "fy": 4,
    "hvp": 5,
    "jvp": 6,
    "seconds": 0.5,
    "test_accuracy": 0.9,
    "tiny": 1e-7,
}


def text(table):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_outcomes_show_figures_and_costs():
    line = next(
        line
        for line in text(tables.outcomes("t", {"fedbio": ROW}, ("test_accuracy", "tiny", "absent"))).splitlines()
        if "fedbio" in line
    )
    assert line.split() == ["fedbio", "0.9000", "1.000e-07", "-", "7", "1.2", "10", "11", "0.5"]


def test_a_comparison_shows_who_reached_the_target_and_who_diverged():
    spread = {cost: Spread(10.0, 2.0) for cost in ("rounds", "megabytes", "gradients", "products", "seconds")}
    reached = AlgorithmOutcome("fast", 3, 2, 0, spread, {"loss": Spread(0.5, 0.0)}, spread)
    never = AlgorithmOutcome("slow", 3, 0, 1, {}, {"loss": Spread(0.9, 0.1)}, spread)
    shown = text(tables.comparison(Comparison("task", Target("loss", 0.6), [reached, never], []), ("loss", "other")))
    assert "cost to reach loss = 0.6" in shown
    fast, slow = (next(line for line in shown.splitlines() if name in line) for name in ("fast", "slow"))
    assert fast.split()[:4] == ["fast", "2/3", "10", "+-2"]
    assert "slow (1 diverged)" in slow
    assert "0/3" in slow
    assert "0.9000 +-0.1000" in slow

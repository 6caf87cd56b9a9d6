"""Tables, pictures and displays of a cleaning show what it found."""

from __future__ import annotations

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import plots


def clients() -> list[dict[str, dict[str, np.ndarray]]]:
    """Four clients with three classes far apart; the first (i + 1) * 5 labels of client i are wrong."""
    rng, found = np.random.default_rng(0), []
    for i in range(4):
        roles = {}
        for role, num in (("train", 100), ("val", 60)):
            label = rng.integers(0, 3, num)
            roles[role] = {"image": rng.normal(size=(num, 5)) + 4 * np.eye(3, 5)[label], "label": label}
        roles["train"]["label"][: 5 * (i + 1)] += 1
        roles["train"]["label"] %= 3
        found.append(roles)
    return found


@pytest.fixture(scope="module")
def found():
    return fb.clean_labels(clients(), names=["a", "b", "<c>", "d"], class_names=["cat", "dog", "emu"])


def test_the_table_has_every_training_sample_and_begins_with_the_suspects(found):
    rows = found.table()
    assert len(rows) == 400
    assert list(rows[0]) == ["client", "sample", "label", "suggested", "probability", "file", "flagged"]
    assert [row["probability"] for row in rows] == sorted((row["probability"] for row in rows), reverse=True)
    flagged = [tuple(row.values())[:-1] for row in rows if row["flagged"]]
    assert len(flagged) >= 40
    assert flagged == [tuple(one) for one in found.suspects()]
    assert found.table(3) == rows[:3]
    assert {(row["client"], row["sample"]) for row in rows} == {(name, j) for name in found.names for j in range(100)}


@pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed: pip install 'fedbilevel[plot]'")
def test_the_picture_has_the_transition_matrix_and_the_noisiest_clients(found, tmp_path):
    figure = found.plot(tmp_path / "noise.png", most=3)
    assert (tmp_path / "noise.png").stat().st_size > 10_000
    matrix, bars, _ = figure.axes
    assert np.asarray(matrix.images[0].get_array()) == pytest.approx(found.transition)
    assert [text.get_text() for text in matrix.get_xticklabels()] == ["cat", "dog", "emu"]
    noisiest = sorted(found.noise.items(), key=lambda one: -one[1])[:3]
    assert [bar.get_width() for bar in bars.patches] == [noise for _, noise in noisiest]
    assert [text.get_text() for text in bars.get_yticklabels()] == ["d", "<c>", "b"]


def test_the_display_has_flags_and_noise_of_every_client_and_the_sentence(found):
    html = found._repr_html_()
    assert "Cleaning of 4 clients: accepted" in html
    assert "&lt;c&gt;" in html
    assert "<c>" not in html
    assert found.sentence.replace("'", "&#x27;") in html
    cells = [f">{found.noise['a']:.1%}<", f">{int(found.flags[0].sum())}<"]
    assert all(cell in html for cell in cells)
    assert "clients with most noise" not in html

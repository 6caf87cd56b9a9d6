"""The documentation site builds strictly, resolves its links, loads no other host and fits the code."""

import dataclasses
import html
import logging
import math
import re
import shlex
import warnings
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'fedbilevel[docs]'")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'fedbilevel[docs]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'fedbilevel[docs]'")

import yaml

import fedbilevel
from fedbilevel import discovery
from fedbilevel.aggregation import validity
from fedbilevel.cli.commands import places
from fedbilevel.cli.main import cli
from fedbilevel.errors import ScopeError, ScopeWarning
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.settings import made
from support.docs import check_quoted
from website import algorithm_pages, curves, facts, pictures, quotes
from website.fenced import fenced, itemised
from website.svg import DARK, LIGHT

ROOT = Path(__file__).parents[1]
NAMES = [name for name, kind in discovery.algorithms().items() if kind.__module__.startswith("fedbilevel.")]
LOADING = {
    "img": "src",
    "script": "src",
    "source": "src",
    "iframe": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "input": "src",
}


class Page(HTMLParser):
    """Ids, text and references of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads, self.words, self.inside = set(), [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "math":  # read as it is written
            self.inside = True
            self.words.append(given["alttext"])
        self.ids |= {given[key] for key in ("id", "name") if given.get(key) and (key == "id" or tag == "a")}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.loads.append(given.get("href", ""))
        if tag in LOADING and given.get(LOADING[tag]):
            self.loads.append(given[LOADING[tag]])
        self.loads += [part.split()[0] for part in (given.get("srcset") or "").split(",") if part.strip()]

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "math"

    def handle_data(self, data):
        if not self.inside:
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built once as `make docs` builds it, and its pages by path."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's packages; mkdocs itself is strict
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        assert config.strict
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)  # ends with an error on any warning
        finally:
            config.plugins.on_shutdown()
            for name in ("mkdocs", "mkdocs.plugins", "mkdocstrings"):
                logging.getLogger(name).handlers.clear()
    return folder, {str(path.relative_to(folder)): Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}


def outside(address):
    return bool(urlsplit(address).netloc) or address.startswith("//")


@pytest.mark.slow
def test_every_link_picture_and_anchor_resolves(site):
    folder, found = site
    assert len(found) > 60
    broken, count = [], 0
    for name, page in found.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data", "javascript") or (
                name == "404.html" and link.startswith("/")
            ):
                continue  # 404.html is for a server, whose root is not known
            count += 1
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            if not target.resolve().is_file():
                broken.append(f"{name}: {link}")
            elif parts.fragment and target.suffix == ".html":
                inside = found[str(target.resolve().relative_to(folder.resolve()))]
                if unquote(parts.fragment) not in inside.ids and parts.fragment != "__skip":
                    broken.append(f"{name}: {link} (no such place)")
    assert broken == []
    assert count > 3000


def test_nothing_is_loaded_from_another_host(site):
    folder, found = site
    assert [f"{name}: {load}" for name, page in found.items() for load in page.loads if outside(load)] == []
    for path in folder.rglob("*.css"):
        assert re.findall(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)", path.read_text()) == [], path
    scripts = "".join(
        re.findall(r"<script[^>]*>(.*?)</script>", "".join((folder / name).read_text() for name in found), re.DOTALL)
    )
    assert not re.search(r"https?://", scripts.replace("http://www.w3.org", ""))


def test_it_works_from_a_folder(site):
    _, found = site
    links = [link for name, page in found.items() if name != "404.html" for link in page.links if not outside(link)]
    assert [link for link in links if urlsplit(link).path.endswith("/") or link.startswith("/")] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_a_page_with_all_that_its_file_says(site, name):
    _, found = site
    page, kind = found[f"algorithms/{name}.html"], discovery.algorithm(name)
    said = re.sub(r"[^a-z0-9]", "", page.text.lower())
    written = algorithm_pages.text_of(name)
    paragraphs = [
        *written.purpose,
        *written.body,
        *(paragraph for part in written.parts.values() for paragraph in part),
    ]
    for paragraph in [written.summary, *paragraphs]:
        for piece in re.split(r"\(\d\) ", paragraph.replace("`", "")):
            assert re.sub(r"[^a-z0-9]", "", piece.lower()) in said, piece
    assert {"method", "reference", "cost-of-an-outer-iteration", "scopes", "settings", "run-it", "curves"} <= page.ids
    assert ("deviations-from-the-paper" in page.ids) == ("Deviations" in written.parts)
    for spec in dataclasses.fields(kind):
        assert spec.name in page.text
        assert " ".join(spec.metadata["help"].replace("`", "").split()) in page.text
    assert any(f"algorithms/{name}.html" in link for link in found["choosing.html"].links)
    assert sum("<svg" in line for line in _source(site, f"algorithms/{name}.html").splitlines()) >= len(
        {case.task for case, _ in curves.found(name)}
    )


def _source(site, name):
    return (site[0] / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_page_begins_with_what_the_algorithm_is_for(site, name):
    written = algorithm_pages.text_of(name)
    assert written.purpose
    assert 60 <= len(" ".join(written.purpose)) <= 600
    source = _source(site, f"algorithms/{name}.html")
    first = re.search(r"</h1>\s*<p>(.*?)</p>", source, re.DOTALL)[1]
    assert Page(first).text == " ".join(written.purpose[0].replace("`", "").split())
    assert source.index(first) < source.index('<h2 id="method"')


WITHOUT_SYMBOLS = {}  # displayed line -> algorithms whose page has it, for lines of words only


@pytest.mark.parametrize("name", NAMES)
def test_displayed_equations_are_mathematics(site, name):
    """Every indented line of a docstring contains mathematics, and no plain notation is left."""
    source, written = _source(site, f"algorithms/{name}.html"), algorithm_pages.text_of(name)
    rows = re.findall(r"<tr>(.*?)</tr>", "".join(re.findall(r'<table class="equations">(.*?)</table>', source)))
    paragraphs = [*written.body, *(paragraph for part in written.parts.values() for paragraph in part)]
    assert len(rows) == sum(line.startswith("    ") for paragraph in paragraphs for line in paragraph.split("\n")) > 0
    for row in rows:
        assert "<math " in row or name in WITHOUT_SYMBOLS.get(Page(row).text, ()), row
    assert "language-text" not in source


def test_equations_on_written_pages_are_mathematics(site):
    for name in site[1]:
        assert not re.search(r'class="(?:arithmatex|plain|plain-display)"', _source(site, name)), name
    for name in ("index", "concepts/levels", "concepts/heterogeneity"):
        assert re.search(r'<math [^>]*display="block"', _source(site, f"{name}.html")), name


def test_names_of_other_algorithms_are_links(site):
    assert '<a href="fedbio_local.html">FedBiO-Local</a>' in _source(site, "algorithms/fedbioacc_local.html")
    assert '"SimFBO: Towards Simple' in _source(site, "algorithms/shrofbo.html")  # the title of a paper is not a link


@pytest.mark.parametrize("name", NAMES)
def test_no_plain_notation_is_left_on_an_algorithm_page(site, name):
    """Subscripts, powers and arrows are mathematics or code.

    The table of settings is an exception, because the terminal shows the same words."""
    source = _source(site, f"algorithms/{name}.html")
    article = re.search(r"<article.*?</article>", source, re.DOTALL)[0]
    article = re.sub(r'<h2 id="settings".*?</table>', " ", article, flags=re.DOTALL)
    article = re.sub(r"<(math|code|pre|svg|title)\b.*?</\1>", " ", article, flags=re.DOTALL)
    left = html.unescape(re.sub(r"<[^>]+>", " ", article))
    assert re.findall(r"\S*(?:\w_\w|\^|<-|->|\w\*)\S*", left) == []


def test_every_public_name_has_its_place(site):
    _, found = site
    for name in fedbilevel.__all__:
        assert any(
            anchor.endswith(f".{name}")
            for anchor in found["reference/api.html"].ids | found["reference/errors.html"].ids
        ), name
    for name in ("Task", "Settings", "ServerAlgorithm", "PeerAlgorithm", "Federation"):
        assert any(anchor.endswith(f".{name}") for anchor in found["reference/classes.html"].ids), name
    for name, value in vars(fedbilevel.errors).items():
        if isinstance(value, type) and issubclass(value, fedbilevel.FedBilevelError | Warning):
            assert f"fedbilevel.errors.{name}" in found["reference/errors.html"].ids, name


def test_examples_in_docstrings_are_code():
    assert fenced("A line.\n\n>>> 1 + 1\n2\n\nMore.") == "A line.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def test_parameters_in_docstrings_are_a_list():
    said = itemised("Run.\n\none: first.\ntwo, three: second\nand more.\nThen this.")
    assert said == "Run.\n\n\n- `one`: first.\n- `two`, `three`: second\nand more.\n\nThen this."
    assert itemised("A: b.\nname: only one") == "A: b.\nname: only one"


def test_results_have_their_pictures(site):
    folder, found = site
    for source, page in (
        ("experiments/RESULTS.md", "results/experiments.html"),
        ("benchmarks/RESULTS.md", "results/benchmarks.html"),
    ):
        drawn = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / source).read_text())
        assert drawn
        assert [load for load in found[page].loads if load.endswith(".png") and "favicon" not in load] == [
            f"{source.split('/')[0]}/{one}" for one in drawn
        ]
        for one in drawn:
            assert (folder / "results" / source.split("/")[0] / one).read_bytes() == (
                (ROOT / source).parent / one
            ).read_bytes()


def test_the_changelog_is_the_one_of_the_repository(site):
    words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", (ROOT / "CHANGELOG.md").read_text())
    assert re.sub(r"[^a-z0-9]", "", words.lower())[:5000] in re.sub(
        r"[^a-z0-9]", "", site[1]["changelog.html"].text.lower()
    )


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "experiments/README.md",
        "experiments/RESULTS.md",
        "benchmarks/README.md",
    ],
)
def test_relative_links_of_the_repository_resolve(name):
    path = ROOT / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(link).scheme]
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []


# ---- generated from declarations -----------------------------------------------------------------------------------


def test_the_table_says_what_the_algorithms_say(site):
    rows = {row[0].strip("`[]").partition("`")[0]: row for row in _rows(algorithm_pages.decision_table())}
    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        for scopes, mark in zip(algorithm_pages.SCOPES, row[1:5], strict=True):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ScopeWarning)
                    expected = "biased" if discovery.algorithm(name)().check_scopes(scopes) else "yes"
            except ScopeError:
                expected = "no"
            assert mark == expected, (name, scopes)
    assert rows["fedbio"][1:9] == [
        "yes",
        "yes",
        "yes",
        "yes",
        "1",
        "16",
        "3",
        "2",
    ]  # d_x + 2 d_y floats, five derivatives
    assert algorithm_pages.about("fedbio").state == "d_x + 2 d_y"
    assert rows["fedbio"][9] == algorithm_pages.prose("d_x + 2 d_y")
    assert rows["lfednest"][1:5] == ["biased", "biased", "yes", "yes"]
    assert rows["penalty"][8] == "0"
    assert algorithm_pages.about("penalty").state == "d_x + 2 d_y"


@pytest.mark.parametrize("name", sorted(curves.algorithms()))
def test_algorithms_say_whether_they_use_second_derivatives(name):
    assert curves.algorithms()[name].uses_products is algorithm_pages.about(name).second_order


def _rows(markdown):
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line] for line in lines]


def test_the_page_of_the_layer_has_the_table_of_the_code(site):
    text = html.unescape((site[0] / "concepts" / "aggregation.html").read_text())
    assert text.count("no (") == 2 * len(validity.CLASHES)
    assert all(one.why[1:].split("`")[0] in text for one in validity.CLASHES)


def test_lists_are_made_where_numbers_run_from_one():
    assert (
        algorithm_pages.listed("first: (1) one thing; (2) Two (3)rd. (3) three")
        == "first:\n\n1. One thing.\n2. Two (3)rd.\n3. Three."
    )
    assert (
        algorithm_pages.listed("those of SimFBO, except that (3) holds; (6) more")
        == "those of SimFBO, except that (3) holds; (6) more"
    )
    assert algorithm_pages.prose("is_A `x_y` <br>") == "is&#95;A <code>x&#95;y</code> &#60;br&#62;"
    assert algorithm_pages.prose("then u* `x_y`") == 'then <span class="plain">u&#42;</span> <code>x&#95;y</code>'
    assert (
        algorithm_pages.prose("T Dinh, where mu = 1", equations_only=True)
        == 'T Dinh, where <span class="plain">mu = 1</span>'
    )
    assert (
        algorithm_pages.linked("FedBiO and `FedBiO` of FedBiO-Local", "simfbo")
        == "[FedBiO](fedbio.md) and `FedBiO` of [FedBiO-Local](fedbio_local.md)"
    )


def test_letters_in_costs_are_explained():
    """Every symbol is that of a counting setting, in the equations, or a setting of averaging."""
    for name in NAMES:
        explained = algorithm_pages.letters(discovery.algorithm(name), algorithm_pages.text_of(name))
        assert [letter for letter, words in explained.items() if not words] == [], name
    key = lambda name: algorithm_pages.letters(discovery.algorithm(name), algorithm_pages.text_of(name))
    table, drawn = "in the table of settings", "drawn as stated above"
    assert key("fbo_aggitd") == {"N": table, "Q": drawn, "tau": table, "tau_x": table}
    assert key("fednest")["N'"] == key("adafbio")["k"] == drawn
    assert key("simfbo") == {"tau_i": f"the value of client i for tau {table}"}
    assert key("hgp") == {
        "T": table,
        "M": table,
        "S": (
            "`num_steps` of the averaging: steps of one averaging (None: 10, on a base network one cycle, and a robust "
            "one until all peers agree)"
        ),
    }
    assert key("commfedbio") == dict.fromkeys("ERkr", table)


@pytest.mark.parametrize(
    ("cost", "unexplained"),
    [
        ("g_y: E tau, H v: R", ["tau"]),
        ("2W rounds", ["W"]),
        ("N' rounds", ["N'"]),
        ("E + 1 rounds, d_y, J u, a `q`", []),
    ],
)
def test_letters_that_mean_nothing_or_a_step_are_noticed(cost, unexplained):
    """tau of commfedbio is the step of u, which counts nothing."""
    written = algorithm_pages.text_of("commfedbio")._replace(parts={"Cost": [cost]})
    explained = algorithm_pages.letters(discovery.algorithm("commfedbio"), written)
    assert [letter for letter, words in explained.items() if not words] == unexplained


def test_the_key_of_a_page_names_every_letter(site):
    for name in NAMES:
        said = re.search(r"Symbols: ([^.]*)\.", site[1][f"algorithms/{name}.html"].text)[1]
        assert {"d_x", "d_y", *algorithm_pages.letters(discovery.algorithm(name), algorithm_pages.text_of(name))} <= {
            *re.findall(r"[\w']+", said)
        }, name
    whole = (
        "Symbols: d_x and d_y are the lengths of x and y; N, tau and tau_x are in the table of settings; "
        "Q is drawn as stated above."
    )
    assert whole in site[1]["algorithms/fbo_aggitd.html"].text


def test_a_round_between_peers_is_what_the_pages_say(site):
    """The verbs on a page, and the rounds per outer iteration of the recorded run."""
    words = {
        "mix": "an average is 10 steps of Push-Sum",
        "push": "every push counts as a round",
        "gossip": "every exchange with the neighbours counts",
    }
    for name, verbs in {"hgp": {"mix", "push"}, "sgp": {"push"}, "sparkle": {"gossip"}}.items():
        text = site[1][f"algorithms/{name}.html"].text
        assert {verb for verb, said in words.items() if said in text} == verbs, name
        assert {*made(discovery.algorithm(name), curves.found(name)[0][0].settings).verbs()} == verbs
    assert "counts as a round" not in site[1]["algorithms/fedbio.html"].text
    assert {name for name in NAMES if algorithm_pages.about(name).peers} == {
        "hgp",
        "ma_dsbo_gt",
        "mdbo",
        "rasgp",
        "sgp",
        "sparkle",
    }  # of which choosing.md says how many rounds they take
    rounds = {
        row[0].partition("`]")[0].strip("[`"): float(row[5].replace(",", ""))
        for row in _rows(algorithm_pages.decision_table())
    }
    sgp, hgp = (made(discovery.algorithm(name), curves.found(name)[0][0].settings) for name in ("sgp", "hgp"))
    assert rounds["sparkle"] == rounds["mdbo"] == 1
    nested = made(discovery.algorithm("ma_dsbo_gt"), curves.found("ma_dsbo_gt")[0][0].settings)
    assert rounds["ma_dsbo_gt"] == nested.num_lower_steps + nested.num_terms + 1
    assert rounds["sgp"] == rounds["rasgp"] == sgp.num_lower_steps
    assert rounds["hgp"] == hgp.num_lower_steps + 10 * (hgp.num_terms + 1)


def test_what_is_said_of_all_algorithms(site):
    """How many there are of each kind, and that each file says what it follows and how closely."""
    ways = sum(algorithm_pages.about(name).uses_upper for name in NAMES)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{ways} federated hypergradient methods and {len(NAMES) - ways} baselines" in readme
    assert (
        f"{ways} federated hypergradient methods and {len(NAMES) - ways} baselines that use the lower loss alone"
        in site[1]["index.html"].text
    )
    for name in NAMES:
        assert {"Reference", "Deviations", "Cost"} <= {*algorithm_pages.text_of(name).parts}, name


def test_what_the_farms_learned(site):
    """The penalties that the tutorial prints, against where they began."""
    page = (ROOT / "docs" / "tutorials" / "folders.md").read_text()
    found, begun = (
        [float(value) for value in re.search(r"^\[(0\.0, .*)\]$", page, re.MULTILINE)[1].split(", ")],
        4 / (1 + math.exp(3.0)),
    )
    rounded = [(place, value) for place, value in enumerate(found) if place >= 3]
    less, same, more = (
        [place for place, value in rounded if (value > round(begun, 1)) - (value < round(begun, 1)) == sign]
        for sign in (-1, 0, 1)
    )
    assert f"All penalties began at {begun:.1f}." in page
    assert found[:3] == [0.0, 0.0, 0.0]
    assert (len(more), len(same), len(less)) == (7, 0, 2)
    assert f"seven are damped more than at the start, and two (`m.{less[0]}` and `m.{less[1]}`) less" in page


# ---- curves and pictures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_curves_whose_settings_are_still_valid(name):
    found = curves.found(name)
    assert [case for case, _ in found] == list(curves.cases(name)), (
        f"its settings, suggestions or scopes have changed: run python -m website.curves {name}"
    )
    for case, rows in found:
        made(discovery.task(case.task), case.task_settings)
        made(discovery.algorithm(name), case.settings)
        assert bool(case.options) == issubclass(discovery.algorithm(name), PeerAlgorithm)
        if case.options:
            made(Network, case.options["network"])
            made(Averaging, case.options["averaging"])
        assert rows[0]["iteration"] == 0
        assert rows[-1]["iteration"] == case.iterations or rows[-1]["rounds"] >= curves.MOST_ROUNDS[bool(case.options)]
        parsed(case.command())


def test_curves_say_what_made_them():
    for module in (curves, facts):
        assert module.recorded()["command"] == module.COMMAND == f"python -m {module.__name__}"
        assert re.match(r"\d+\.\d+", module.recorded()["version"])
    assert sorted(curves.recorded()["curves"]) == sorted(NAMES)


@pytest.mark.parametrize("name", ["fedbio", "fbo_aggitd", "sparkle", "distbio"])
def test_the_beginning_of_a_curve_can_be_computed_again(name):
    case, rows = curves.found(name)[0]
    assert case.dtype == "float64"
    again = list(islice(curves.measured(case), 6))
    assert len(again) == 6
    for one, other in zip(again, rows, strict=False):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_exact_methods_reach_the_solution_and_biased_ones_do_not():
    """The statements of the pages about heterogeneity hold for the numbers that they show."""
    ends = {name: curves.found(name)[0][1][-1]["distance"] for name in ("fedbio", "fedbioacc", "simfbo", "lfednest")}
    assert max(ends["fedbio"], ends["fedbioacc"], ends["simfbo"]) < 1e-6
    assert ends["lfednest"] > 0.1
    found = facts.recorded()["heterogeneity"]["distance"]
    assert max(found["fedbio"]) < 1e-3
    assert found["lfednest"][0] < 1e-3 < 0.1 < found["lfednest"][-1]
    assert found["lfednest"][1:] == sorted(found["lfednest"][1:])


def test_facts_can_be_computed_again():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScopeWarning)
        known = facts.recorded()["heterogeneity"]["paths"]
        for name in facts.METHODS:
            assert facts.path(name, 4).tolist() == [pytest.approx(point, rel=1e-9) for point in known[name][:5]]
        assert facts.push_sum(3)["rows"] == [pytest.approx(row) for row in facts.recorded()["push_sum"]["rows"][:4]]


@pytest.mark.parametrize("name", list(pictures.ALL))
def test_pictures_are_those_that_the_script_draws(name):
    """They are drawn from recorded numbers by plain text, so they are the same everywhere."""
    drawn = pictures.ALL[name]()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn.svg() + "\n"
    assert drawn.title
    assert not re.search(r'(?:stroke|fill)="#', drawn.svg())  # colours are the theme's


def test_every_picture_is_on_a_page(site):
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.ALL)
    sources = "".join(_source(site, name) for name in site[1])
    for name, draw in pictures.ALL.items():
        assert f"<title>{draw().title.replace(chr(39), '&#x27;')}</title>" in sources, name


def test_colours_are_readable_in_both_themes():
    """Text has a contrast of at least 4.5 to 1 on the background and on the boxes of a picture."""

    def light(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        return sum(
            share * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    def contrast(one, other):
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for colours, background in ((LIGHT, "#ffffff"), (DARK, "#1e2129")):
        for name in ("ink", "grey", "blue", "orange", "green", "red"):
            assert contrast(colours[name], background) > 4.5, name
            assert contrast(colours[name], colours["soft"]) > 4, name


# ---- what the pages quote ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("quoted", list(quotes.quoted()), ids=lambda one: f"{one.page}:{one.place[0]}")
def test_code_on_pages_runs_and_prints_what_they_quote(quoted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = quotes.printed(quoted)
    if quoted.text is None:
        assert said == ""
    else:
        assert quoted.text.strip()
        check_quoted(quoted.text, said)
        if quotes.GAP in quoted.text.splitlines():
            assert quotes.shortened(quoted.text, quoted.text) == quoted.text
        else:
            assert len(said.splitlines()) == len(quoted.text.splitlines())


def test_a_shortened_quotation_keeps_lines_of_the_same_form():
    said = "begin\n a 1,234 of 5\n a 7 of 8\nleft out\n12.5% are right\n"
    assert quotes.shortened(said, "...\n a  1 of  9\n...\n3% are right\n") == (
        "...\n a 1,234 of 5\n...\n12.5% are right\n"
    )
    with pytest.raises(SystemExit, match="no line like 'c 1'"):
        quotes.shortened(said, "...\nc 1\n")


def parsed(line):
    """click parses the command, with known flags and valid choices; nothing is run."""
    words = shlex.split(line)
    assert words[0] == "fedbilevel"
    command, rest = cli, words[1:]
    while isinstance(command, click.Group):
        command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
        assert command is not None, line
    command.make_context(command.name, rest)


@pytest.mark.parametrize("page", list(quotes.pages()))
def test_quoted_commands_can_be_typed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = quotes.pages()[page]
    for block in quotes.BLOCK.finditer(text):
        if block[2]:
            Path(block[2]).write_text(block[3])
    for line in quotes.commands(text):
        if "--config" in line and not Path(shlex.split(line)[shlex.split(line).index("--config") + 1]).exists():
            continue  # the record of a run before it
        parsed(line)


def test_names_of_commands_in_running_text_exist():
    for page, text in quotes.pages().items():
        for name in re.findall(r"`fedbilevel ([a-z]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            assert name in places(), f"{page} speaks of fedbilevel {name}"


# ---- CITATION.cff --------------------------------------------------------------------------------------------------


def test_the_citation_is_whole():
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert content["cff-version"] == "1.2.0"
    assert content["title"] == "fedbilevel"
    assert content["version"] == fedbilevel.__version__
    assert content["license"] == "Apache-2.0"
    assert content["message"]
    assert content["authors"] == [{"name": "The fedbilevel developers"}]
    assert set(content) <= {
        "cff-version",
        "message",
        "type",
        "title",
        "abstract",
        "version",
        "license",
        "authors",
        "keywords",
        "references",
    }
    assert len(content["references"]) == 4
    docstrings = " ".join(
        " ".join(paragraph.split())
        for name in NAMES
        for part in algorithm_pages.text_of(name).parts.values()
        for paragraph in part
    )
    for reference in content["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
        assert set(reference) <= {
            "type",
            "title",
            "authors",
            "year",
            "status",
            "collection-title",
            "volume",
            "conference",
        }
        assert all(set(author) == {"family-names", "given-names"} for author in reference["authors"])
        assert f'"{reference["title"]}"' in docstrings  # the same title as where the algorithm is written down

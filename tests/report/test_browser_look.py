"""The look of the page in a headless Chromium: hostile text, themes, narrow windows, paper and
requests.
"""

import pytest

from fedbilevel.report import write_report
from support.browser.pages import NEEDS_BROWSER
from support.browser.records import (
    HOSTILE,
    hostile,
    rows_of,
    write_run,
)

pytestmark = [NEEDS_BROWSER, pytest.mark.wait]


def wide(folder):
    """Runs with more figures than a window is wide."""
    figures = {
        f"{one}_{other}": (lambda i: 0.1 * i)
        for one in ("macro", "balanced", "fairness", "personal")
        for other in ("accuracy", "precision", "recall")
    }
    for seed in (0, 1):
        write_run(folder / f"{seed}", "adasimfbo", seed, rows=rows_of(seed, **figures), whole=False)
    return folder


def test_a_table_that_goes_on_behind_its_edge_is_shaded_there(opened, tmp_path):
    page = opened(write_report(wide(tmp_path / "runs"), tmp_path / "wide.html"))
    page.size(1200, 900)
    box = "document.getElementById('finals-table')"
    assert page.run(f"{box}.scrollWidth > {box}.clientWidth")

    def shades():
        """How far the colours at the edges are from the one in the middle, on a line below the
        words.
        """
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        place = page.run(
            f"(() => {{ const r = {box}.getBoundingClientRect(); return [r.left + scrollX, r.bottom + scrollY "
            f"- 4, r.width]; }})()"
        )
        clip = {**dict(zip(("x", "y", "width"), place, strict=True)), "height": 1, "scale": 1}
        picture = page.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        draw = "const g = c.getContext('2d', {willReadFrequently: true}); g.drawImage(i, 0, 0);"
        made = (
            f"const i = new Image(); i.src = 'data:image/png;base64,{picture}'; await i.decode(); const c = "
            "document.createElement('canvas');"
        )
        at = "[5, i.width >> 1, i.width - 6].map(x => [...g.getImageData(x, 0, 1, 1).data])"
        left, middle, right = page.run(
            f"(async () => {{ {made} c.width = i.width; c.height = 1; {draw} return {at}; }})()"
        )
        return [sum(abs(a - b) for a, b in zip(edge, middle, strict=True)) for edge in (left, right)]

    for _ in ("light", "dark"):
        left, right = shades()
        assert (left < 6, right > 60) == (True, True), (left, right)
        page.run(f"{box}.scrollLeft = {box}.scrollWidth")
        left, right = shades()
        assert (left > 60, right < 6) == (True, True), (left, right)
        page.run(f"{box}.scrollLeft = 0")
        page.press("#theme")
    page.size(1100, 900)


def test_paper_holds_whole_tables_and_whole_words(opened, tmp_path):
    page = opened(write_report(wide(tmp_path / "runs"), tmp_path / "wide.html"))
    page.size(688, 1000)  # as wide as a sheet between its margins
    page.send("Emulation.setEmulatedMedia", media="print", features=[])
    heads = "[...document.querySelectorAll('#finals-table thead th')].map(e => e.textContent)"
    before = page.run(heads)
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert (
        page.run(
            "[...document.querySelectorAll('table')].filter(t => t.offsetParent).map(t => "
            "t.offsetWidth).filter(w => w > 688)"
        )
        == []
    )
    assert [name for name in page.run(heads) if name not in ("curve", "runs")] == before[2:]
    assert page.run("document.querySelectorAll('#finals-table table').length") > 1
    rows = (
        "(() => { const r = document.createRange(); return [...document.querySelectorAll('tbody "
        "th')].map(e => (r.selectNodeContents(e), [e.textContent, "
    )
    heights = page.run(rows + "new Set([...r.getClientRects()].map(c => Math.round(c.bottom / 6))).size])); })()")
    assert {lines for text, lines in heights if text.endswith("adasimfbo")} == {1}
    page.run("window.dispatchEvent(new Event('afterprint'))")
    assert page.run(heads) == before
    page.send("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "light"}])
    page.size(1100, 900)


def test_hostile_words_stay_words(opened, tmp_path):
    page = opened(write_report(hostile(tmp_path), tmp_path / "hostile.html"))
    assert page.run("document.title") == page.run("document.getElementById('title').textContent") == HOSTILE
    assert page.run("document.querySelectorAll('main img, main b, main a, main script').length") == 0
    page.choose("metric", HOSTILE)
    assert page.run("document.querySelector('.card h3').textContent") == HOSTILE
    assert HOSTILE in page.run("document.querySelector('#curves-plot .ytitle').textContent")  # as it is, not as markup
    assert HOSTILE in page.run("document.querySelector('#ledger-plot').textContent")
    assert page.run("document.querySelector('#configurations pre').textContent") == HOSTILE
    page.run("document.title = 'mine'")
    assert page.run("new Promise(done => setTimeout(() => done(document.title), 100))") == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_reader_and_the_switch(opened, scheme):
    page = opened("runs", scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('curves-plot').layout.font.color"
    colours = {"light": ("rgb(255, 255, 255)", "#16191d"), "dark": ("rgb(20, 23, 27)", "#e9ecef")}
    other = "dark" if scheme == "light" else "light"
    assert (page.run(ground), page.run(ink)) == colours[scheme]
    assert page.run("document.getElementById('theme-name').textContent").lower() == other
    page.press("#theme")
    assert (page.run(ground), page.run(ink)) == colours[other]
    page.press("#theme")
    assert (page.run(ground), page.run(ink)) == colours[scheme]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs", "comparison", "influence", "personalisation"])
def test_a_phone_needs_no_scrolling_sideways(opened, name):
    page = opened(name)
    page.size(380, 800)
    page.until(
        "[...document.querySelectorAll('.main-svg')].every(e => e.getBoundingClientRect().right < 381)"
    )  # plots follow a moment later
    assert page.run("[document.documentElement.scrollWidth, document.body.scrollWidth].every(w => w <= 380)")
    beyond = "e.getBoundingClientRect().right > 381 && !e.closest('.box, pre, svg')"
    assert (
        page.run(
            f"[...document.querySelectorAll('main *')].filter(e => {beyond}).map(e => e.tagName + '.' + e.className)"
        )
        == []
    )
    assert page.run(
        "[...document.querySelectorAll('.box')].some(b => b.scrollWidth > b.clientWidth)"
    )  # tables do, within their box
    page.size(1100, 900)


def test_the_page_prints(opened):
    page = opened("runs", "dark")
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("[...document.querySelectorAll('.controls, button')].every(e => e.offsetParent === null)")
    assert page.run("getComputedStyle(document.querySelector('#curves-plot .xtick text')).fill") == "rgb(34, 34, 34)"
    pdf = page.printed()
    assert pdf[:5] == b"%PDF-"
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/") + pdf.count(b"/Type/Page/") >= 2
    page.until(
        "[...document.querySelectorAll('.js-plotly-plot')].every(d => d.offsetParent === null || d.layout.autosize)"
    )  # as wide as the window again


def test_everything_has_a_name_for_those_who_cannot_see_it(opened):
    page = opened("runs")
    assert page.run("document.querySelectorAll('h1').length") == 1
    assert (
        page.run("[...document.querySelectorAll('table')].filter(t => !t.caption || !t.caption.textContent).length")
        == 0
    )
    assert page.run("[...document.querySelectorAll('select, input')].filter(e => !e.closest('label')).length") == 0
    assert (
        page.run(
            "[...document.querySelectorAll('[role=img]')].filter(e => e.offsetParent !== null && "
            "!e.getAttribute('aria-label')).map(e => e.id)"
        )
        == []
    )
    assert page.run("[...document.querySelectorAll('thead th:not([scope]), tbody th:not([scope])')].length") == 0


def test_the_browser_itself_forbids_every_request(chromium, tabs, reports):
    page = tabs.pop((reports["comparison"], "light"), None) or chromium.page().open(
        reports["comparison"].as_uri()
    )  # the last to use that tab
    assert page.run("fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')") == "refused"
    image = (
        "const i = new Image(); i.onload = () => done('asked'); i.onerror = () => done('refused'); i.src "
        "= 'http://127.0.0.1:9/a.png';"
    )
    assert page.run(f"new Promise(done => {{ {image} }})") == "refused"
    page.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.owned = true'; "
        "document.body.append(s); })()"
    )
    assert page.run("window.owned") is None
    said = [
        entry["entry"]["text"]
        for entry in page.complaints
        if "Content Security Policy" in entry.get("entry", {}).get("text", "")
    ]
    for directive in ("connect-src", "img-src", "script-src"):
        assert any(f'directive: "{directive}' in one or f"directive '{directive}" in one for one in said), said
    page.close()

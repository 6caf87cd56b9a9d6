"""Fixtures of pages in a browser.

The browser and its tabs are shared, because opening a page takes seconds.
"""

import itertools

import pytest

from fedbilevel.report import write_report
from support.browser import browser
from support.browser.records import write_comparison, write_influence, write_personalisation, write_run


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    made = browser.Browser(browser.find(), tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Two seeds of fedbio, whose seconds differ, and one of fedavg, in one page; and a page of each
    study.
    """
    place = tmp_path_factory.mktemp("records")
    for name, seed in (("fedbio", 0), ("fedbio", 1), ("fedavg", 5)):
        write_run(place / "runs" / f"{name}-{seed}", name, seed)
    write_comparison(place / "comparison")
    write_influence(place / "influence")
    write_personalisation(place / "personalisation")
    return {
        folder.name: write_report(folder, place / f"{folder.name}.html")
        for folder in sorted(place.iterdir())
        if folder.is_dir()
    }


@pytest.fixture(scope="session")
def tabs(chromium):
    """Opening takes a second or two, so tests share tabs, and every test sets the switches that it
    needs.
    """
    return {}


@pytest.fixture
def opened(chromium, reports, tabs):
    """Opens a page once; after every test nothing may have gone wrong in it, and nothing been asked
    for.
    """
    used = []

    def look(name, scheme="light"):
        place = reports[name] if isinstance(name, str) else name
        if (place, scheme) not in tabs:
            tabs[place, scheme] = chromium.page(scheme=scheme).open(place.as_uri())
        tabs[place, scheme].send("Page.bringToFront")  # a tab that nobody sees is not laid out anew
        used.append((tabs[place, scheme], place.as_uri()))
        return used[-1][0]

    yield look
    for page, address in used:
        page.run("new Promise(done => setTimeout(done, 20))")
        assert page.complaints == []
        assert page.requests == [address]


@pytest.fixture
def downloads(tmp_path):
    """Presses a button of a page and returns the file that the browser saved."""
    numbers = itertools.count()

    def of(page):
        def saved(selector):
            folder = tmp_path / f"saved{next(numbers)}"
            folder.mkdir()
            page.browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
            page.press(selector)
            # a file appears empty under its own name before its content replaces it
            finished = lambda: [
                place
                for place in folder.iterdir()
                if place.suffix in (".png", ".svg", ".csv") and place.stat().st_size > 0
            ]
            page.until_here(finished)
            return finished()[0]

        return saved

    return of

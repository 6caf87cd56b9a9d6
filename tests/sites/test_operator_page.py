"""The page of a site's operator: what it shows and does, whom it refuses, and how it looks and
works in a Chromium."""

import json
import os
import re
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from fedbilevel.errors import ReportError, SettingError
from fedbilevel.report.operating import LONGEST, OperatorPage, act, content, serve
from fedbilevel.sites import operator
from fedbilevel.sites.view import look
from support.browser import browser
from support.sites.operator_kits import ONE, TWO, ask, log_answers, log_refusal, write_status

pytestmark = pytest.mark.wait

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


@contextmanager
def served(kit):
    with OperatorPage(kit, lambda: look(kit / "site"), "ada") as page:
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join()


@pytest.fixture
def page(kit):
    with served(kit) as found:
        yield found


def ask_page(page, path, *, body=None, **headers):
    """Status, headers and text; the token goes along unless another one is given."""
    given = {"X-Token": page.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
    place = f"http://127.0.0.1:{page.server_address[1]}{path}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(place, data, {name: value for name, value in given.items() if value is not None})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def pressed(page, **body):
    status, _, text = ask_page(page, "/act", body=body)
    return status, json.loads(text)


# ---- what it does --------------------------------------------------------------------------------


def test_the_buttons_decide_as_the_commands_do(page, folder):
    ask(folder)
    ask(folder, TWO, run="other")
    assert pressed(page, action="approve", digest=ONE) == (200, {"said": "cleaning is approved."})
    assert pressed(page, action="refuse", digest=TWO) == (200, {"said": "other is refused."})
    assert [one["by"] for one in operator.requests(folder)] == ["ada", "ada"]
    assert pressed(page, action="leave", run="cleaning")[0] == 200
    assert [operator.decision(folder, digest) for digest in (ONE, TWO)] == ["left", "refused"]
    assert pressed(page, action="pause")[0] == 200
    assert operator.is_paused(folder)
    assert pressed(page, action="unpause")[0] == 200
    assert not operator.is_paused(folder)


def test_an_unknown_action_is_refused_with_a_sentence(page, folder):
    with pytest.raises(SettingError, match="no action of this page"):
        act(folder, "ada", {"action": "approve"})
    for body in ({"action": "approve", "digest": ONE}, {"action": "stop"}, {"action": 3}, [], "null"):
        status, _, text = ask_page(page, "/act", body=body)
        assert (status, list(json.loads(text))) == (400, ["error"])
    assert ask_page(page, "/act", body="x" * LONGEST)[0] == 400
    assert ask_page(page, "/other", body={"action": "pause"})[0] == 400
    assert not operator.is_paused(folder)


def test_the_content_has_the_facts_and_whole_plans(page, folder):
    ask(folder)
    write_status(folder)
    found = json.loads(ask_page(page, "/data.json")[2])
    assert (found["name"], found["run"], found["progress"], found["paused"]) == ("north", "cleaning", [4, 10], False)
    rows = dict(found["pending"][0]["rows"])
    assert rows["Leaves"][1:] == ["lower_steps: 3250 numbers", "partial_grad: 459 numbers"]
    assert "token" not in found


def test_the_reason_why_a_site_cannot_answer_is_named_first(kit, folder):
    def trouble(processes):
        return content(look(folder, processes), kit)["trouble"]

    assert trouble(None) == ""
    assert trouble({}).startswith("This site is not running")
    assert trouble({os.getpid(): "parent"}).startswith("This site is not connected")
    (folder / operator.CONTROL).write_text("{")
    assert trouble(None) == "A file of this site cannot be read; see below."


def test_a_damaged_status_is_reported_and_the_page_still_works(page, folder):
    damaged = '{"run":"r","state":"computing","iteration":NaN,"norms":{"a":1e999},"last_error":{"time":"x","text":1}}'
    for text, said in ((damaged, "iteration, last_error is not"), ("{", "Expecting"), ("[" * 10**5, "recursion")):
        (folder / "status.json").write_text(text)
        for path in ("/data.json", page.address[page.address.index("/?") :]):
            status, _, answer = ask_page(page, path)
            assert (status, "status.json cannot be read" in answer, said in answer) == (200, True, True)


# ---- whom it refuses -----------------------------------------------------------------------------


def test_without_the_token_there_is_no_page_no_content_and_no_action(page, folder):
    for token in (None, "", "x" * len(page.token), page.token[:-1]):
        assert ask_page(page, "/data.json", X_Token=token)[0] == 403
        assert ask_page(page, "/act", body={"action": "pause"}, X_Token=token)[0] == 403
        status, _, text = ask_page(page, f"/?token={token or ''}", X_Token=None)
        assert (status, page.token in text) == (403, False)
    assert ask_page(page, "/", X_Token=None)[0] == 403
    assert ask_page(page, "/other")[0] == 404
    assert not operator.is_paused(folder)


def test_another_host_name_or_origin_is_refused(page, folder):
    port = page.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
        assert ask_page(page, "/data.json", Host=host)[0] == 403
        assert ask_page(page, "/act", body={"action": "pause"}, Host=host)[0] == 403
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}"):
        assert ask_page(page, "/act", body={"action": "pause"}, Origin=origin)[0] == 403
    assert not operator.is_paused(folder)
    assert ask_page(page, "/act", body={"action": "pause"}, Origin=f"http://localhost:{port}")[0] == 200


def test_every_start_has_another_token(kit):
    with OperatorPage(kit, lambda: look(kit / "site"), "ada") as one, OperatorPage(kit, one.look, "ada") as two:
        assert one.token != two.token
        with pytest.raises(ReportError, match="another program uses it"):
            OperatorPage(kit, one.look, "ada", one.server_address[1])


def test_the_policy_allows_one_script_one_style_and_nothing_from_elsewhere(page):
    _, headers, text = ask_page(page, page.address[page.address.index("/?") :])
    policy = headers["Content-Security-Policy"]
    scripts = "default-src 'none'; script-src HASH; style-src HASH; connect-src 'self'; img-src data:; "
    rest = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    assert re.sub(r"'sha256-[\w+/=]+'", "HASH", policy) == scripts + rest
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert "http://" not in text.replace("http-equiv", "")


def test_a_request_cannot_become_markup(page, folder):
    ask(folder, who=HOSTILE, run=HOSTILE, task={"name": HOSTILE})
    _, _, text = ask_page(page, page.address[page.address.index("/?") :])
    assert "<img" not in text
    assert text.count("</script>") == 2


def test_it_is_served_until_ctrl_c(kit):
    page, told = OperatorPage(kit, lambda: look(kit / "site"), "ada"), []

    def begun(address):
        told.append(address)
        page.service_actions = interrupt

    def interrupt():
        raise KeyboardInterrupt

    serve(page, begun)
    assert told == [page.address]


def test_the_file_that_opens_the_page_is_deleted_after_the_first_visit(page, kit):
    way = page.make_way()
    assert ask_page(page, "/")[0] == 403
    assert way.exists()
    assert ask_page(page, page.address[page.address.index("/?") :])[0] == 200
    assert list(kit.glob("open-*")) == []


# ---- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.find() is None:
        pytest.skip("no Chromium is installed")
    made = browser.Browser(browser.find(), tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def text_of(tab, selector):
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.innerText).join('|')")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (400, "dark")])
def test_an_operator_approves_pauses_resumes_and_leaves_on_the_page(chromium, page, folder, width, scheme):
    log_answers(folder)
    log_refusal(folder, HOSTILE, caller=HOSTILE)
    ask(folder)
    operator.approve(folder, ONE, "ada")
    ask(folder, TWO, run=HOSTILE)
    write_status(folder)
    tab = chromium.page(width=width, scheme=scheme).open(page.address)
    try:
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert text_of(tab, "h1") == "north"
        assert HOSTILE in text_of(tab, "#pending h3")
        assert "lower_steps: 3250 numbers" in text_of(tab, "#pending")
        assert "outer iteration 4 of 10" in text_of(tab, "#rows")
        assert tab.run("document.getElementById('progress').value / document.getElementById('progress').max") == 0.4
        tab.press(f"[data-digest='{TWO}'] button.main")
        tab.until("document.getElementById('requests').hidden")
        assert operator.decision(folder, TWO) == "approved"
        for wanted, paused in (("Resume", True), ("Pause", False)):
            tab.press("#pause")
            tab.until(f"document.getElementById('pause').textContent === '{wanted}'")
            assert operator.is_paused(folder) is paused
        tab.press("#leave")
        assert operator.decision(folder, ONE) == "approved"
        tab.press("#leave")
        tab.until("document.getElementById('status').textContent.includes('no further part')")
        assert operator.decision(folder, ONE) == "left"
        write_status(folder, state="left", iteration=5)
        tab.until("document.getElementById('leave').hidden")
        assert "cleaning: left" in text_of(tab, "#rows")
        assert tab.complaints == []
        own = page.address[: page.address.index("?")]
        assert all(address.startswith(own) for address in tab.requests)
    finally:
        tab.close()


def test_the_page_reports_a_refusal_by_the_server_and_the_servers_end(chromium, kit, folder):
    ask(folder)
    with served(kit) as page:
        tab = chromium.page().open(page.address)
        (folder / operator.APPROVALS).write_text("{")
        tab.press("#pending button.main")
        tab.until("document.getElementById('status').textContent.includes('approvals.json cannot be read')")
        (folder / operator.APPROVALS).unlink()
    page.server_close()
    tab.until("document.getElementById('status').textContent.includes('lost its server')")
    tab.close()


def test_the_file_that_opens_the_page_leads_a_browser_there(chromium, page, folder):
    way = page.make_way()
    tab = chromium.page().open(way.as_uri())
    assert text_of(tab, "h1") == "north"
    assert not way.exists()
    tab.close()

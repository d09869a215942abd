"""Reports in a real browser: no errors, no requests, and everything works with a pointer and with the keyboard.

One session of headless Chromium serves all tests. Where it is not installed they are skipped, and fail instead where
DETENT_REQUIRE_BROWSER is 1.
"""

import base64
import json
import os
import shutil
from dataclasses import replace

import pytest
from report_models import EVIL, big_report, example_verification, full_report

import detent.report as qr

WIDTHS = [360, 768, 1280]
NEEDED = ("chromium", "chromedriver")
LONG = "/model/" + "a_very_long_name_without_any_place_to_break" * 4


def driver_or_reason():
    """Return a browser and "", or None and the reason."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return None, f"{' and '.join(missing)} not installed: apt install chromium chromium-driver"
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return None, "selenium is not installed"
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(executable_path=shutil.which("chromedriver"))  # a path, so that nothing is downloaded
    return webdriver.Chrome(options=options, service=service), ""


@pytest.fixture(scope="module")
def browser():
    driver, reason = driver_or_reason()
    if driver is None:
        if os.environ.get("DETENT_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Paths of reports by name."""
    folder = tmp_path_factory.mktemp("pages")
    full = full_report(folder, names=("fc0", EVIL, LONG))
    failed = replace(
        full,
        verification=qr.build(folder / "small.onnx", verification=example_verification(differing=3)).verification,
    )
    reports = {"full": full, "big": big_report(60), "failed": failed, "bare": qr.Report("bare", None, 8)}
    other = replace(
        full,
        title=LONG,
        layers=tuple(replace(each, output_sqnr_db=each.output_sqnr_db - 3) for each in full.layers[1:]),
    )
    reports["both"] = qr.compare(full, other)
    for name, page in reports.items():
        page.save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.fixture(scope="module")
def show(browser, pages):
    """Open a report at a width, in light or dark colors."""

    def opened(name, width=1280, scheme="light", media="screen"):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # so that clicked elements do not move
        ]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(pages[name].as_uri())
        return browser

    return opened


def run(browser, script, *arguments):
    return browser.execute_script(script, *arguments)


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def key(name):
    from selenium.webdriver.common.keys import Keys

    return getattr(Keys, name)


def column(browser, index):
    """Return the visible values of a column, row by row."""
    script = """return Array.from(document.querySelectorAll('#layer-table tbody:not([hidden]) .row'),
        row => row.cells[arguments[0]].dataset.v)"""
    return run(browser, script, index)


def sort_state(browser):
    return run(
        browser,
        "return Array.from(document.querySelectorAll('th[aria-sort]'), th => [th.cellIndex, th.ariaSort])",
    )


def heads(browser):
    from selenium.webdriver.common.by import By

    return browser.find_elements(By.CSS_SELECTOR, "#layer-table thead button")


@pytest.mark.parametrize("name", ["full", "big", "failed", "bare", "both"])
def test_no_errors_and_no_requests(show, pages, name):
    browser = show(name)
    run(browser, "document.querySelectorAll('button:not(#save-json)').forEach(each => each.click())")
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert [url.partition("#")[0] for url in urls] == [pages[name].as_uri()]


def test_the_policy_stops_requests(show):
    browser = show("full")
    run(browser, "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)")
    script = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('stopped'))"
    assert browser.execute_async_script(script) == "stopped"
    messages = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "Content Security Policy" in messages


def test_hostile_names_stay_text(show):
    browser = show("full")
    assert browser.title == "small & <b>bold</b> · detent"
    names = run(browser, "return Array.from(document.querySelectorAll('.lname'), each => each.textContent)")
    assert EVIL in names
    assert run(browser, "return document.images.length") == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["full", "big", "both"])
def test_nothing_overflows(show, name, width):
    browser = show(name, width)
    run(browser, "document.getElementById('expand').click()")
    run(browser, "document.querySelectorAll('details').forEach(each => each.open = true)")
    wide = """return Array.from(document.querySelectorAll('body *'))
        .filter(each => !each.closest('.scroll, pre, svg'))
        .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
        .map(each => each.outerHTML.slice(0, 120))"""
    assert run(browser, wide) == []
    assert run(browser, "return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert run(browser, "return innerWidth") == width


def test_figures_of_a_comparison_are_stacked_on_a_phone(show):
    seen = """return Array.from(document.querySelectorAll('.stacked tbody tr')).map(row =>
        Array.from(row.children).map(cell => cell.getBoundingClientRect().top))"""
    for row in run(show("both", 390), seen):
        assert row == sorted(set(row))
    outside = """return Array.from(document.querySelectorAll('.stacked td'))
        .filter(cell => cell.scrollWidth > cell.clientWidth).length"""
    assert run(show("both", 390), outside) == 0
    for row in run(show("both", 1280), seen):
        assert max(row) - min(row) < 5


def test_sorting_with_the_pointer(show):
    browser = show("big")
    assert sort_state(browser) == [[3, "descending"]]
    sqnr = heads(browser)[4]
    sqnr.click()
    assert sort_state(browser) == [[4, "descending"]]
    values = column(browser, 4)
    numbers = [float(value) for value in values if value]
    assert numbers == sorted(numbers, reverse=True)
    assert values[len(numbers) :] == [""] * (len(values) - len(numbers)) != []
    sqnr.click()
    values = column(browser, 4)
    assert sort_state(browser) == [[4, "ascending"]]
    assert [float(value) for value in values if value] == sorted(numbers)
    assert values[-1] == ""  # unknown values stay last


def test_sorting_with_the_keyboard(show):
    browser = show("big")
    run(browser, "arguments[0].focus()", heads(browser)[7])
    press(browser, key("TAB"))
    assert run(browser, "return document.activeElement.textContent") == "Bytes"
    press(browser, key("ENTER"))
    assert sort_state(browser) == [[8, "descending"]]
    values = [float(value) for value in column(browser, 8)]
    assert values == sorted(values, reverse=True)
    press(browser, key("SPACE"))
    assert sort_state(browser) == [[8, "ascending"]]
    run(browser, "arguments[0].click()", heads(browser)[0])
    names = column(browser, 0)
    assert names[1].endswith("block1/conv1/conv")  # numbers in names count as numbers
    assert names[10].endswith("block10/conv10/conv")


def test_sorting_on_a_phone(show):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    browser = show("big", 360)
    chooser = Select(browser.find_element(By.ID, "sort"))
    assert chooser.first_selected_option.text == "Noise share"
    chooser.select_by_visible_text("Bytes")
    values = [float(value) for value in column(browser, 8)]
    assert values == sorted(values, reverse=True)
    assert not heads(browser)[0].is_displayed()


def test_details_stay_with_their_row_when_sorted(show):
    browser = show("big")
    heads(browser)[0].click()
    pairs = run(
        browser,
        "return Array.from(document.querySelectorAll('#layer-table tbody'), body => "
        "[body.rows[0].querySelector('.toggle').getAttribute('aria-controls'), body.rows[1].id, body.rows.length])",
    )
    assert all(first == second and count == 2 for first, second, count in pairs)


def test_filters(show):
    from selenium.webdriver.common.by import By

    browser = show("big")
    total = len(column(browser, 0))
    box = browser.find_element(By.ID, "filter")
    box.send_keys("stage1 Conv2")
    assert 0 < len(column(browser, 0)) < total
    assert browser.find_element(By.ID, "count").text == f"{len(column(browser, 0))} of 60 layers"
    box.clear()
    box.send_keys("nothing like it")
    assert column(browser, 0) == []
    assert browser.find_element(By.ID, "empty").is_displayed()
    box.clear()
    box.send_keys(" ")
    kinds = {}
    for kind in ("all", "quantized", "integer", "float"):
        run(browser, "document.querySelector(`input[value=${arguments[0]}]`).click()", kind)
        kinds[kind] = len(column(browser, 0))
    assert kinds["quantized"] + kinds["float"] == kinds["all"] == total
    assert 0 < kinds["integer"] < kinds["quantized"]


def test_rows_open_by_button_row_and_all_at_once(show):
    from selenium.webdriver.common.by import By

    browser = show("big")
    toggle = browser.find_element(By.CSS_SELECTOR, ".toggle")
    detail = browser.find_element(By.ID, toggle.get_attribute("aria-controls"))
    assert not detail.is_displayed()
    run(browser, "arguments[0].focus()", toggle)
    press(browser, key("ENTER"))
    assert detail.is_displayed()
    assert toggle.get_attribute("aria-expanded") == "true"
    browser.find_element(By.CSS_SELECTOR, ".row .lname").click()
    assert not detail.is_displayed()
    browser.find_element(By.ID, "expand").click()
    hidden = "return document.querySelectorAll('.detail[hidden]').length"
    assert run(browser, hidden) == 0
    browser.find_element(By.ID, "expand").click()
    assert run(browser, hidden) == 60


def test_tooltips_with_pointer_and_keyboard(show):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser = show("full")
    browser.find_element(By.CSS_SELECTOR, ".toggle").click()
    chart = browser.find_element(By.CSS_SELECTOR, ".hist")
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    bring = "arguments[0].scrollIntoView({block: 'center'}); requestAnimationFrame(() => setTimeout(arguments[1], 50))"
    browser.execute_async_script(bring, chart)  # scrolling under a pointer that does not move sends no event
    ActionChains(browser).move_to_element(chart).perform()
    assert tip.is_displayed()
    assert " %)" in tip.text
    ActionChains(browser).move_to_element_with_offset(chart, 0, -120).perform()
    assert not tip.is_displayed()
    run(browser, "arguments[0].closest('tr').previousElementSibling.querySelector('.toggle').focus()", chart)
    press(browser, key("TAB"))
    assert run(browser, "return document.activeElement === arguments[0]", chart)
    press(browser, key("HOME"))
    first = tip.text
    press(browser, key("ARROW_RIGHT"))
    assert tip.text != first
    assert tip.is_displayed()
    press(browser, key("ESCAPE"))
    assert not tip.is_displayed()


def luminance(color):
    parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


CONTRAST = """
const solid = each => { for (; each; each = each.parentElement) {
    const color = getComputedStyle(each).backgroundColor;
    if (color !== 'rgba(0, 0, 0, 0)') return color; } };
const pairs = {};
for (const each of document.querySelectorAll('main *, header *')) {
    const own = Array.from(each.childNodes).some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || each.closest('svg') || !each.checkVisibility()) continue;
    const pair = [getComputedStyle(each).color, solid(each)];
    pairs[pair.join(';')] = [...pair, each.className || each.tagName];
}
return Object.values(pairs)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(show, scheme):
    browser = show("failed", scheme=scheme)
    run(browser, "document.getElementById('expand').click()")
    run(browser, "document.querySelectorAll('details').forEach(each => each.open = true)")
    pairs = run(browser, CONTRAST)
    assert len(pairs) > 5
    for front, back, where in pairs:
        light, dark = sorted((luminance(front), luminance(back)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, back, where)


def test_dark_and_light(show):
    from selenium.webdriver.common.by import By

    browser = show("full", scheme="dark")
    back = "return getComputedStyle(document.body).backgroundColor"
    dark = run(browser, back)
    assert luminance(dark) < 0.05
    browser.find_element(By.ID, "theme").click()
    assert luminance(run(browser, back)) > 0.9
    browser = show("full", scheme="dark")  # the choice is not stored
    assert run(browser, back) == dark
    assert run(browser, "return document.cookie") == ""
    show("full", scheme="light")
    assert luminance(run(browser, back)) > 0.9


def test_paper_shows_everything_in_light_colours(show):
    browser = show("big", scheme="dark", media="print")
    assert luminance(run(browser, "return getComputedStyle(document.body).backgroundColor")) > 0.9
    shown = "return Array.from(document.querySelectorAll('.detail')).filter(each => each.checkVisibility()).length"
    assert run(browser, shown) == 60
    assert not run(browser, "return document.getElementById('tools').checkVisibility()")
    paper = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert paper.startswith(b"%PDF")


def test_without_scripts_everything_is_visible(show, browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show("big")
        script = (
            "Array.from(document.querySelectorAll('.detail')).filter(each => each.checkVisibility()).length + ';' +"
            "document.getElementById('tools').checkVisibility()"
        )
        result = browser.execute_cdp_cmd("Runtime.evaluate", {"expression": script})
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert result["result"]["value"] == "60;false"


def test_structure_for_assistive_tools(show):
    browser = show("full")
    levels = run(browser, "return Array.from(document.querySelectorAll('h1,h2,h3,h4'), each => +each.tagName[1])")
    assert levels.count(1) == 1
    assert levels[0] == 1
    unnamed = """return Array.from(document.querySelectorAll('[role=img]'))
        .filter(each => !each.getAttribute('aria-label')
        && !document.getElementById(each.getAttribute('aria-labelledby'))?.textContent.trim()).length"""
    assert run(browser, "return document.querySelectorAll('[role=img]').length") > 3
    assert run(browser, unnamed) == 0
    ids = run(browser, "return Array.from(document.querySelectorAll('[id]'), each => each.id)")
    assert len(ids) == len(set(ids))
    press(browser, key("TAB"))
    assert run(browser, "return document.activeElement.textContent") == "Skip to the layers"
    press(browser, key("ENTER"))
    assert run(browser, "return document.activeElement.id") == "layers"
    bare = """return Array.from(document.querySelectorAll('button'))
        .filter(each => !each.textContent.trim() && !each.ariaLabel).length"""
    assert run(browser, bare) == 0


def test_a_missing_browser_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    driver, reason = driver_or_reason()
    assert driver is None
    assert reason.startswith("chromium and chromedriver not installed")

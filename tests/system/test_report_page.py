"""The page in a real browser: it draws, it filters, it runs and fetches nothing else."""

import pytest
from browser import CHROMIUM, browser
from recorded_runs import HOSTILE, write_lines, write_run

from torchtune_grpo.monitor.record import COMPLETIONS_FILE, RUN_FILE, read, read_lines
from torchtune_grpo.monitor.report import write_comparison, write_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
DRAWN = """[...document.querySelectorAll(".plot")].map((plot) => {
  const canvas = plot.querySelector(".bk-Figure").shadowRoot.querySelector(".bk-Canvas")
    .shadowRoot.querySelector("canvas.bk-layer");
  return plot.clientWidth > 200 && canvas.width > 200 &&
    new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size > 4;
})"""
CLICK = """(label) => {
  const chips = [...document.querySelectorAll("#controls button")];
  chips.find((chip) => chip.textContent.startsWith(label)).click();
  return [...document.querySelectorAll(".row:not(.dim) .foot")].map((foot) => foot.textContent);
}"""
CHOOSE = """(id, value) => {
  const list = document.getElementById(id);
  list.value = value;
  list.dispatchEvent(new Event("change"));
  return [...document.querySelectorAll(".group > h3")].map((title) => title.firstChild.textContent);
}"""
FITS = """new Promise((done) => {  // once the curves have taken their new width
  const fits = () => document.documentElement.scrollWidth <= innerWidth;
  const look = () => (fits() ? done(true) : requestAnimationFrame(look));
  look();
})"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def page_of(folder, text=None):
    write_page(write_run(folder, steps=12, text=text))
    return folder / "run.html"


def test_it_draws_filters_and_asks_for_nothing(tmp_path, chromium):
    """Every curve, filter and list, at 1,440 and at 400 pixels, without a word on the console."""
    chromium.open(page_of(tmp_path), width=1440)
    drawn = chromium.run(DRAWN)
    assert len(drawn) == 14 and all(drawn)
    assert chromium.run("document.querySelector('h1').textContent").startswith("Held-out accuracy")
    assert chromium.run("document.querySelectorAll('.finding').length") == 2
    assert chromium.run(f"({CHOOSE})('step', '12')") == ["Step 12, prompt #0", "Step 12, prompt #1"]
    assert chromium.run(f"({CHOOSE})('step', '')")[0].startswith("Step 12")
    for label, sign in [
        ("right, ill", "format 0"),
        ("well-formed, wrong", "correctness 0"),
        ("cut off", "length"),
        ("failed reward", "format failed"),
        ("largest gap", "trainer"),
        ("informative", "tokens"),
    ]:
        found = chromium.run(f"({CLICK})('{label}')")
        assert found and all(sign in foot for foot in found), label
    chromium.run(f"({CLICK})('informative')")  # again: no filter
    steps = chromium.run(f"({CHOOSE})('prompt', '0')")
    assert steps == ["Step 4, prompt #0", "Step 8, prompt #0", "Step 12, prompt #0"]
    assert chromium.run(FITS)
    chromium.size(400, 900)
    assert chromium.run(FITS), "it can be read without scrolling sideways"
    assert chromium.problems == []


def test_zooming_in_one_curve_zooms_in_all_and_can_be_undone(tmp_path, chromium):
    chromium.open(page_of(tmp_path))
    ends = "Bokeh.documents[0].roots().map((plot) => plot.x_range.end)"
    whole = chromium.run(ends)
    chromium.run("document.getElementById('panel-0').scrollIntoView({ block: 'center' })")
    y = chromium.run("document.getElementById('panel-0').getBoundingClientRect().y") + 60
    for kind, x in [("Pressed", 150), ("Moved", 200), ("Moved", 250), ("Released", 250)]:
        event = {"type": f"mouse{kind}", "x": x, "y": y, "button": "left", "buttons": 1}
        chromium.call("Input.dispatchMouseEvent", **event)
    zoomed = chromium.run(ends)
    assert len({*zoomed}) == 1 and zoomed[0] < whole[0]
    chromium.run("document.getElementById('reset').click()")
    assert chromium.run(ends) == whole
    assert chromium.problems == []


def test_hostile_texts_run_nothing(tmp_path, chromium):
    """In completions, prompts, columns, names of rewards, findings and the folder's name."""
    folder = write_run(tmp_path / "<img src=x onerror=broken=1>", steps=3, text=HOSTILE)
    rows = [
        {**row, "prompt": HOSTILE, "columns": {HOSTILE: HOSTILE}, "failed": [HOSTILE]}
        for row in read_lines(folder / COMPLETIONS_FILE)
    ]
    write_lines(folder / COMPLETIONS_FILE, rows)
    changed = {f"rewards/{HOSTILE}/mean": 0.5, "rewards/$$x$$/mean": 0.5}
    changed |= {"command": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    finding = dict.fromkeys(["name", "evidence", "key", "remedy"], HOSTILE)
    finding |= {"kind": "finding", "step": 1, "since": 1, "event": "begins"}
    write_lines(folder / RUN_FILE, [*({**e, **changed} for e in read(folder)), finding])
    write_page(folder)
    chromium.open(folder / "run.html")
    assert chromium.run("typeof broken") == "undefined"
    assert chromium.run("document.querySelectorAll('img, script:not(body > script)').length") == 0
    shown = chromium.run("document.querySelector('.row pre').textContent")
    assert shown.startswith("</script><script>window.broken=1</script><img src=x")
    assert chromium.problems == []


def test_its_policy_stops_what_escaping_would_have_missed(tmp_path, chromium):
    """A script, a handler, eval and two requests that get into the page do nothing."""
    chromium.open(page_of(tmp_path))
    refused = chromium.run(
        """new Promise((done) => {
          const refused = [];
          addEventListener("securitypolicyviolation", (each) => {
            refused.push(each.effectiveDirective);
            if (refused.length === 5) done(refused.sort());
          });
          document.body.insertAdjacentHTML("beforeend",
            "<img src='https://example.invalid/x.png' onerror='broken = 1'>");
          const script = document.createElement("script");
          script.textContent = "broken = 2";
          document.body.append(script);
          fetch("https://example.invalid/").catch(() => 0);
          try { eval("broken = 3"); } catch {}
        })"""
    )
    assert refused == ["connect-src", "img-src", "script-src", "script-src-attr", "script-src-elem"]
    assert chromium.run("typeof broken") == "undefined"


def test_a_comparison_draws_every_run(tmp_path, chromium):
    folders = [write_run(tmp_path / name, steps=12) for name in ("one", "two")]
    write_comparison(folders, tmp_path / "comparison.html")
    chromium.open(tmp_path / "comparison.html")
    drawn = chromium.run(DRAWN)
    assert len(drawn) == 10 and all(drawn)
    assert chromium.run("document.querySelectorAll('section').length") == 3
    assert chromium.problems == []

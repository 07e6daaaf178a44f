"""The page in a real browser: it draws, it filters, it runs and fetches nothing else."""

import html
import json
import re
import shutil
import subprocess

import pytest
from recorded_runs import write_hostile_run, write_run

from torchtune_grpo.monitor.report import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
# The page in a frame, and a script beside it, which the page's policy would not let in.
BESIDE = """<!doctype html><meta charset="utf-8">
<iframe src="PAGE" style="border: 0; width: 1440px; height: 900px"></iframe><output></output>
<script>
addEventListener("load", async () => {
  const frame = document.querySelector("iframe"), page = frame.contentWindow;
  const all = (selector) => [...page.document.querySelectorAll(selector)];
  async function until(holds) {
    while (!holds()) await new Promise((done) => setTimeout(done, 20));
    return true;
  }
  function isDrawn(plot) {
    const shadow = plot.querySelector(".bk-Figure")?.shadowRoot.querySelector(".bk-Canvas");
    const canvas = shadow?.shadowRoot.querySelector("canvas.bk-layer");
    if (!canvas || plot.clientWidth <= 200 || canvas.width <= 200) return false;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(pixels).size > 4;
  }
  await until(() => all(".plot").every(isDrawn));
  const answer = await (async () => { SCRIPT })();
  const requests = page.performance.getEntriesByType("resource").map((each) => each.name);
  document.querySelector("output").textContent = JSON.stringify([answer, requests]);
});
</script>"""


@pytest.fixture
def beside(tmp_path):
    """Runs a script beside a page whose curves are all drawn.

    Gives its answer, and what is wrong: requests, refused ones too, and lines on the console.
    """

    def run(page, script):
        driver = tmp_path / "beside.html"
        driver.write_text(BESIDE.replace("PAGE", page.as_uri()).replace("SCRIPT", script))
        done = subprocess.run(
            # No timer takes time; after 20 of their seconds, what has become of the page is told.
            [CHROMIUM, *"--headless --no-sandbox --disable-gpu --hide-scrollbars".split()]
            + ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
            + ["--virtual-time-budget=20000", "--enable-logging=stderr"]
            + ["--dump-dom", driver.as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
        )
        (output,) = re.findall("<output>(.+)</output>", done.stdout) or [done.stderr]
        answer, requests = json.loads(html.unescape(output))
        said = re.findall(r':CONSOLE:\d+\] "(?!\[bokeh .* document idle)(.*)', done.stderr)
        return answer, requests + said

    return run


def page_of(folder):
    write_page(write_run(folder))
    return folder / "run.html"


def test_it_draws_filters_zooms_and_asks_for_nothing(tmp_path, beside):
    """Every curve, filter and list; zooming in one curve zooms in all and can be undone.

    At 1,440 and at 400 pixels, without a word on the console.
    """
    found, problems = beside(
        page_of(tmp_path),
        """
        const deep = (node) => [...node.querySelectorAll("*"),
          ...(node.shadowRoot?.querySelectorAll("*") ?? [])].flatMap((each) =>
            each.shadowRoot ? [each, ...deep(each)] : [each]);
        const byId = (id) => page.document.getElementById(id);
        function choose(id, value) {
          byId(id).value = value;
          byId(id).dispatchEvent(new Event("change"));
          return all(".group > h3").map((title) => title.firstChild.textContent);
        }
        function click(label) {
          all("#controls button").find((chip) => chip.textContent.startsWith(label)).click();
          return all(".row:not(.dim) .foot").map((foot) => foot.textContent);
        }
        const chips = () => all("#controls button").map((chip) => chip.textContent);
        const found = {
          chips: chips(),
          drawn: all(".plot").length,
          stops: all(".plot").flatMap(deep).filter((each) => each.tabIndex >= 0).length,
          headline: all("h1")[0].textContent,
          findings: all(".finding").length,
          step: choose("step", "12"),
          chips_of_step: chips(),
          steps: choose("step", ""),
          filters: ["right, ill", "well-formed, wrong", "cut off", "failed reward", "sampler and",
            "informative", "informative"].map(click),
          more: (choose("prompt", ""), all("#groups > button")[0].click(),
            all(".group").indexOf(page.document.activeElement)),
          prompt: choose("prompt", "0"),
          empty: all(".row pre").filter((text) => text.textContent === "[empty]").length,
        };

        page.Element.prototype.setPointerCapture = () => 0;  // there is no real pointer
        function drag(kind, x) {
          const y = byId("panel-0").getBoundingClientRect().y + 60;
          let target = page.document.elementFromPoint(x, y);
          while (target.shadowRoot) target = target.shadowRoot.elementFromPoint(x, y);
          target.dispatchEvent(new page.PointerEvent(`pointer${kind}`, {
            view: page, clientX: x, clientY: y, buttons: 1, pointerType: "mouse",
            isPrimary: true, bubbles: true, composed: true }));
        }
        const plots = page.Bokeh.documents[0].roots();
        const ends = () => plots.map((plot) => plot.x_range.end);
        const height = () => plots[0].y_range.end - plots[0].y_range.start;
        found.ends = [ends()];
        const before = height();
        byId("panel-0").scrollIntoView({ block: "center" });
        drag("move", 200);  // between two of twelve steps, or so near to one that it also holds
        found.told = await until(() => all(".bk-Tooltip").length);
        for (const [kind, x] of [["down", 150], ["move", 200], ["move", 250], ["up", 250]])
          drag(kind, x);
        found.ends.push(ends());
        found.shrinks = await until(() => height() < before);
        byId("reset").click();
        found.ends.push(ends());

        const fits = () => page.document.documentElement.scrollWidth <= page.innerWidth;
        found.fits = fits();
        frame.style.width = "400px";
        found.fits &&= await until(fits);  // once the curves have taken their new width
        return found;
        """,
    )
    assert found["drawn"] == 13 and found["headline"].startswith("Held-out accuracy")
    assert found["findings"] == 2 and found["stops"] == 0
    assert found["chips"][-1] == "sampler and trainer differ most (20)" and found["empty"] > 0
    assert found["chips_of_step"] != found["chips"], "they count in what is shown"
    assert found["step"] == ["Step 12, prompt #0", "Step 12, prompt #1"]
    assert found["steps"][0].startswith("Step 12")
    signs = ["format 0", "correctness 0", "length", "format failed", "trainer", "tokens", ""]
    for sign, feet in zip(signs, found["filters"], strict=True):
        assert feet and all(sign in foot for foot in feet), sign
    assert found["prompt"] == ["Step 4, prompt #0", "Step 8, prompt #0", "Step 12, prompt #0"]
    assert found["more"] == 6, "the keyboard goes on at the first new group"
    whole, zoomed, reset = found["ends"]
    assert found["told"] and found["shrinks"]
    assert len({*zoomed}) == 1 and zoomed[0] < whole[0] and reset == whole
    assert found["fits"], "it can be read without scrolling sideways"
    assert problems == []


def test_hostile_texts_run_nothing(tmp_path, beside):
    """The folder's name among them."""
    folder = write_hostile_run(tmp_path / "<img src=x onerror=broken=1>")
    write_page(folder)
    (broken, elements, text), problems = beside(
        folder / "run.html",
        """return [typeof page.broken, all("img, script:not(body > script)").length,
          all(".row pre")[0].textContent];""",
    )
    assert (broken, elements) == ("undefined", 0)
    assert text.startswith("</script><script>window.broken=1</script><img src=x")
    assert problems == []

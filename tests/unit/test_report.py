"""The page of a run: what it says, what it holds of a long run, and what it makes of anything."""

import html
import json
import re
import sys

import pytest
from kill_points import disk_of, kill_points
from recorded_runs import completion, evaluation, write_hostile_run, write_lines, write_run
from runs import run_python

from torchtune_grpo.monitor import report
from torchtune_grpo.monitor.record import COMPLETIONS_FILE, RUN_FILE, read
from torchtune_grpo.monitor.report import main, write_page

MB = 1_000_000
START = dict.fromkeys(("command", "time", "device", "ranks", "seed"), "some")
START |= {"config": {}, "versions": {}, "decider": "correctness"}


def data_of(page):
    """Return the data that the page's script reads, which are in one element and only there."""
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall('<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


def of_run(folder):
    write_page(folder)
    return data_of(folder / "run.html")


def of_events(folder, *events):
    write_lines(folder / RUN_FILE, events)
    return of_run(folder)


def panel(data, title):
    (found,) = (each for each in data["panels"] if each["title"] == title)
    return found


def verdict_of(folder, before, after):
    """Held-out answers before and after three steps, and nothing else."""
    events = [evaluation(0, accuracy=before), evaluation(3, accuracy=after)]
    return of_events(folder, *events)["verdict"]


@pytest.mark.parametrize(
    "before, after, tone, headline, better, worse",
    [
        ([0, 0, 1] * 20, [1, 1, 1] * 20, "good", "rose from 0.333 to 1.000 (", 40, 0),
        ([1, 1, 1] * 20, [0, 1, 0] * 20, "bad", "fell from 1.000 to 0.333 (", 0, 40),
        ([0, 1] * 30, [0, 1] * 29 + [1] * 2, "unsure", "rose from 0.500 to 0.517 (", 1, 0),
        ([0] * 8, [1] * 8, "good", "rose from 0.000 to 1.000 (", 8, 0),
        ([0, 1] * 30, [0, 1] * 30, "unsure", "stayed at 0.500 (", 0, 0),
    ],
)
def test_the_verdict_says_what_changed_and_whether_that_is_significant(
    tmp_path, before, after, tone, headline, better, worse
):
    verdict = verdict_of(tmp_path, before, after)
    assert verdict["tone"] == tone
    assert verdict["headline"].startswith(f"Held-out accuracy {headline}")
    sure = "Not significant yet" if tone == "unsure" else "Significant"
    counts = f"on {len(before)} held-out problems, {better} improved and {worse} got worse."
    assert verdict["why"][0] == f"{sure}: {counts}"
    advice = {"good": "Take this checkpoint; ", "bad": "Training made it worse: lower optimizer.lr"}
    few = f"With {len(before)} problems, changes below 0."
    assert verdict["why"][1].startswith(advice.get(tone, few))


def test_the_verdict_is_by_all_that_was_measured(tmp_path):
    """Accuracy went from 4 to 0 of 48, which may be chance; that of samples fell for certain."""
    greedy, sampled = [1.0] * 4 + [0.0] * 44, [0.25] * 40 + [0.0] * 8
    before = evaluation(0, accuracy=greedy, **{"pass@1": sampled})
    dead = evaluation(3, accuracy=[0.0] * 48, **{"pass@1": [0.0] * 48})
    found = of_events(tmp_path, before, dead)["verdict"]
    assert found["headline"].startswith("Held-out pass@1 fell from 0.208 to 0.000 (-0.208 [")
    assert found["tone"] == "bad" and "0 improved and 40 got worse" in found["why"][0]
    worse = of_events(tmp_path, before, evaluation(3, accuracy=[0.0] * 48))["verdict"]
    assert worse["headline"].startswith("Held-out accuracy fell") and worse["tone"] == "unsure"
    assert "lower optimizer.lr" in worse["why"][1] and "train longer" not in worse["why"][1]
    seen = {"trained_on": 1.0}
    found = of_events(tmp_path, before | seen, dead | seen)["verdict"]
    assert found["headline"].startswith("Trained-on pass@1 fell")


def test_a_run_that_was_better_before(tmp_path):
    """It rose overall, and that is not what the page says."""
    rights = {0: 10, 4: 38, 8: 20, 12: 15}
    scores = {step: [float(n < right) for n in range(60)] for step, right in rights.items()}
    events = [evaluation(step, accuracy=score) for step, score in scores.items()]
    verdict = of_events(tmp_path, *events)["verdict"]
    said = "Held-out accuracy rose from 0.167 to 0.633 after step 4, and fell to 0.250 (-0.383 ["
    assert verdict["headline"].startswith(said) and verdict["tone"] == "bad"
    assert "better after step 4: take that checkpoint" in verdict["why"][0]
    events[-1] = evaluation(12, accuracy=[float(number < 36) for number in range(60)])
    verdict = of_events(tmp_path, *events)["verdict"]
    assert verdict["headline"].startswith("Held-out accuracy rose from 0.167 to 0.600 (")


def test_evaluations_of_other_prompts_are_not_tested_against_each_other(tmp_path):
    verdict = verdict_of(tmp_path, [0] * 60, [1] * 61)
    assert verdict["headline"] == "Held-out accuracy rose from 0.000 to 1.000."
    assert verdict["tone"] == "unsure" and verdict["scores"][0]["change"] == ""


def test_a_run_without_evaluation_is_not_believed(tmp_path):
    steps = [{"kind": "step", "step": s, "reward": s / 10} for s in range(1, 21)]
    verdict = of_events(tmp_path, *steps)["verdict"]
    assert verdict["headline"] == "The training reward went from 0.15 to 1.95."
    assert "eval_dataset" in verdict["why"][0] and verdict["scores"] == []


def test_a_run_without_a_gradient_is_the_base_and_says_where_to_look(tmp_path):
    step = {"kind": "step", "step": 1, "reward": 0.0, "grad_norm": 0.0}
    names = {"name": "all_wrong", "since": 1, "evidence": "", "key": "dataset", "remedy": ""}
    finding = {"kind": "finding", "step": 1, "event": "begins", **names}
    for events, why in (([step], "torchtune-grpo plan"), ([step, finding], "The findings")):
        verdict = of_events(tmp_path, *events)["verdict"]
        assert verdict["tone"] == "bad" and why in verdict["why"][-1]


def test_findings_that_are_open_come_first(tmp_path):
    found = of_run(write_run(tmp_path))["verdict"]["findings"]
    times = [(each["name"], each["since"], each["until"]) for each in found]
    assert times == [("same texts", 7, None), ("truncated", 3, 9)]
    assert found[0]["key"] == "temperature" and found[1]["remedy"].startswith("Set max_")


def test_without_javascript_the_verdict_can_be_read(tmp_path):
    """So can the run's name; whoever wrote a text, it is no HTML."""
    folder = write_hostile_run(tmp_path / "<b>")
    data = of_run(folder)
    text = (folder / "run.html").read_text(encoding="utf-8")
    (static,) = re.findall('<section id="verdict">(.*?)</section>', text, re.S)
    headline = html.escape(data["verdict"]["headline"])
    assert f"<h1>{headline}</h1><p>" in static and "&lt;/script&gt;" in static
    assert {*re.findall("<[^>]*>", static)} == {"<h1>", "</h1>", "<p>", "</p>"}
    assert '<span id="name">&lt;b&gt;</span>' in text
    assert "<noscript><style>nav, section:not(#verdict) { display: none; }</style>" in text


def test_what_a_run_cannot_do_is_not_shown(tmp_path):
    """Tokens clipped at one epoch, shares of more than 1, no step in a run that is over."""
    step = {"kind": "step", "reward": 0.9, "reward_std_in_group": 0.4}
    steps = [{**step, "clip_ratio/region_mean": 0.0, "step": n} for n in (1, 2)]
    data = of_events(tmp_path, *steps, evaluation(2, accuracy=[0, 1]))
    (reward,) = panel(data, "Reward")["lines"]
    assert (reward["low"], reward["high"]) == ([0.5, 0.5], [1.0, 1.0])
    titles = [each["title"] for each in data["panels"]]
    assert "Clipped tokens" not in titles
    steps[1]["clip_ratio/region_mean"] = 0.01
    assert "Clipped tokens" in [each["title"] for each in of_events(tmp_path, *steps)["panels"]]
    scored = {"kind": "step", "step": 1, "kl": 0.1}
    assert of_events(tmp_path, scored)["verdict"]["headline"] == "No answer has had a reward yet."


def test_the_texts_of_an_inline_environment_stand_apart(tmp_path):
    write_run(tmp_path, steps=1)
    said = "I search <q>a</q>\n<r>b</r> so <q>c</q>\n<r>d</r> it is b."
    row = completion(0, 1.0, 1.0, completion=said, inline=["\n<r>b</r>", "\n<r>d</r>"])
    row["messages"] = [{"role": "assistant", "content": said}]
    write_lines(tmp_path / COMPLETIONS_FILE, [row])
    (shown,) = of_run(tmp_path)["groups"][0]["rows"]
    lines = [line for line in shown["text"].splitlines() if line]
    replies = ["[environment] <r>b</r>", "[environment] <r>d</r>"]
    assert lines == ["I search <q>a</q>", replies[0], " so <q>c</q>", replies[1], " it is b."]


def test_curves_hold_the_numbers_of_the_metrics(tmp_path):
    """Null is a hole; a band is drawn around the mean; a metric that nothing has, not at all."""
    known = {"kind": "step", "reward_std_in_group": 0.25}
    data = of_events(
        tmp_path,
        {**known, "step": 1, "reward": 0.5, "time/rollout": 3, "time/update": 2},
        {**known, "step": 2, "reward": None, "time/rollout": 1, "kl": None},
        evaluation(3, accuracy=[0, 1]),
    )
    titles = [each["title"] for each in data["panels"]]
    assert titles == ["Reward", "Held-out accuracy", "Seconds of a step"]
    (reward,) = panel(data, "Reward")["lines"]
    bands = [reward[key] for key in ("values", "low", "high")]
    assert bands == [[0.5, None], [0.25, None], [0.75, None]]
    (accuracy,) = panel(data, "Held-out accuracy")["lines"]
    assert [accuracy[key] for key in ("steps", "low", "high")] == [[3], [0.45], [0.55]]
    rollout, update = panel(data, "Seconds of a step")["lines"]
    assert (rollout["low"], rollout["high"]) == ([0, 0], [3, 1])
    assert (update["low"], update["high"]) == ([3, 1], [5, 1])


def test_pass_rates_of_the_groups(tmp_path):
    seen = [(1, [0.25, 1.0]), (2, [0.5, 0.0]), (4, [1.0, 0.75])]
    steps = [{"kind": "step", "step": n, "prompts": {"pass_rate": rates}} for n, rates in seen]
    data = of_events(tmp_path, {"kind": "start", "step": 0, **START}, *steps)
    shares = panel(data, "How many of a group's answers are right")["lines"]
    by_step = [*zip(*(line["values"] for line in shares), strict=True)]
    assert by_step == [(0, 0.5, 0, 0, 0.5), (0.5, 0, 0.5, 0, 0), (0, 0, 0, 0.5, 0.5)]


def test_filters_find_what_they_name(tmp_path):
    write_run(tmp_path, steps=1)
    rows = [
        completion(0, 1.0, 1.0),
        completion(1, 1.0, 0.0, advantage=-0.5),
        completion(2, 0.0, 1.0),
        completion(3, 0.0, 0.0, ended="deadline", sampler_logprob=-1.0, trainer_logprob=-1.5),
        completion(4, None, 1.0, failed=["correctness"], ended="length"),
        completion(0, 0.0, 1.0),  # the same prompt came again
    ]
    write_lines(tmp_path / COMPLETIONS_FILE, rows)
    first, second = of_run(tmp_path)["groups"]
    found = [set(row["is"]) - {"mixed"} for row in first["rows"]]
    assert found == [set(), {"ill"}, {"wrong"}, {"cut", "gap"}, {"cut", "failed"}]
    assert all("mixed" in row["is"] for row in first["rows"])
    assert [row["is"] for row in second["rows"]] == [["wrong"]]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a <&>語\x1b" * 600, "short"])
def test_500_steps_fit_into_8_mb(tmp_path, text):
    """Whole groups, informative ones first, from all parts of the run."""
    data = of_run(write_run(tmp_path, steps=500, group_size=4, text=text))
    assert (tmp_path / "run.html").stat().st_size <= 8 * MB
    assert data["recorded"] == 1000 and len(data["groups"]) >= (1000 if text == "short" else 30)
    assert all(len(group["rows"]) == 4 for group in data["groups"])
    steps = [group["step"] for group in data["groups"]]
    assert steps == sorted(steps)
    assert max(b - a for a, b in zip([0, *steps], [*steps, 500])) <= 17


def test_a_group_larger_than_the_page_is_shown_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MAX_BYTES", 100)
    data = of_run(write_run(tmp_path, steps=2))
    assert data["recorded"] == 4 and [group["step"] for group in data["groups"]] == [2]


def test_a_long_completion_says_how_much_is_left_out(tmp_path):
    text = "start " + "x" * 200_000 + " end"
    row = of_run(write_run(tmp_path, steps=1, text=text))["groups"][0]["rows"][0]
    head, left_out, tail = row["text"]
    assert head.startswith("start ") and tail.endswith(" end")
    assert len(head) + left_out + len(tail) == len(text)


def test_hostile_texts_stay_texts(tmp_path):
    """Nothing ends the data's element, nothing invisible is left, and all of it can be read."""
    folder = write_hostile_run(tmp_path / "<img src=x onerror=alert(1)>")
    data = of_run(folder)  # read to its end, so nothing in it ended the element
    shown = json.dumps(data, ensure_ascii=False)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\ud800-\udfff]", shown)
    assert data["groups"][0]["rows"][0]["text"].startswith("</script><script>window.broken=1")
    assert r"\x1b[31mred" in data["groups"][0]["prompt"] and "😀" in data["groups"][0]["prompt"]
    assert "<title>&lt;img src=x" in (folder / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("missing", ["step", "evaluation", "finding", "start", "completions"])
def test_what_is_missing_costs_its_part_only(tmp_path, missing):
    folder = write_run(tmp_path)
    write_lines(folder / RUN_FILE, [e for e in read(folder) if e["kind"] != missing])
    if missing == "completions":
        (folder / COMPLETIONS_FILE).unlink()
    data = of_run(folder)
    assert bool(data["groups"]) == (missing != "completions")
    rates = [each for each in data["panels"] if each["curves"] == "pass rates"]
    assert bool(rates) == (missing not in ("step", "start")) and data["panels"]
    assert bool(data["setup"]) == (missing != "start")
    assert data["verdict"]["headline"]


def test_the_command_writes_a_page_and_says_what_it_shows(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.html"
    folder = str(write_run(tmp_path / "run"))
    monkeypatch.setattr(sys, "argv", ["report", folder, "--output", str(page)])
    main()
    (changed,) = (t for t in data_of(page)["setup"] if t["title"] == "Changed between starts")
    assert changed["rows"] == [["optimizer.lr", "0.0003", "0.0001"]]
    headline, path = capsys.readouterr().out.splitlines()
    assert headline.startswith("Held-out accuracy rose") and path == str(page)


@pytest.mark.parametrize("name, why", [("nowhere", "is not a folder"), ("", "has no run.jsonl")])
def test_a_folder_without_a_run_is_named(tmp_path, monkeypatch, name, why):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / name)])
    with pytest.raises(ValueError, match=f"{name} {why}; give the output_dir of a run."):
        main()


def test_a_page_is_whole_or_the_old_one(tmp_path):
    """Killed anywhere, or on a full disk."""
    folder, old = tmp_path / "run", "the old page"

    def prepare():
        write_run(folder, steps=2)
        (folder / "run.html").write_text(old)

    for where in kill_points(
        lambda: write_page(folder), folder=folder, prepare=prepare, sizes=[1_400_000]
    ):
        page = folder / "run.html"
        assert page.read_text(encoding="utf-8") == old or data_of(page)["recorded"] == 4, where
    assert data_of(page)["recorded"] == 4
    page.write_text(old)
    with disk_of(1_000_000), pytest.raises(ValueError, match="run.html: could not be written: "):
        write_page(folder)
    assert page.read_text() == old
    assert {path.suffix for path in folder.iterdir()} == {".jsonl", ".html"}, "nothing is left"


def test_torch_is_not_needed(tmp_path):
    """A page is written in the middle of training, and on machines that have no torch."""
    write_run(tmp_path, steps=2)
    code = "import sys, pathlib; from torchtune_grpo.monitor.report import write_page; "
    code += "write_page(pathlib.Path()); print({'torch', 'numpy'} & {*sys.modules})"
    assert run_python("-c", code, cwd=tmp_path).out == "{'numpy'}\n"

"""``torchtune_grpo.GRPO`` in real processes: a script and its `tune run`, Ctrl-C, ranks."""

import re
from pathlib import Path

import pytest
import torch
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from runs import RECIPE, run, run_python, run_ranks, tune, untimed
from transformers import AutoTokenizer

from torchtune_grpo import api

CONFIG = "tiny_arithmetic_grpo"
COMMON = """
import asyncio, json, os, re, signal
import random as dice

import numpy, torch
from my_rewards import varied
from torchtune_grpo import GRPO

rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(6) for b in range(6)]
dice.Random(0).shuffle(rows)
train, held_out = rows[:30], rows[30:]
for name, part in (("train", train), ("held_out", held_out)):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in part)

def refused(make, said):
    try:
        make()
    except Exception as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"{said}: not refused")


TINY = dict(
    config="tiny_arithmetic_grpo", num_steps=3, batch_size=2, temperature=2.0,
    grpo_samples=4, max_generated_tokens=8, evaluation={"samples": 1}, optimizer={"lr": 0.01},
    dataset={"prefill": "<think>"},
)


"""
VARIED = """
import re

def varied(prompts, completions, answer, **columns):
    counts = [len(set(re.sub("[ab]", "", text))) for text in completions]
    return [float(n % 5 + a) for n, a in zip(counts, answer)]

def judged(prompts, completions, **columns):
    return [0.5 * (len(c) % 3) for c in completions]
"""

SAME = """
async def judged(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5 * (len(c) % 3) for c in completions]


async def main():  # as in a notebook, a loop runs in the main thread
    given = dict(data="train.jsonl", eval_data=held_out, rewards=[(varied, 0.5), judged], **TINY)
    run = GRPO(output_dir="out", **given)
    before = run.evaluate()
    assert run.train().name == "step_000003"
    after = run.metrics[-1]
    assert run.evaluate() == {name: after[name] for name in before} != before
    assert run.evaluate(held_out[:2]) != run.evaluate()
    one, two = run.generate("1+2="), run.generate(["1+2=", "5+5="], num_samples=2)
    assert one == two[0][:1] and one[0].startswith("<think>")
    assert [len(texts) for texts in two] == [2, 2] and two[0][0] != two[0][1]
    assert run.generate("1+2=", seed=1) != one
    greedy = run.generate("1+2=", num_samples=2, temperature=0)
    assert greedy[0] == greedy[1]
    other = GRPO(output_dir="other", **given)  # beside it
    await asyncio.to_thread(other.train)  # and not in the main thread
    anew = GRPO(output_dir="out", **given)
    refused(run.train, "another has begun")
    anew.train()
    said = anew.generate("1+2=")
    anew.close()
    with GRPO(output_dir="out", resume_from_checkpoint=True, **given) as trained:
        assert trained.generate("1+2=") == said
    plain = given | dict(eval_data="held_out.jsonl", rewards=[(varied, 0.5), "my_rewards.judged"])
    GRPO(output_dir="plain", **plain).train()


asyncio.run(main())
"""


def run_script(folder, text):
    (folder / "my_rewards.py").write_text(VARIED)
    (folder / "mine.py").write_text(COMMON + text)
    return run("mine.py", cwd=folder)


@pytest.mark.slow
def test_python_and_tune_run_take_the_same_steps(tmp_path):
    """So do two runs in a process, in the same folder or another; evaluating changes nothing."""
    done = run_script(tmp_path, SAME)
    assert "Traceback" not in done.err
    assert "cannot repeat this run: its eval_dataset, rewards.1 exist only in" in done.err
    tune("run", RECIPE, "--config", "plain/config.yaml", "output_dir=tuned", cwd=tmp_path)
    whole = untimed(tmp_path / "out" / "previous_runs" / "1")
    assert [record["step"] for record in whole] == [0, 1, 2, 3, 3]
    assert len({record["reward"] for record in whole if "reward" in record}) == 3
    for folder in ("other", "out", "plain", "tuned"):
        assert untimed(tmp_path / folder) == whole, folder
        name = "step_000003/training_state.pt"
        ours, theirs = torch.load(tmp_path / folder / name), torch.load(tmp_path / "tuned" / name)
        assert str(ours) == str(theirs)


STOPPED = """
class Varied:
    calls = 0

    def __call__(self, prompts, completions, answer, **columns):
        Varied.calls += 1
        if Varied.calls in STOPS:
            os.kill(os.getpid(), signal.SIGINT)
        return varied(prompts, completions, answer)


signal.signal(signal.SIGINT, signal.default_int_handler)
for folder, STOPS in (("whole", ()), ("stopped", (4, 6, 9))):
    Varied.calls, stops = 0, 0
    with GRPO(data=train, eval_data=held_out, rewards=[Varied], output_dir=folder, **TINY) as run:
        while True:
            try:
                run.train()
                break
            except KeyboardInterrupt:
                stops += 1
                assert len(run.generate("1+1=")) == 1
    assert stops == len(STOPS)
    assert open(f"{folder}/.lock").read() == ""
"""


@pytest.mark.slow
def test_after_ctrl_c_the_object_goes_on_where_it_was(tmp_path):
    done = run_script(tmp_path, STOPPED)
    assert done.err.count("Ctrl-C again") == 3
    assert not (tmp_path / "stopped" / "previous_runs").exists()  # it did not begin anew
    whole, stopped = untimed(tmp_path / "whole"), untimed(tmp_path / "stopped")
    assert whole == stopped and [record["step"] for record in whole] == [0, 1, 2, 3, 3]


BAD = r"""
def mistakes(**given):
    try:
        with GRPO(**{"output_dir": "out", **TINY, **given}) as run:
            run.generate("1+1=")
    except ValueError as error:
        return str(error).splitlines()


assert mistakes() is None
found = mistakes(nm_steps=3, **{"loss.kl_coeff": -1}, optimizer={"lr": "fast"})
assert [line.split(":")[0] for line in found] == [
    "nm_steps=3", "loss.kl_coeff=-1", "optimizer.lr='fast'"
], found
assert "Did you mean num_steps?" in found[0]
assert "Did you mean loss.kl_coeff?" in mistakes(loss_kl_coeff=0.1)[0]  # as it was in 0.2
assert "Did you mean grpo_samples?" in mistakes(num_generations=8)[0]  # as in TRL
assert mistakes(dataset=train)[0].endswith("give rows as data.")
needs = mistakes(data=[{"prompt": "a", "gold": 1}] * 30, rewards=[varied])
assert len(needs) == 1 and "needs the column 'answer'" in needs[0], needs
assert mistakes(rewards=[3])[0].startswith("rewards[0]=3: not a reward;")
(problem,) = mistakes(model_dir=torch.nn.Linear(1, 1))
assert problem.startswith("model_dir=Linear(") and "the path of the model's folder" in problem
for given in ({"varied": varied}, "my_rewards.varied", varied):
    (problem,) = mistakes(rewards=given)
    assert problem.startswith("rewards=") and "give a list, such as [(function, weight)]" in problem
for given in (dict(config="Qwen/Qwen3-0.6B"), dict(model="Qwen/Qwen3-0")):
    (problem,) = mistakes(**given)
    assert "Qwen3-0" in problem and "model_dir" in problem, problem

bad = dict(data=[{"prompt": "other", "answer": 1}] * 30, rewards=[varied], num_steps=-1)
more = {"loss": {"aggregation": "dapo"}, "optimizer.betas": numpy.array([0.5, 0.9])}
run = GRPO(data=train, rewards=[varied], output_dir="mine", **TINY, **more)
optimizer = dict(_component_="torch.optim.AdamW", lr=0.01, betas=[0.5, 0.9], weight_decay=0.0)
assert optimizer.items() <= run.config.optimizer.items(), run.config.optimizer
assert (run.config.num_steps, run.config.loss.aggregation) == (3, "dapo")
said = "num_steps=9: the keys of a run are set when it is made"
refused(lambda: setattr(run, "num_steps", 9), said)
given = dict(device=torch.device("cpu"), optimizer=torch.optim.SGD)
given["lr_scheduler.num_warmup_steps"] = 2
config = GRPO(output_dir="other", **TINY | given).config
assert (config.device, config.optimizer._component_) == ("cpu", "torch.optim.sgd.SGD")
assert config.lr_scheduler.num_warmup_steps == 2
assert len(mistakes(**bad, output_dir="mine")) == 1
os.makedirs("elsewhere")
os.chdir("elsewhere")  # nor does that change the run
assert run.train().exists() and not os.listdir()
os.chdir("..")
assert len(run.generate(f"{n}+1=" for n in range(3))) == 3
run.close()
assert len(mistakes(**bad, output_dir="mine")) == 1 and open("mine/.lock").read() == ""
"""


@pytest.mark.slow
def test_all_mistakes_are_reported_at_once(tmp_path):
    run_script(tmp_path, BAD)


FINISHED = """
import pandas

class Once:
    times = 0

    def __iter__(self):
        Once.times += 1
        return iter(train)


table = pandas.DataFrame(train)
with GRPO(data=Once(), eval_data=held_out, rewards=[varied], output_dir="once", **TINY) as run:
    run.train()
    assert Once.times == 1
    refused(lambda: setattr(run.config, "num_steps", 9), "read-only")
once = run.metrics
with GRPO(data=table, eval_data=held_out, rewards=[varied], output_dir="out", **TINY) as run:
    assert run.train() == run.train()
    assert run.evaluate(pandas.DataFrame(held_out)) == run.evaluate()
    assert [one.get("reward") for one in run.metrics] == [one.get("reward") for one in once]

seen = set()
def noted(prompts, completions, answer, **columns):
    seen.update(zip(prompts, answer))
    return [1.0 * (len(text) % 2) for text in completions]


with GRPO(data=train, rewards=[varied], output_dir="out", resume_from_checkpoint=True, **TINY):
    pass
anew = GRPO(data=train[1:], rewards=[varied], output_dir="out", resume_from_checkpoint=True, **TINY)
refused(anew.train, "dataset.rows=in memory (sha256")

texts = ("${oc.env:HOME}", "${open", "???", "${nowhere}")
odd = [{"prompt": text, "answer": text} for text in texts]
with GRPO(data=odd, eval_data=odd, rewards=[noted], output_dir="odd", **TINY) as run:
    run.train()
assert seen == {(text, text) for text in texts}, seen
"""


@pytest.mark.slow
def test_data_are_read_once_as_they_are_and_a_finished_run_says_so(tmp_path):
    """Data may be a pandas table; a text that a config would resolve is only text."""
    done = run_script(tmp_path, FINISHED)
    assert done.err.count("train: all num_steps=3 are done") == 1
    assert done.err.count("resume_from_checkpoint=True") == 1


RANKS = """
TINY |= {"batch_size": 1, "num_steps": 1}
for folder in ("out", "again"):
    run = GRPO(data=train, eval_data=held_out, rewards=[varied], output_dir=folder, **TINY)
    run.train()
    print(run.evaluate(), run.evaluate(held_out[:3]), run.generate("1+1=", num_samples=2))
anew = GRPO(data=train, rewards=[varied], output_dir="again", **TINY)
assert "closed" in repr(run)
"""


@pytest.mark.slow
def test_all_ranks_return_the_same(tmp_path):
    (tmp_path / "my_rewards.py").write_text(VARIED)
    mine = tmp_path / "mine.py"
    mine.write_text(COMMON + RANKS)
    first, second = run_ranks("--config", CONFIG, ranks=2, cwd=tmp_path, recipe=mine)
    said = [line for line in first.out.splitlines() if line.startswith("{")]
    assert len(said) == 2 and said[0] == said[1]
    assert said == [line for line in second.out.splitlines() if line.startswith("{")]
    assert untimed(tmp_path / "out") == untimed(tmp_path / "again")


GIVEN = """
rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
held_out = rows[:2]

def my_reward(prompts, completions, answer, **columns):
    return [float(len(set(text)) % 5) for text in completions]
"""
MESSAGES = """
roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
assert run.generate(roles)[0] != run.generate("What is 3 + 4?")[0]
"""


def example_of(page):
    """The first code of a page that makes a run."""
    text = (Path(__file__).parents[2] / page).read_text()
    return re.findall(r"```python\n(from torchtune_grpo import GRPO\n.*?)```", text, re.DOTALL)[0]


@pytest.mark.slow
def test_the_example_of_the_readme_as_it_stands(tmp_path):
    (tmp_path / "mine.py").write_text(example_of("README.md"))
    said = run("mine.py", cwd=tmp_path).out
    assert "'eval/accuracy': " in said and "['<think>" in said
    before, *_, after = [each for each in untimed(tmp_path / "out") if "reward" in each]
    assert after["reward"] > before["reward"] + 0.1


def test_the_example_of_the_page_on_python(tmp_path):
    small = "num_steps=1, max_generated_tokens=8, batch_size=2, grpo_samples=2"
    example = example_of("docs/python.md").replace("num_steps=100", small)
    (tmp_path / "mine.py").write_text(GIVEN + example + MESSAGES)
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "Qwen3-0.6B", "qwen3"))
    ends = [tokenizer.eos_token_id, 0]
    hf_folder("qwen3", tmp_path / "Qwen3-0.6B", vocab_size=384, eos_token_id=ends)
    run("mine.py", cwd=tmp_path)
    assert (tmp_path / "out" / "step_000001" / "adapter").is_dir()


def test_nothing_is_imported_before_it_is_asked_for(tmp_path):
    code = "import sys; before = {*sys.modules}; import torchtune_grpo; "
    code += "print({*sys.modules} - before)"
    assert run_python("-c", code, cwd=tmp_path).out == "{'torchtune_grpo'}\n"


def test_a_checkpoint_is_only_asked_where_no_key_of_the_data_is_given(monkeypatch):
    monkeypatch.setattr(api.ModelCard, "found", lambda folder: pytest.fail("taken for answers"))
    for keys in ({"dataset.source": "my.jsonl"}, {"dataset": {"source": "my.jsonl"}}):
        with pytest.raises(ValueError, match=r"dataset\.source='my\.jsonl'"):
            api.GRPO(model_dir="step_000020", **keys)


def test_a_function_of_a_module_that_cannot_be_imported_is_kept():
    scope = {"__name__": "a_cell"}
    exec("def reward(completions, **columns): ...", scope)
    assert api._dotpath(scope["reward"]) is None
    assert api._dotpath(hf_folder) == "hf_models.hf_folder"


MISTAKES = """
import shutil, sys

import torchtune_grpo

def f(prompts, completions, **columns): return [1.0] * len(completions)

class Env:
    def step(self, text: str): return text

def make(**changes):
    given = dict(data=train, rewards=[f], output_dir="out", eval_dataset=None, **TINY)
    return GRPO(**(given | changes))

refused(lambda: make(rewards=[(f, 0.5, "n")]), "give (function, weight), or a node")
refused(lambda: make(tools=f), "give a list, as in tools=[f]")
refused(lambda: make(tools=[object()]), "of a tool of another library, the function that it wraps")
refused(lambda: make(environment=Env()), "give the class, not an object of it")
refused(lambda: make(eval_data=0.1), "eval_data=0.1: give rows, a file or a name on the hub")
refused(lambda: make(data=[{"question": "1+1="}]), "there is no column 'prompt' among")
refused(lambda: exec("from torchtune_grpo import GRPOTrainer"), "its trainer is GRPO")
run = make(output_dir="~x")
refused(lambda: run.push_to_hub, "`torchtune-grpo push OUTPUT_DIR NAME` uploads a checkpoint")
refused(lambda: run.evalute, "Did you mean evaluate?")
run = make()
refused(lambda: run.generate("1+1=", temperature=-1), "temperature=-1: give 0 or more")
shutil.rmtree("out")
assert len(make(num_steps=1).generate("1+1=")) == 1  # in the same process, and the same folder
print("all refused")
"""


def test_mistakes_from_python_end_in_one_line(tmp_path):
    """Before a model is there, too; and a deleted folder can be used again."""
    assert run_script(tmp_path, MISTAKES).out.endswith("all refused\n")

"""Killed runs, changed configs, damage and second runs, through the real ``tune`` command."""

import json
import re
from pathlib import Path

import pytest
from processes import wait_until
from runs import RECIPE, in_background, metrics, run, tune
from transformers import AutoModelForCausalLM

from torchtune_grpo.checkpoint.folder import SUMS_FILE
from torchtune_grpo.monitor.record import read

CONFIG = "tiny_arithmetic_grpo"
QUICK = """
num_steps=2 saving.every_n_steps=1 batch_size=2 grpo_samples=4
forward_batch_size=8 max_generated_tokens=8 dataset.num_samples=64 eval_dataset=null
evaluation.every_n_steps=null output_dir=out
""".split()
LORA = "model=torchtune_grpo.models.lora_hf_model"
RESUME = "resume_from_checkpoint=True"


def tiny(folder: Path, *more: str, check: bool = True, **env: str):
    return tune("run", RECIPE, "--config", CONFIG, *QUICK, *more, cwd=folder, check=check, **env)


def refused(folder: Path, *more: str) -> str:
    """Return the last line of a resume that must fail."""
    done = tiny(folder, RESUME, *more, check=False)
    assert done.code != 0
    return done.err.strip().splitlines()[-1]


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_end(tmp_path):
    """Run benchmarks/kills.py for seconds; by itself it runs for as long as one likes."""
    script = Path(__file__).parents[2] / "benchmarks/kills.py"
    done = run(script, "--minutes", "0.1", "--kills", "3", cwd=tmp_path)
    results = json.loads(done.out.splitlines()[-1])["results"]
    assert results["kills"] >= 2 and results["resumes"] >= 1
    assert results["bit_equal"] == results["runs"] and results["lost"] == 0


@pytest.mark.slow
def test_a_resumed_run_takes_changes_that_are_allowed_and_refuses_others(tmp_path):
    tiny(tmp_path)
    few = "num_steps=1: out/step_000002 has done 2 steps; give 2 or more."
    assert few in refused(tmp_path, "num_steps=1")
    more = ["optimizer.lr=1e-5", "num_steps=3", "lr_scheduler.num_warmup_steps=1"]
    record = tmp_path / "out" / "run.jsonl"
    record.rename(tmp_path / "run.jsonl")
    gone = tiny(tmp_path, RESUME)
    assert "run.jsonl is gone: the record begins after step 2." in gone.err + gone.out
    (tmp_path / "run.jsonl").rename(record)
    done = tiny(tmp_path, RESUME, *more)
    assert "optimizer.lr 0.0005 -> 1e-05" in done.err + done.out
    steps = [record for record in metrics(tmp_path / "out") if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    # warm-up to 1e-5 in step 1, then the cosine's thirds: 3/4, 1/4
    assert steps[2]["learning_rate"] == pytest.approx(0.25e-5)
    kept = ["step_000001", "step_000002", "step_000003"]
    assert sorted(path.name for path in (tmp_path / "out").glob("step_*")) == kept
    tiny(tmp_path, RESUME, *more, "saving.keep_last=1")  # as if killed before it deleted them
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == kept[-1:]
    model = tmp_path / "out" / "tiny_llama"
    for name, was, now in (
        ("config.json", "500000", "20000"),  # rope_theta
        ("tokenizer.json", '"x"', '"y"'),
        ("tokenizer_config.json", "chat_template", "another"),
    ):
        text = (model / name).read_text()
        assert was in text
        (model / name).write_text(text.replace(was, now))
        assert f"model_dir/{name}=sha256 " in refused(tmp_path, *more)
        (model / name).write_text(text)


def test_auto_starts_a_run_and_goes_on_with_it(tmp_path):
    """The same command, as a scheduler that requeues a job gives it."""
    auto = "resume_from_checkpoint=auto"
    tiny(tmp_path, auto, "num_steps=1")
    assert "Resumed after step 1." in tiny(tmp_path, auto).err
    assert not (tmp_path / "out" / "previous_runs").exists()
    assert " seed=5: " in refused(tmp_path, auto, "seed=5")


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_fails_and_the_first_goes_on(tmp_path):
    more = ["num_steps=9999", "saving.keep_last=2"]
    out = tmp_path / "out"
    with in_background(tiny, tmp_path, *more, check=False) as done:
        assert wait_until(lambda: (out / "step_000002").exists(), 60)
        (first,) = done.processes()
        (out / ".deleted_by_the_first").mkdir()
        for more in ([], [RESUME]):
            second = tiny(tmp_path, *more, check=False)
            said = second.err.strip().splitlines()[-1]
            assert second.code != 0 and "output_dir=" in said and f"process {first} on " in said
        assert not (out / "previous_runs").exists() and not done.done()
        assert (out / ".deleted_by_the_first").exists()  # nothing is cleared for it
        step = max(record["step"] for record in metrics(out))
        assert wait_until(lambda: (out / f"step_{step + 2:06d}").exists(), 60)
        steps = [record["step"] for record in metrics(out)]
        assert steps == list(range(1, len(steps) + 1))
        out.rename(tmp_path / "moved")  # or deleted
        second = tiny(tmp_path, "num_steps=1")
    first = done.result()
    (error,) = (line for line in first.err.splitlines() if "Traceback" in line or "Error" in line)
    assert first.code == 1 and error.startswith("Error: output_dir=out: was deleted while ")
    assert [record["step"] for record in metrics(out)] == [1] and second.code == 0
    assert not (out / "error.txt").exists() and (out / "step_000001" / SUMS_FILE).exists()


@pytest.mark.parametrize("model", [(), (LORA,)], ids=["full", "lora"])
def test_a_save_does_not_need_the_base_models_folder(tmp_path, model):
    (tmp_path / "own.py").write_text(
        "import shutil\n"
        "def gone(prompts, completions, **columns):\n"
        "    shutil.rmtree('out/tiny_llama', ignore_errors=True)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    tiny(tmp_path, *model, "rewards=[{_component_: own.gone}]", "num_steps=1")
    saved = tmp_path / "out" / "step_000001"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (saved / name).is_file(), name
    assert "/out/tiny_llama`" in (saved / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters() > 100_000


@pytest.mark.slow
def test_a_secret_is_in_no_file_and_a_resume_sees_that_it_has_changed(tmp_path):
    (tmp_path / "own.py").write_text(
        "from torchtune_grpo.data import arithmetic_dataset\n"
        "def rows(tokenizer, hub_token, **given):\n"
        "    return arithmetic_dataset(tokenizer, **given)\n"
        "def judge(prompts, completions, api_key, home_key, rounds_key, **columns):\n"
        "    assert api_key.startswith('sk-') and home_key.startswith('/') and rounds_key == 3\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    judge = (
        "{_component_: own.judge, api_key: sk-secret1, home_key: '${oc.env:HOME}', rounds_key: 3}"
    )
    more = [f"rewards=[{judge}]", "dataset._component_=own.rows", "dataset.hub_token=sk-secret2"]
    command = ["-m", "torchtune_grpo", "run", RECIPE, "--config", CONFIG, *QUICK, *more]
    run(*command, cwd=tmp_path)
    said = [refused(tmp_path, *more, "dataset.hub_token=sk-secret3")]
    assert "dataset.hub_token=... (sha256 " in said[0]
    done = tiny(tmp_path, RESUME, *more, "rewards.0.api_key=sk-secret4", "num_steps=3")
    assert "rewards.0.api_key ... (sha256 " in done.err
    start, _ = read(tmp_path / "out", "start")
    assert '"rounds_key": 3' in start["command"] and "hub_token=..." in start["command"]
    assert start["config"]["rewards"][0]["rounds_key"] == 3
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"README.md", "run.html", "run_config.json"} < {path.name for path in files}
    for text in (*(path.read_bytes() for path in files), *map(str.encode, (*said, done.err))):
        assert not re.search(rb"sk-secret\d", text)

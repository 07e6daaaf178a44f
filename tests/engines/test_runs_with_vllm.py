"""Runs of the real commands with vLLM: they learn, end quietly, and go on after a kill.

Of the run, and of a server in the middle of a rollout.
"""

import json
import signal
import time
from pathlib import Path

import pytest
from runs import (
    NO_EVALUATION,
    RECIPE,
    completions,
    in_background,
    prompts,
    run_ranks,
    steps_of,
    tune,
    untimed,
)
from runs import run as run_command
from vllm_serve import serving

from torchtune_grpo.checkpoint.folder import checkpoint_folder

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

# One that is killed in its third rollout, and one that keeps its first weights.
ENGINES = """
import os, signal
from dataclasses import replace
from torchtune_grpo.rollout.vllm import VLLMEngine, rows

rows.REPORT_SECONDS = 0.0


class Killed(VLLMEngine):
    rollouts = 0

    def generate(self, request):
        self.rollouts += 1
        if self.rollouts == 3:
            kill = lambda progress: os.kill(os.getpid(), signal.SIGKILL)
            request = replace(request, report=kill)
        return super().generate(request)


class Stale(VLLMEngine):
    has_weights = False

    def _start(self, request):
        super()._start(request)
        self._guard.compare = lambda *samples, vocab: None  # which tells in the rollout already
        self._compare_weights = lambda: None  # so does this

    def _bring_weights(self):
        if not self.has_weights:
            super()._bring_weights()
        self.has_weights = True
"""
CORRECTED = ("objective.sampling_correction=token_truncate",)
SIZE = ("num_steps=4", "grpo_samples=8", "saving.every_n_steps=1", "seed=1", *NO_EVALUATION)


def run(folder, *options, **settings):
    return tune(
        *("run", RECIPE, "--config", "tiny_arithmetic_grpo", f"output_dir={folder}"),
        *("batch_size=4", *SIZE, *options),
        cwd=folder.parent,
        **settings,
    )


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run in an interpreter of its own, whose end is quiet."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = run(folder, "rollout.engine=vllm", fresh=True)
    assert "Traceback" not in done.err and "vllm" not in (done.out + done.err).lower()
    return folder


def test_a_run_learns_and_after_a_kill_and_stale_weights_goes_on_as_if_nothing_was(whole):
    steps = steps_of(whole)
    assert len(steps) == 4
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
        assert step["grad_norm"] > 0

    parts, resumed = whole.with_name("parts"), "resume_from_checkpoint=True"
    whole.with_name("my_engine.py").write_text(ENGINES)
    killed = run(parts, "rollout.engine=my_engine.Killed", *CORRECTED, check=False)
    assert killed.code == -signal.SIGKILL and len(steps_of(parts)) == 2
    stale = run(parts, "rollout.engine=my_engine.Stale", *CORRECTED, resumed, check=False)
    assert stale.code == 1 and "vLLM samples from another policy" in stale.err
    assert checkpoint_folder(parts, 3).exists() and not checkpoint_folder(parts, 4).exists()
    run(parts, "rollout.engine=vllm", resumed)
    assert untimed(parts) == untimed(whole)
    assert completions(parts) == completions(whole)


def test_a_game_of_several_turns_repeats_itself_whenever_replies_come(whole):
    folders = [whole.with_name(name) for name in ("game", "again")]
    options = ("num_steps=2", "batch_size=3", "grpo_samples=4", "rollout.engine=vllm")
    for folder in folders:
        game = ("--config", "tiny_guess_grpo", f"output_dir={folder}")
        tune("run", RECIPE, *game, *options, cwd=whole.parent)
    steps = steps_of(folders[0])
    assert len(steps) == 2 and all(step["environment/turns"] > 1 for step in steps)
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-3 for step in steps)
    assert untimed(folders[0]) == untimed(folders[1])
    assert completions(folders[0]) == completions(folders[1])
    assert any("lower, I guess " in row["completion"] for row in completions(folders[0]))


def test_two_ranks_that_share_the_model_take_the_same_steps(whole):
    folder = whole.with_name("ranks")
    options = ("batch_size=2", *SIZE, "rollout.engine=vllm", "distributed.sharding=always")
    run_ranks(
        *("--config", "tiny_arithmetic_grpo", f"output_dir={folder}", *options),
        ranks=2,
        cwd=whole.parent,
    )
    assert_same_steps(folder, whole)


def test_an_evaluation_before_and_after_training_gives_the_native_engines_answers(whole):
    """On two ranks, too, whose process group vLLM joins, and leaves as it was when it ends."""
    answers = []
    for engine, ranks in (("vllm", 1), ("native", 1), ("vllm", 2)):
        file = whole.with_name(f"{engine}_{ranks}.json")
        options = (f"rollout.engine={engine}", "--samples", 0, "--output", file)
        data = ("eval_dataset.split=test", "eval_dataset.num_samples=32")
        if ranks == 1:
            command = ("-m", "torchtune_grpo", "evaluate", whole, *options, *data)
            run_command(*command, cwd=whole.parent)
        else:
            rest = {"ranks": ranks, "cwd": whole.parent, "command": "evaluate"}
            run_ranks("--config", whole, *options, *data, **rest)
        answers.append(json.loads(file.read_text())["answers"])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["before"] != answers[0]["after"]


# --- With a server -------------------------------------------------------------------------------

# One that kills its server in the rollout that the environment says.
KILLING = """
import os, signal
from dataclasses import replace
from pathlib import Path
from torchtune_grpo.rollout.vllm import VLLMServer, rows

rows.REPORT_SECONDS = 0.0


class Killing(VLLMServer):
    rollouts, killed = 0, False

    def generate(self, request):
        def kill(progress):
            if progress.tokens > 40 and not self.killed:
                self.killed = True
                os.killpg(int(Path("server.pid").read_text()), signal.SIGKILL)

        self.rollouts += 1
        if self.rollouts == int(os.environ["KILLED_IN"]):
            request = replace(request, report=kill)
        return super().generate(request)
"""
LONGEST = 96


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), LONGEST) as server:
        (server.shared.parent / "my_engine.py").write_text(KILLING)
        yield server


def options_of(server, folder: Path, *, engine="vllm_server", patience=280.0) -> list[str]:
    arguments = f"url: '{server.url}', shared: '{server.shared}', max_model_len: {LONGEST}"
    node = f"rollout.engine={{_component_: {engine}, {arguments}, patience: {patience}}}"
    return ["--config", "tiny_arithmetic_grpo", f"output_dir={folder}", *SIZE, node]


def run_served(server, folder: Path, *more: object, killed_in=0, check=True, **engine):
    options = (*options_of(server, folder, **engine), "batch_size=4", *more)
    env = {"KILLED_IN": str(killed_in)}
    return tune("run", RECIPE, *options, cwd=folder.parent, check=check, **env)


@pytest.fixture(scope="module")
def served(server):
    folder = server.shared.parent / "whole"
    run_served(server, folder)
    return folder


def assert_same_steps(folder: Path, whole: Path) -> None:
    steps = steps_of(folder)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for found, expected in zip(steps, steps_of(whole), strict=True):
        assert found["sampling/sampling_logp_difference/max"] < 1e-3
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert prompts(folder, "step") == prompts(whole, "step")


def test_two_ranks_share_a_server_and_take_the_same_steps(server, served):
    folder = served.with_name("ranks")
    options = (*options_of(server, folder), "batch_size=2", "distributed.sharding=always")
    run_ranks(*options, ranks=2, cwd=folder.parent)
    assert_same_steps(folder, served)


def test_after_kills_of_the_server_a_run_goes_on_as_if_nothing_was(server, served):
    folder, killing = served.with_name("killed"), {"engine": "my_engine.Killing"}
    ended = run_served(server, folder, killed_in=3, patience=2.0, check=False, **killing)
    assert ended.code == 1 and "Traceback (most" not in ended.err
    assert f"rollout.engine.url={server.url}: has not answered for 2 s" in ended.err
    assert len(steps_of(folder)) == 2 and checkpoint_folder(folder, 2).exists()

    server.start()
    resumed = (server, folder, "resume_from_checkpoint=True")
    with in_background(run_served, *resumed, killed_in=1, **killing) as going:
        while server.is_alive() and not going.done():
            time.sleep(0.2)
        server.start()
        going.result()
    assert_same_steps(folder, served)
    assert completions(folder) == completions(served)

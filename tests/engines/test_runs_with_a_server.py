"""Runs of the real commands whose server is killed in the middle of a rollout: nothing is lost."""

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
)
from vllm_serve import serving

from torchtune_grpo.checkpoint.folder import checkpoint_folder

pytest.importorskip("vllm")

# One that kills its server in the rollout that the environment says.
ENGINE = """
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
SIZE = ("num_steps=4", "grpo_samples=8", "saving.every_n_steps=1", "seed=1", *NO_EVALUATION)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = f"--tokens-only --dtype float32 --max-model-len {LONGEST}"
    options += " --logprobs-mode processed_logprobs"
    with serving(tmp_path_factory.mktemp("server"), options) as server:
        (server.shared.parent / "my_engine.py").write_text(ENGINE)
        yield server


def options_of(server, folder: Path, *, engine="vllm_server", patience=280.0) -> list[str]:
    arguments = f"url: '{server.url}', shared: '{server.shared}', max_model_len: {LONGEST}"
    node = f"rollout.engine={{_component_: {engine}, {arguments}, patience: {patience}}}"
    return ["--config", "tiny_arithmetic_grpo", f"output_dir={folder}", *SIZE, node]


def run(server, folder: Path, *more: object, killed_in=0, check=True, **engine):
    options = (*options_of(server, folder, **engine), "batch_size=4", *more)
    env = {"KILLED_IN": str(killed_in)}
    return tune("run", RECIPE, *options, cwd=folder.parent, check=check, **env)


@pytest.fixture(scope="module")
def whole(server):
    folder = server.shared.parent / "whole"
    run(server, folder)
    return folder


def assert_same_steps(folder: Path, whole: Path) -> None:
    steps = steps_of(folder)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for found, expected in zip(steps, steps_of(whole), strict=True):
        assert found["sampling/sampling_logp_difference/max"] < 1e-3
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert prompts(folder, "step") == prompts(whole, "step")


def test_two_ranks_share_a_server_and_take_the_same_steps(server, whole):
    folder = whole.with_name("ranks")
    options = (*options_of(server, folder), "batch_size=2", "distributed.sharding=always")
    run_ranks(*options, ranks=2, cwd=folder.parent)
    assert_same_steps(folder, whole)


def test_after_kills_of_the_server_a_run_goes_on_as_if_nothing_was(server, whole):
    folder, killing = whole.with_name("killed"), {"engine": "my_engine.Killing"}
    ended = run(server, folder, killed_in=3, patience=2.0, check=False, **killing)
    assert ended.code == 1 and "Traceback (most" not in ended.err
    assert f"rollout.engine.url={server.url}: has not answered for 2 s" in ended.err
    assert len(steps_of(folder)) == 2 and checkpoint_folder(folder, 2).exists()

    server.start()
    resumed = (server, folder, "resume_from_checkpoint=True")
    with in_background(run, *resumed, killed_in=1, **killing) as going:
        while server.is_alive() and not going.done():
            time.sleep(0.2)
        server.start()
        going.result()
    assert_same_steps(folder, whole)
    assert completions(folder) == completions(whole)

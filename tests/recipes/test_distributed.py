"""Two gloo ranks against one process, killed ranks, and two machines.

What torchrun itself does is tested with the real ``tune run --nproc_per_node``: that it starts
the ranks, on a copied recipe too, and what happens when one of them dies. Everything else starts
the same file with the same environment in forked processes.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import children, is_alive, wait_until
from runs import (
    DISTRIBUTED,
    EAGER,
    LENGTH_REWARD,
    NO_EVALUATION,
    OF_LENGTH,
    RECIPE,
    SGD,
    Result,
    adapter,
    completions,
    copy_recipe,
    distance,
    in_background,
    metrics,
    prompts,
    run_ranks,
    steps_of,
    tiny_overrides,
    tune,
    untimed,
    weights,
)

LORA, FULL = "llama3_2_1B_lora_grpo", "llama3_2_1B_full_grpo"
QLORA, QWEN3 = "llama3_2_1B_qlora_grpo", "hf_lora_grpo"

MY_REWARDS = f"""
import os, signal, time
{LENGTH_REWARD}
def reward_half(prompts, completions, answer, **columns):
    scores = reward_length(prompts, completions)
    return [score if int(gold) % 2 else 1.0 for score, gold in zip(scores, answer)]

def reward_kill(prompts, completions, trainer_state, **columns):
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first and os.environ.get("RANK") == "1" and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return reward_length(prompts, completions)

def reward_hang(prompts, completions, **columns):
    while os.environ.get("RANK") == "1" and not os.path.exists("out/error.txt"):
        time.sleep(0.1)
    return reward_length(prompts, completions)

class Broken(KeyboardInterrupt):  # which no signal has raised
    pass

def reward_raise(prompts, completions, trainer_state, **columns):
    if os.environ.get("RANK") == "1" and trainer_state.global_step == 1:
        raise Broken("the reward of rank 1 is broken")
    return reward_length(prompts, completions)
"""
WITH_KL = "loss.kl_coeff=0.5"
HALF = "rewards=[{_component_: my_rewards.reward_half}]"  # of the groups fail
RESAMPLED = "dynamic_sampling.max_resamples=2"
RESUME = "resume_from_checkpoint=true"


def settings(folder: Path, config: str, *more: str) -> list[str]:
    """Return overrides for SGD in fp32 with a reward that always has spread."""
    folder.mkdir(exist_ok=True)
    (folder / "my_rewards.py").write_text(MY_REWARDS)
    overrides = [*tiny_overrides(config, folder), *SGD, OF_LENGTH, "log_groups=99"]
    overrides.append("eval_dataset.num_samples=5")  # ranks get different numbers of prompts
    if config in (LORA, QWEN3):  # fused SGD has no form for sharded parameters
        overrides.append("optimizer.fused=false")
    return [*overrides, *more]


def base_of(folder: Path) -> Path:
    (file,) = folder.glob("*/model.safetensors")
    return file.parent


def run(folder: Path, config: str, *more: str, ranks: int = 2, **options: Any) -> list[Result]:
    """Run forked ranks; ``ranks=0`` is ``tune run`` without torchrun."""
    arguments = ["--config", config, *settings(folder, config, *more)]
    options |= {"PYTHONPATH": str(folder), "cwd": folder}
    if ranks:
        return run_ranks(*arguments, ranks=ranks, **options)
    return [tune("run", RECIPE, *arguments, **options)]


def answers(folder: Path) -> list[tuple]:
    keys = ("step", "prompt", "completion", "reward")
    return sorted(tuple(line[key] for key in keys) for line in completions(folder))


VARIANTS = {
    QWEN3: {
        "two machines": [],
        "one machine": [],
        "sharded": ["distributed.sharding=always", "forward_batch_size=4"],  # two micro-batches
    },
    FULL: {
        # ranks get different numbers of tokens, and have to agree on the number of passes
        "sharded": ["enable_activation_checkpointing=true", "forward_batch_size=3"]
    },
    QLORA: {"sharded": ["distributed.sharding=always"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS)
def test_two_ranks_take_the_same_steps_as_one(tmp_path, config):
    """Prompts, samples and metrics are the same, and weights equal to 1e-5 after two steps.

    To the last bit, if the ranks are on other machines.

    Every denominator is that of all ranks: of the loss (`dapo`: tokens; `prompt`: prompts), and of
    the advantages (`batch`: the spread of all rewards). With seed 0, one draw of the second step is
    4e-8 from the border between two tokens, and weights that differ by 1e-7 turn it; with seed 1,
    none is closer than 3e-6.
    """
    objective = ["loss.aggregation=dapo", "objective.advantage=batch", "seed=1"]
    if config == QLORA:  # QDoRA; half of the groups teach nothing, and get no pass
        objective += ["model.use_dora=True", "optimizer.fused=False", "loss.kl_coeff=0"]
        objective += ["num_minibatches=2", HALF, "loss.aggregation=prompt"]
    if config == QWEN3:
        objective += [WITH_KL, HALF, RESAMPLED, "seed=2"]
    runs = {"one": (0, ["batch_size=4"])}
    runs |= {name: (2, more) for name, more in VARIANTS[config].items()}
    for name, (ranks, more) in runs.items():
        machines = {"machines": 2} if name == "two machines" else {}
        run(tmp_path / name, config, *objective, *more, ranks=ranks, **machines)
    one = tmp_path / "one"
    expected = weights(one / "out" / "step_000002")
    assert distance(weights(base_of(one)), expected) > 1e-3
    if config == QWEN3:  # the reference is what the run began with
        kl = [record["kl"] for record in metrics(one / "out") if "kl" in record]
        assert abs(kl[0]) < 1e-6 < 1e-4 < kl[1]
        saved = [tmp_path / name / "out/step_000002" for name in ("one machine", "two machines")]
        assert distance(*map(weights, saved)) == distance(*map(adapter, saved)) == 0
    for name in VARIANTS[config]:
        out = tmp_path / name / "out"
        assert answers(out) == answers(one / "out"), name
        assert prompts(out, "step") == prompts(one / "out", "step")
        sampled = [each["prompt_index"] for each in prompts(out, "step")]
        assert [len(rows) > 4 for rows in sampled] == 2 * [config == QWEN3]
        assert len(completions(out)) == 4 * sum(map(len, sampled))
        for read in (weights, adapter):
            # QLoRA's merged weights are bfloat16; a sum near a border rounds either way.
            rtol = 2**-7 if config == QLORA and read is weights else 0
            got, want = (read(each / "step_000002") for each in (out, one / "out"))
            torch.testing.assert_close(got, want, atol=1e-5, rtol=rtol, msg=name)
        for got, want in zip(untimed(out), untimed(one / "out"), strict=True):
            assert got == pytest.approx(want, abs=1e-5, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("config", [LORA, FULL])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, config):
    """It does to the last bit on as many ranks, and to 1e-5 on another number of them.

    Adapters train with dropout, so that every rank's generator has to continue; but not for the
    second half, where another number of ranks draws other masks. That is a single step, on samples
    of the same weights: weights that differ by 1e-7 turn a draw that close to the border between
    two tokens.
    """
    adam = ["optimizer=torch.optim.AdamW", "optimizer.lr=1e-3"]
    adam += ["optimizer.eps=1e-3"]  # below it, Adam turns rounding noise into full steps
    adam += ["num_steps=3", "saving.every_n_steps=1", "saving.keep_last=null", *NO_EVALUATION]
    dropout = []
    if config == LORA:
        dropout, adam = ["model.lora_dropout=0.5"], [*adam, WITH_KL]
        adam += [HALF, RESAMPLED, "num_minibatches=2"]
    out = tmp_path / "out"
    run(tmp_path, config, *adam, *dropout)
    whole = weights(out / "step_000003")
    for step in (2, 3):
        (out / f"step_00000{step}").rename(tmp_path / f"first_{step}")
    run(tmp_path, config, *adam, *dropout, RESUME)
    again = weights(out / "step_000003")
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert [r["step"] for r in steps_of(out)] == [1, 2, 3]

    if dropout:
        (out / "step_000003").rename(tmp_path / "with_dropout")
        run(tmp_path, config, *adam, RESUME)
        again = weights(out / "step_000003")
    (out / "step_000003").rename(tmp_path / "on_two")
    run(tmp_path, config, *adam, RESUME, "batch_size=4", ranks=0)
    assert distance(weights(out / "step_000003"), again) <= 1e-5


# Loads a policy, its reference and a checkpoint, and shards the first two.
LOAD = """
import json, sys
from pathlib import Path
import torch
from torch.utils._pytree import tree_leaves
from torchtune_grpo.checkpoint import checkpoints
from torchtune_grpo.checkpoint.resume import whole_on_first_rank
from torchtune_grpo.cli.entry import parse
from torchtune_grpo.machine.parallel import rank
from torchtune_grpo.run import Run
from torchtune_grpo.training.reference import Reference

def own_bytes(tensors):  # of those that are neither on meta nor pages of the state's file
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [fields[0].split("-") for fields in maps if fields[-1].endswith("training_state.pt")]
    mapped = [range(int(begin, 16), int(end, 16)) for begin, end in ends]
    own = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor) and not x.is_meta]
    return sum(x.nbytes for x in own if not any(x.data_ptr() in pages for pages in mapped))

@parse
def main(cfg):
    run = Run(cfg)
    run.device
    if rank() == 1:
        checkpoints.kind_of = None
    model = run._load_policy()
    reference = Reference(model)
    state = run.checkpoints.restore(model, Path(cfg.output_dir) / "step_000001")
    copied = [*reference._model.parameters()] if reference._is_copy else []
    held = [own_bytes(each) for each in ([*model.parameters()], copied, state["optimizer"])]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run._prepare_passes(model, reference)
    part = sum(parameter.to_local().nbytes for parameter in model.parameters())
    after = whole_on_first_rank(model.state_dict())
    same = all(value.equal(before[name]) for name, value in after.items())
    Path(f"rank_{rank()}.json").write_text(json.dumps([held, part, same]))
    return 0

sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("config", [LORA, FULL])
def test_only_the_first_rank_has_a_model_before_it_is_sharded(tmp_path, config):
    """So it is with the reference's weights and the training state; the other has its part."""
    more = ["optimizer=torch.optim.AdamW", "distributed.sharding=always", "num_steps=1"]
    more.append(WITH_KL)
    run(tmp_path, config, *more, *NO_EVALUATION)
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    arguments = ["--config", config, *settings(tmp_path, config, *more)]
    run_ranks(*arguments, ranks=2, cwd=tmp_path, recipe=script, PYTHONPATH=str(tmp_path))
    read = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    (first, half, same), (second, other_half, _) = read
    assert second == [0, 0, 0] and half == other_half == first[0] / 2 and same
    assert first[2] >= 2 * first[1] and (first[1] > 0) == (config == FULL)  # two moments of it


@pytest.mark.slow
def test_sharded_low_bit_optimizer_state_survives_a_checkpoint(tmp_path):
    """The config's AdamW8bit rounds weights in bf16 at random.

    A resume is exact but for the rounding of 8-bit states; without them it would be far off.
    """
    adam = ["optimizer=torchao.optim.AdamW8bit", "optimizer.bf16_stochastic_round=True"]
    adam += ["dtype=bf16", "optimizer.lr=1e-2", *NO_EVALUATION]
    run(tmp_path, FULL, *adam, "saving.every_n_steps=1", **EAGER)
    whole = weights(tmp_path / "out" / "step_000002")
    (tmp_path / "out" / "step_000002").rename(tmp_path / "first")
    run(tmp_path, FULL, *adam, RESUME, **EAGER)
    again = weights(tmp_path / "out" / "step_000002")
    before = weights(tmp_path / "out" / "step_000001")
    error = sum((again[name] - whole[name]).norm() ** 2 for name in whole) ** 0.5
    update = sum((before[name] - whole[name]).norm() ** 2 for name in whole) ** 0.5
    assert error < 0.05 * update


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "raise"])
def test_a_rank_that_fails_ends_the_job_and_leaves_nothing_half_written(tmp_path, way):
    """It fails in step 2."""
    reward = f"rewards=[{{_component_: my_rewards.reward_{way}}}]"
    more = ["saving.every_n_steps=1", "num_steps=3", reward, *NO_EVALUATION]
    ranks = run(tmp_path, LORA, *more, check=False)
    assert all(rank.code != 0 for rank in ranks)
    if way == "kill":
        assert ranks[1].code == -signal.SIGKILL and "Exception in thread" not in ranks[0].err
    else:
        assert any("the reward of rank 1 is broken" in rank.err for rank in ranks)
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000001"]
    assert weights(tmp_path / "out" / "step_000001")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(tmp_path):
    more = ["rewards=[{_component_: my_rewards.reward_hang}]", "distributed.timeout_minutes=0.1"]
    first, _ = run(tmp_path, LORA, *more, *NO_EVALUATION, check=False)
    assert first.code == 1 and "Timed out waiting 6000ms" in first.err


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again_and_passes_sigterm_on(tmp_path):
    """From the checkpoint of step 1, to the weights of a run that nobody killed."""
    more = ["saving.every_n_steps=1", "saving.keep_last=null", *NO_EVALUATION]
    kills, whole = tmp_path / "killed", tmp_path / "whole"
    run(whole, LORA, *more, "num_steps=3")
    reward = "rewards=[{_component_: my_rewards.reward_kill}]"
    launch = ["run", "--nproc_per_node", "2", "--max_restarts", "1", "my_grpo.py", "--config"]
    launch += ["my_config.yaml", *settings(kills, LORA, *more, reward), "num_steps=9999"]
    copy_recipe(LORA, kills, recipe=DISTRIBUTED)
    out = kills / "out"
    with in_background(tune, *launch, cwd=kills, check=False, PYTHONPATH=str(kills)) as job:
        assert wait_until(lambda: len(steps_of(out)) > 3, 180)
        (launcher,) = job.processes()
        ranks = children(of=launcher)
        os.kill(launcher, signal.SIGTERM)
        done = job.result(25)  # torchrun kills after 30 s
    assert done.code == 143 and len(ranks) == 2 and not any(map(is_alive, ranks))
    assert "Resumed after step 1." in done.err + done.out
    assert not (out / "previous_runs").exists()
    recorded = [record["step"] for record in steps_of(out)]
    saved = sorted(int(path.name.removeprefix("step_")) for path in out.glob("step_*"))
    assert recorded == saved == [*range(1, len(saved) + 1)]
    got, expected = (weights(each / "out" / "step_000003") for each in (kills, whole))
    assert all(torch.equal(got[name], expected[name]) for name in expected)

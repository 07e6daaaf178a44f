"""Which checkpoint is resumed from, what is kept, and what a new run puts aside."""

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_grpo.checkpoint import Checkpoints, set_aside_previous_run
from torchtune_grpo.checkpoint._folder import STATE_FILE, _publish


def complete(folder, step, **state):
    path = folder / f"step_{step:06d}"
    path.mkdir(parents=True)
    torch.save(state, path / STATE_FILE)
    return path


def of(folder) -> Checkpoints:
    """No weights are read or written here, so that any class does for torchtune's checkpointer."""
    return Checkpoints(
        OmegaConf.create({"_component_": "types.SimpleNamespace"}), output_dir=folder
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint=True: .* no complete checkpoint"):
        of(tmp_path).newest()
    complete(tmp_path, 999_999)
    newest = complete(tmp_path, 1_000_000)  # beyond the digits by which names sort
    (tmp_path / "step_1000001").mkdir()
    assert of(tmp_path).newest() == newest


def test_another_seed_is_refused(tmp_path):
    model, weight = torch.nn.Linear(1, 1, bias=False), torch.tensor([[5.0]])
    path = complete(tmp_path, 1, seed=3, adapter={"weight": weight})
    with pytest.raises(ValueError, match="seed=4: .* was made with seed 3, .* set seed to 3"):
        of(tmp_path).restore(model, path, seed=4)
    for seed in (None, 3):
        assert of(tmp_path).restore(model, path, seed=seed)["seed"] == 3
    assert model.weight.equal(weight)


def test_a_published_folder_replaces_its_namesake_and_the_oldest_go(tmp_path):
    for step in (9, 10, 11):
        complete(tmp_path, step, written="before")
    staged = complete(tmp_path / ".incomplete", 11, written="now")
    _publish(staged, tmp_path / "step_000011", keep_last=2)
    assert names(tmp_path) == ["step_000010", "step_000011"]
    assert torch.load(tmp_path / "step_000011" / STATE_FILE) == {"written": "now"}


def test_a_new_run_moves_away_what_it_could_mix_up(tmp_path):
    (tmp_path / "notes.txt").touch()
    set_aside_previous_run(tmp_path)
    assert names(tmp_path) == ["notes.txt"]
    for run in (1, 2):
        complete(tmp_path, 5)
        (tmp_path / "metrics.jsonl").write_text(str(run))
        (tmp_path / "nonfinite").mkdir()
        set_aside_previous_run(tmp_path)
        assert names(tmp_path) == ["notes.txt", "previous_runs"]
        archive = tmp_path / "previous_runs" / str(run)
        assert names(archive) == ["metrics.jsonl", "nonfinite", "step_000005"]
        assert (archive / "metrics.jsonl").read_text() == str(run)

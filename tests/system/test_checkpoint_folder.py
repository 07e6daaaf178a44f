"""Which checkpoint is resumed from, what is kept and cleared, and what a new run puts aside."""

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import TINY, llama_checkpoint, saving_config
from kill_points import kill_points
from runs import run
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_grpo.checkpoint.checkpoints import RUN_CONFIG_FILE, STATE_FILE, Checkpoints
from torchtune_grpo.checkpoint.folder import (
    SUMS_FILE,
    CheckpointError,
    claim_output_dir,
    mark_begun,
    publish,
    set_aside_previous_run,
    sha256_of,
    staging,
)
from torchtune_grpo.config.command_line import hub_name
from torchtune_grpo.machine import lock

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # of unshare(2)
REFUSED = 77  # the exit code where the kernel allows none of them


def complete(folder, step, **state):
    path = folder / f"step_{step:06d}"
    with staging(folder, failing=path.name, remedy="") as written:
        torch.save(state, written / STATE_FILE)
        publish(written, path)
    return path


def of(folder, **saving) -> Checkpoints:
    """No weights are read or written here, so that any class does for torchtune's checkpointer."""
    return Checkpoints(saving_config({"_component_": "types.SimpleNamespace"}, folder, **saving))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saving(tmp_path, **settings) -> tuple[Checkpoints, torch.nn.Module]:
    """Checkpoints in tmp_path/out, with torchtune's checkpointer, and a small model."""
    node = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(llama_checkpoint(tmp_path / "base")),
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3_2",
    }
    checkpoints = Checkpoints(saving_config(node, tmp_path / "out", **settings))
    model = llama3_2(**TINY)
    model.load_state_dict(checkpoints.base_weights(model))
    return checkpoints, model


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint=True: .* no complete checkpoint"):
        of(tmp_path).newest()
    complete(tmp_path, 999_999)
    newest = complete(tmp_path, 1_000_000)  # beyond the digits by which names sort
    (tmp_path / "step_1000001").mkdir()
    (tmp_path / "step_notes").mkdir()
    assert of(tmp_path).newest() == newest


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "gone": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_named_and_the_one_before_is_taken(tmp_path, damage, caplog):
    checkpoints, model = saving(tmp_path)
    older, newest = (checkpoints.save(model, {"step": step}, step=step) for step in (3, 4))
    assert checkpoints.newest() == newest
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert {STATE_FILE, SUMS_FILE, "config.json"} < {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        if (changed := DAMAGE[damage](whole)) is None:
            path.unlink()
        elif changed != whole:
            path.write_bytes(changed)
        caplog.clear()
        assert checkpoints.newest() == older
        assert str(newest) in caplog.text and path.name in caplog.text
        path.write_bytes(whole)
    lines = (newest / SUMS_FILE).read_text().splitlines(keepends=True)
    (newest / SUMS_FILE).write_text("".join(lines[1:]))  # cut between two lines
    assert checkpoints.newest() == older
    (older / STATE_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="all of its checkpoints are damaged"):
        checkpoints.newest()


def test_sha256sum_reads_the_sums(tmp_path):
    folder = complete(tmp_path, 1)
    command = ["sha256sum", "--check", SUMS_FILE]
    subprocess.run(command, cwd=folder, check=True)
    (folder / STATE_FILE).write_bytes(b"")
    assert subprocess.run(command, cwd=folder).returncode == 1


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"wait": torch.zeros(1, 1)}, "wait .* and missing in the model; weight is missing there"),
        ({"weight": torch.zeros(2, 1)}, r"float32 \[2, 1\] there and float32 \[1, 1\] in"),
        ({"weight": torch.zeros(1, 1).half()}, r"float16 \[1, 1\] there and float32 \[1, 1\] in"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(tmp_path, saved, named):
    model, weight = torch.nn.Linear(1, 1, bias=False), torch.tensor([[5.0]])
    of(tmp_path).restore(model, complete(tmp_path, 1, adapter={"weight": weight}))
    bad = complete(tmp_path, 2, adapter=saved)
    with pytest.raises(ValueError, match=f"step_000002 does not hold .*{named}"):
        of(tmp_path).restore(model, bad)
    assert model.weight.equal(weight)


def test_the_oldest_go_and_never_for_a_damaged_one(tmp_path):
    """After step 11 was found damaged, the run went on from step 9 and saves step 10."""
    checkpoints, model = saving(tmp_path, keep_last=2)
    for step in (8, 9, 11):
        complete(tmp_path / "out", step)
    checkpoints.save(model, {}, step=10)
    assert names(tmp_path / "out") == ["step_000009", "step_000010", "step_000011"]
    checkpoints.save(model, {}, step=11)
    assert names(tmp_path / "out") == ["step_000010", "step_000011"]
    assert checkpoints.newest().name == "step_000011"


def test_the_best_is_linked_again_after_a_kill_and_not_when_nobody_asks(tmp_path):
    checkpoints, model = saving(tmp_path, keep_last=1)
    out = tmp_path / "out"
    checkpoints.keep_best(2)  # about to be saved: nothing to link yet
    for step in (1, 2, 3):
        checkpoints.save(model, {}, step=step)
    (out / "best.new").symlink_to("left by a kill")
    checkpoints.keep_best(2)
    assert names(out) == ["best", "step_000002", "step_000003"]
    assert os.readlink(out / "best") == "step_000002"  # also where the folder moves
    checkpoints.keep_best(None)
    checkpoints.save(model, {}, step=4)
    assert names(out) == ["step_000004"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path, bad):
    checkpoints, model = saving(tmp_path, keep_last=1)
    good = checkpoints.save(model, {}, step=1)
    with torch.no_grad():
        model.layers[1].mlp.w1.weight[0, 0] = bad
    with pytest.raises(CheckpointError, match=r"could not be written: 1 .* layers\.1\.mlp\.w1"):
        checkpoints.save(model, {}, step=2)
    assert names(tmp_path / "out") == ["step_000001"] and checkpoints.newest() == good


def test_what_a_run_was_made_from_is_noted_when_it_begins(tmp_path):
    """A file that is edited before the first checkpoint is another one for a resumed run."""
    checkpoints, model = saving(tmp_path)
    weights = tmp_path / "base" / "model.safetensors"
    expected = f"model.safetensors (sha256 {sha256_of(weights)[:16]})"
    checkpoints.note_config()
    weights.write_bytes(b"edited")
    saved = json.loads((checkpoints.save(model, {}, step=1) / RUN_CONFIG_FILE).read_text())
    assert saved["checkpointer.checkpoint_files.0"] == expected


def test_ranks_that_are_restarted_before_their_run_began_resume_no_earlier_one(tmp_path):
    checkpoints, model = saving(tmp_path)
    checkpoints._cfg.resume_from_checkpoint, checkpoints._cfg.num_steps = False, 9
    saved, out = checkpoints.save(model, {}, step=1), tmp_path / "out"
    assert checkpoints.to_resume(restarted=True) is None
    mark_begun(out, begun=True)
    assert checkpoints.to_resume(restarted=True) == saved
    assert checkpoints.to_resume(restarted=False) is None
    mark_begun(out, begun=False)
    assert checkpoints.to_resume(restarted=True) is None and names(out) == ["step_000001"]


@pytest.mark.parametrize("of_adapters", [None, False, True])
def test_the_size_of_a_checkpoint_is_known_before(tmp_path, of_adapters):
    """Of all weights, of an adapter beside the merged weights, and of the adapter alone."""
    checkpoints, model = saving(tmp_path, adapter_weights_only=bool(of_adapters))
    if of_adapters is not None:
        weights = model.state_dict()
        model = lora_llama3_2(["q_proj"], **TINY, lora_rank=16, lora_alpha=16)
        model.load_state_dict(weights, strict=False)
        set_trainable_params(model, get_adapter_params(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    expected = checkpoints.checkpoint_bytes(model, optimizer)
    model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    written = checkpoints.save(model, state, step=1).rglob("*.[ps][ta]*")  # without texts
    assert sum(path.stat().st_size for path in written) == pytest.approx(expected, rel=0.1)


def save_on_a_full_disk(tmp_path) -> None:
    """Mount a disk of 16 MB in namespaces of this process's own, and save there."""
    out, user, group = tmp_path / "out", f"0 {os.getuid()} 1", f"0 {os.getgid()} 1"
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS):
        sys.exit(REFUSED)
    for name, text in (("setgroups", "deny"), ("uid_map", user), ("gid_map", group)):
        Path("/proc/self", name).write_text(text)
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", out]).returncode:
        sys.exit(REFUSED)
    checkpoints, model = saving(tmp_path)
    state = {"optimizer": torch.zeros(300_000)}
    size = shutil.disk_usage(out).free
    first = checkpoints.save(model, state, step=1)
    size -= shutil.disk_usage(out).free
    no_room = "output_dir=.*: a checkpoint takes about .* MiB are free on its disk"
    for share in (0, 0.2, 0.4, 0.6, 0.8, 0.95):  # of what a checkpoint takes is free
        (out / "ballast").write_bytes(bytes(shutil.disk_usage(out).free - int(share * size)))
        with pytest.raises(CheckpointError, match="2 could not be written: .*No space left on"):
            checkpoints.save(model, state, step=2)
        assert names(out) == ["ballast", "step_000001"] and checkpoints.newest() == first
        with pytest.raises(ValueError, match=no_room):
            checkpoints.check_room(model, torch.optim.AdamW(model.parameters()))
        assert names(out) == ["ballast", "step_000001"]
        (out / "ballast").unlink()
    checkpoints.check_room(model, torch.optim.AdamW(model.parameters()))
    assert checkpoints.save(model, state, step=2).name == "step_000002"


def test_a_full_disk_is_named_and_gets_back_what_was_half_written(tmp_path):
    """A real one of 16 MB, in a namespace; each time, other files are those that do not fit."""
    done = run(__file__, cwd=tmp_path, check=False, PYTHONPATH=os.pathsep.join(sys.path))
    if done.code == REFUSED:
        pytest.skip("no file system of its own is allowed")
    assert done.code == 0, done.err


def test_a_new_run_moves_away_what_it_could_mix_up(tmp_path):
    out = tmp_path / "out"
    cfg = SimpleNamespace(
        output_dir=str(out),
        metric_logger={"log_dir": f"{out}/logs"},
        profiler={"output_dir": f"{out}/logs/profiles"},
    )
    (out / "logs" / "profiles").mkdir(parents=True)
    own = ["my_problems.jsonl", "notes.txt", "step_2", "step_000007_tuned"]  # the user's
    for name in own:
        (out / name).touch()
    set_aside_previous_run(cfg)
    assert names(out) == sorted(["logs", *own])  # no run was here
    for number in (1, 2):
        complete(out, 5)
        (out / "best").symlink_to("step_000005")
        (out / "run.jsonl").write_text(str(number))
        (out / "logs").mkdir(exist_ok=True)
        (out / "torchtune_config.yaml").touch()
        set_aside_previous_run(cfg)
        assert names(out) == sorted(["previous_runs", *own])
        archive = out / "previous_runs" / str(number)
        moved = ["best", "logs", "run.jsonl", "step_000005", "torchtune_config.yaml"]
        assert names(archive) == moved
        assert (archive / "best" / STATE_FILE).is_file()
        assert (archive / "run.jsonl").read_text() == str(number)
        (out / "previous_runs" / "README.txt").touch()  # somebody else's


@pytest.mark.parametrize("folder", ["out", ".", "elsewhere", "out/../elsewhere", "out/missing"])
def test_a_new_run_moves_no_folder_that_is_not_its_own(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    cfg = SimpleNamespace(output_dir="out", metric_logger={"log_dir": folder}, profiler=None)
    for path in ("out/step_000001", "elsewhere"):
        (tmp_path / path).mkdir(parents=True)
    set_aside_previous_run(cfg)
    assert names(tmp_path) == ["elsewhere", "out"] and names(tmp_path / "out") == ["previous_runs"]
    assert names(tmp_path / "out" / "previous_runs" / "1") == ["step_000001"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "best"), [(3, 3), (2, 1)], ids=["a new step and best", "a step once more"]
)
def test_a_save_that_is_killed_anywhere_loses_nothing(tmp_path, step, best, caplog):
    """Before each file operation and amid the weights; two checkpoints are kept."""
    checkpoints, model = saving(tmp_path, keep_last=2)
    out, kept = tmp_path / "out", tmp_path / "kept"
    for number in (1, 2):
        checkpoints.save(model, {"number": number}, step=number)
    checkpoints.keep_best(1)
    out.rename(kept)

    def save() -> None:
        checkpoints.keep_best(best)
        checkpoints.save(model, {"number": 30}, step=step)

    def prepare() -> None:
        shutil.copytree(kept, out, symlinks=True, dirs_exist_ok=True)

    points = kill_points(save, folder=out, prepare=prepare, sizes=(1, 5000, 200_000))
    seen = []
    for where in points:
        newest = checkpoints.newest()  # its sums are right
        last, linked = (torch.load(path / STATE_FILE)["number"] for path in (newest, out / "best"))
        assert last in ((2, 30) if step == 3 else (1, 2, 30)) and linked in (1, last), where
        claim_output_dir(out)
        lock.release(out)
        left = {path.name for path in out.iterdir() if not path.name.startswith("step_")}
        assert left <= {".lock", "best", "best.new"} and checkpoints.newest() == newest, where
        seen.append(linked)
    assert "cannot be used" not in caplog.text, "half a checkpoint was seen"
    assert last == 30 and len(seen) > 10 and {*seen} == {1, 30 if best == 3 else 1}
    assert names(out) == [".lock", "best", *(f"step_{number:06d}" for number in (step - 1, step))]


def test_a_name_that_the_hub_cannot_have_is_none(tmp_path):
    texts = {'{"repo_id": "a/b-1.5"}': "a/b-1.5", '{"repo_id": "a: b"}': None, "{}": None, "": None}
    for text, name in texts.items():
        (tmp_path / "original_repo_id.json").write_text(text)
        assert hub_name(tmp_path) == name


@pytest.mark.parametrize("reused", [False, True])
def test_a_lock_that_other_code_has_closed_is_not_a_deleted_folder(tmp_path, reused):
    """Even if another file has its descriptor now, which is not emptied."""
    other = tmp_path / "other"
    other.write_text("kept")
    lock.claim(tmp_path)
    descriptor = lock._claimed[tmp_path][0].fileno()
    os.close(descriptor)
    if reused:
        with other.open("r+") as file:
            os.dup2(file.fileno(), descriptor)
    with pytest.raises(lock.LostFolderError, match="has closed this process's files"):
        with lock.writing(tmp_path):
            pytest.fail("it writes")
    assert not lock.is_lost(tmp_path)
    lock.release(tmp_path)
    assert other.read_text() == "kept" and tmp_path not in lock.held()


if __name__ == "__main__":
    save_on_a_full_disk(Path.cwd())

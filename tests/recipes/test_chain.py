"""What a run leaves is what the next one starts from."""

import json

import torch
from peft import PeftModel
from runs import run_tiny, tiny_overrides
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LORA, FULL = "llama3_2_1B_lora_grpo", "llama3_2_1B_full_grpo"
QUICK = ["num_steps=1", "dtype=fp32", "eval_dataset=null", "grpo_samples=4", "batch_size=2"]
SPREAD = "rewards=[{_component_: my_rewards.length}]"


def run_on(base, folder, config=LORA, *more):
    """A run in a folder, from the weights that another one has left."""
    folder.mkdir(exist_ok=True)
    (folder / "my_rewards.py").write_text(
        "def length(prompts, completions, **columns):\n"
        "    return [float(len(c) % 7) for c in completions]\n"
    )
    start = []
    if base is not None:
        file = next(base.glob("model-*.safetensors")).name
        start = [f"checkpointer.checkpoint_dir={base}", f"checkpointer.checkpoint_files=[{file}]"]
    sgd = ["optimizer=torch.optim.SGD", "optimizer.lr=0.5", "lr_scheduler=null"]
    if config == LORA:
        sgd.append("optimizer.fused=false")
    run_tiny(config, folder, *QUICK, SPREAD, *sgd, *start, *more)
    return folder / "out" / "step_000001"


def logits(model):
    tokens = torch.arange(40, 60)[None]
    with torch.no_grad():
        return model(tokens).logits


def test_each_run_starts_from_what_the_one_before_has_left(tmp_path):
    """LoRA, LoRA, full and LoRA again; each folder loads in transformers, alone or with PEFT."""
    (tmp_path / "1").mkdir()
    tiny_overrides(LORA, tmp_path / "1")  # makes the base
    (tmp_path / "1/llama/original_repo_id.json").write_text('{"repo_id": "meta-llama/Tiny"}')
    first = run_on(None, tmp_path / "1")
    second = run_on(first, tmp_path / "2")
    third = run_on(second, tmp_path / "3", FULL)
    fourth = run_on(third, tmp_path / "4")
    for base, folder, adapted in (
        (first, second, True),
        (second, third, False),
        (third, fourth, True),
    ):
        assert not (folder / "adapter_config.json").exists()
        assert (folder / "adapter").exists() == adapted
        merged = logits(AutoModelForCausalLM.from_pretrained(folder))
        assert not torch.equal(merged, logits(AutoModelForCausalLM.from_pretrained(base)))
        if adapted:
            model = AutoModelForCausalLM.from_pretrained(base)
            model = PeftModel.from_pretrained(model, folder / "adapter")
            torch.testing.assert_close(logits(model), merged, atol=1e-4, rtol=0)
    bases = [json.loads((f / "adapter/adapter_config.json").read_text()) for f in (first, second)]
    assert [b["base_model_name_or_path"] for b in bases] == ["meta-llama/Tiny", str(first)]
    modes = {oct(path.stat().st_mode) for path in fourth.rglob("*") if path.is_file()}
    assert modes == {oct((fourth / "config.json").stat().st_mode)} != {"0o100600"}
    adapters = [load_file(f / "adapter" / "adapter_model.safetensors") for f in (first, second)]
    assert any(not torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def test_an_adapter_that_would_not_be_read_is_refused(tmp_path):
    done = run_tiny(LORA, tmp_path, "checkpointer.adapter_checkpoint=a.safetensors", check=False)
    assert "Error: checkpointer.adapter_checkpoint=a.safetensors: is not read" in done.err


def test_a_run_that_could_not_save_ends_before_its_first_rollout(tmp_path):
    tiny_overrides(LORA, tmp_path)
    (tmp_path / "llama/tokenizer.json").symlink_to(tmp_path / "deleted")  # as of a cleared cache
    done = run_tiny(LORA, tmp_path, *QUICK, check=False)
    (error,) = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert error.startswith(f"Error: output_dir={tmp_path}/out: a checkpoint, written there on")
    assert "llama/tokenizer.json" in error and "mend checkpointer.checkpoint_dir=" in error
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(".lock", "error.txt", "logs", "torchtune_config.yaml")
    }

"""A bad config fails before anything is loaded, naming key, value and remedy."""

import re
from collections import deque
from itertools import chain
from pathlib import Path

import pytest
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from omegaconf import DictConfig, OmegaConf
from runs import run, tiny_overrides

from torchtune_grpo.config import aliases
from torchtune_grpo.config.check import check_imports, key_paths, parameters, read_config
from torchtune_grpo.config.command_line import config_files, load_config
from torchtune_grpo.config.keys import ENGINES, EnvironmentConfig, GRPOConfig, without_effect
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.run import Run
from torchtune_grpo.training.checks import check_model, check_prompts
from torchtune_grpo.training.policy import empty_model

ROOT = Path(__file__).parents[2]
CONFIG = "llama3_2_1B_lora_grpo"
REAL = ROOT / "benchmarks/real"
OF_BENCHMARKS = [str(path) for path in sorted(REAL.glob("*.yaml")) if path.name != "prompts.yaml"]


def settings_of(*changes: str) -> GRPOConfig:
    return read_config(load_config(CONFIG, changes))


def test_defaults_and_numbers_are_read():
    changes = ["clip_grad_norm=1", "temperature=7e-1", "sampling={top_k: 5, stop_strings: [a]}"]
    settings = settings_of(*changes, "~ppo_epochs")
    assert (settings.ppo_epochs, settings.clip_grad_norm, settings.temperature) == (1, 1.0, 0.7)
    params = settings.sampling_params
    assert (params.max_generated_tokens, params.temperature) == (512, 0.7)
    assert (params.top_k, params.top_p, params.stop_strings) == (5, None, ("a",))
    assert settings.eval_sampling_params == params
    cooler = "evaluation.sampling={temperature: 0.6, top_k: null}"
    own = settings_of(*changes, cooler, "evaluation.samples=2")
    assert own.sampling_params == params
    assert own.eval_sampling_params == params.replace(temperature=0.6, top_k=None)
    assert settings.rollout.max_rows is None  # as many as memory allows
    assert settings_of("eval_dataset=null").eval_dataset is None
    assert settings_of("forward_batch_size=5").forward_batch_size == 5  # a bound, no divisor
    assert settings.tokenizer.path == "/tmp/Llama-3.2-1B-Instruct/original/tokenizer.model"


NO_ARGUMENTS = "torchtune.models.qwen2_5.qwen2_5_0_5b"
BAD = [
    ("grpo_sample=8", "grpo_sample=8: unknown config key", "Did you mean grpo_samples?"),
    ("kl_coeff=0.1", "kl_coeff=0.1: unknown config key", "Did you mean loss.kl_coeff?"),
    ("model.lora_rnk=4", "model.lora_rnk=4", "Did you mean model.lora_rank?"),
    ("grpo_samples=2.5", "grpo_samples=2.5", "a valid integer"),
    ("temperature=0", "temperature=0", "greater than or equal to 0.000001"),
    ("temperature=.nan", "temperature=", "finite"),
    ("device=gpu", "device='gpu'", "give cpu or cuda"),
    ("dtype=fp16", "dtype='fp16'", "'bf16', 'fp32' or 'auto'"),
    ("sampling.stop_strings=['']", "sampling.stop_strings.0=''", "at least 1 character"),
    ("sampling.min_new_tokens=600", "min_new_tokens=600", "512"),
    ("evaluation.keep_best=accuracy", "evaluation.keep_best='accuracy'", "eval/"),
    ("evaluation=5", "evaluation=5: evaluation is a section", "evaluation.every_n_steps"),
    ("evaluation.sampling.top_p=2", "evaluation.sampling.top_p=2: should be less than", "to 1."),
    ("evaluation.stop_at=0.9 eval_dataset=null", "evaluation.stop_at=0.9", "set eval_"),
    ("forward_token_budget=2000", "forward_token_budget=2000", "forward_batch_size (auto"),
    ("num_minibatches=3", "num_minibatches=3", "give a divisor"),
    ("output_dir=/tmp/Llama-3.2-1B-Instruct", "output_dir=", "another folder"),
    ("output_dir=o checkpointer.checkpoint_dir=o/step_2", "checkpoint_dir=o/step_2", "another out"),
    ("checkpointer.adapter_checkpoint=a", "adapter_checkpoint=a: is not read", "merge the adapter"),
    ("adapter_dir=sft", "adapter_dir=sft: unknown", "merge the adapter into its base"),
    ("optimizer=torch.optim.AdamX", "optimizer._component_=torch.optim.AdamX", "torch.optim.Ada"),
    ("optimizer=AdamW", "AdamW: not an import path", "mean torch.optim.AdamW?"),
    ("metric_logger=wandb", "metric_logger._component_=wandb", "metric_logging.WandBLogger?"),
    ("sampler=no.Such", "sampler._component_=no.Such: cannot be imported", "No module named"),
    ("prepare=torchtune_grpo.tiny.prepare", "cannot be imported", "torchtune_grpo.models.tiny."),
    ("eval_dataset=gsm8k", "eval_dataset._component_=gsm8k", "torchtune_grpo.data.gsm8k_dataset?"),
    ("loss=DAPO", "loss=DAPO: ", "give algorithm=dapo."),
    ("optimizer.lr=0", "optimizer.lr=0: no weight would", "set it above 0."),
    ("~loss._component_", "loss", "_component_"),
    ("tools=my.tool", "tools='my.tool'", "a valid list"),
    ("dataset.name=??? eval_dataset.name=${dataset.name}", "dataset.name: missing", "me=<value>."),
    ("model.lora_rank=x", "model.lora_rank='x'", "a valid integer"),
    ("model.lora_attn_modules=[q_prj]", "model.lora_attn_modules=['q_prj']", "'q_proj'"),
    (f"~model model._component_={NO_ARGUMENTS} model.rank=1", "model.rank=1", "takes none"),
    ("metric_logger.log_di=1", "metric_logger.log_di=1", "Did you mean metric_logger.log_dir?"),
    ("rollout.engine=nativ", "rollout.engine._component_=nativ: not a", "Did you mean native?"),
    ("rollout.engine.cuda_graph=never", "graph=never", "mean rollout.engine.cuda_graphs?"),
    ("rollout.engine.cuda_graphs=on", "rollout.engine.cuda_graphs=True", "'auto' or 'never'"),
    ("rollout.engine=vllm rollout.engine.cuda_graphs=never", "graphs=never", "It takes contex"),
    ("rollout.cuda_graphs=never", "unknown config key", "Did you mean rollout.engine.cuda_graphs?"),
    ("environment.form=inline", "environment.form=inline", "set sampling.stop_strings"),
    ("environment.max_response_tokens=9", "max_response_tokens=9", "give at least that"),
    ("sampling.forced_answer.text=x", "forced_answer.text=x: unknown config key", "lists the keys"),
    ("dynamic_sampling.max_resamples=1001", "max_resamples=1001", "less than or equal to 1000"),
    # Names of other libraries
    ("num_generations=8", "num_generations=8: unknown config key", "mean grpo_samples? "),
    ("data.train_files=x", "data.train_files=x: unknown", "Did you mean dataset.source? "),
    ("actor_rollout_ref.actor.optim.lr=1", "optim.lr=1: unknown", "Did you mean optimizer.lr? "),
    ("data={}", "data={}: unknown config key. ", ""),
    ("loss.beta=0", "loss.beta=0", "Did you mean loss.kl_coeff? It takes kl_coeff, "),
    ("dataset.max_prompt_length=9", "_length=9", "mean dataset.max_prompt_tokens (longer prompts"),
]


@pytest.mark.parametrize(("changes", "named", "remedy"), BAD, ids=lambda x: str(x)[:40])
def test_bad_value_names_key_value_and_remedy(changes, named, remedy):
    with pytest.raises(ValueError) as error:
        settings_of(*changes.split())
    (line,) = str(error.value).splitlines()
    assert named in line and remedy in line


NOT_OF_THE_MODEL = [
    ("model.num_layers=3", "num_hidden_layers=3, but config.json.*says 2"),
    ("model.num_heads=3", "model: could not construct .*num_heads': 3"),
    ("model.lora_attn_modules=[]", "model: could not construct"),
    ("checkpointer.model_type=QWEN2", "checkpointer.model_type=QWEN2.*says llama"),
    ("optimizer.betas=[0.9,1.5]", r"optimizer: could not construct .*betas.*1.5"),
    ("checkpointer.checkpoint_dir=/no/such", "checkpoint_dir=/no/such: .*exist; `tune download"),
    ("checkpointer.checkpoint_files=[no_such]", "checkpointer: could not construct .*no_such"),
    ("tokenizer.path=/no/such", "^tokenizer.path=/no/such: no such file; `tune download"),
    ("optimizer=torch.optim.LBFGS", "optimizer._component_=torch.optim.LBFGS: .*a step: .*closure"),
    ("optimizer=torch.optim.SparseAdam", "cannot take a step: .*dense gradients"),
    ("optimizer.fused=false optimizer.capturable=true", "a step: .*capturable.*other arguments"),
]


@pytest.mark.parametrize(("change", "message"), NOT_OF_THE_MODEL, ids=lambda x: x[:40])
def test_what_does_not_fit_the_checkpoint_is_named(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_model(tiny(tmp_path, *change.split()))


def test_layers_that_a_run_replaces_are_no_mistake(tmp_path):
    """torchtune's DoRA, as the check has it, is nothing that the native engine knows."""
    check_model(tiny(tmp_path, "model.use_dora=true"))


def tiny(folder, *changes):
    return settings_of(*tiny_overrides(CONFIG, folder), *changes)


@pytest.mark.parametrize(
    ("changes", "response", "said"),
    [
        ([], 512, "max_generated_tokens=512"),
        (["environment.max_response_tokens=600"], 600, "environment.max_response_tokens=600"),
    ],
)
def test_prompts_and_responses_must_fit_the_context(changes, response, said):
    """Llama 3.2's context is read off the builder."""
    settings, longest = settings_of(*changes), 131_072 - response
    model = empty_model(settings)
    check_prompts(settings, "eval_dataset", [[0] * longest], model=model)
    with pytest.raises(ValueError, match=f"{said}.*eval_dataset, {longest + 1} tokens.*131072"):
        check_prompts(settings, "eval_dataset", [[0] * (longest + 1)], model=model)


def test_a_mistake_elsewhere_makes_none_of_an_environments_own_keys():
    environment = ["environment._component_=torchtune_grpo.environments.examples.GuessNumber"]
    with pytest.raises(ConfigError) as error:
        settings_of(*environment, "environment.max_turns=3", "batch_size=0")
    assert [problem.partition("=")[0] for problem in error.value.problems] == ["batch_size"]


@pytest.mark.parametrize("null", ["environment=null", "~environment"])
def test_a_run_may_leave_out_its_configs_environment(null):
    settings = settings_of("environment=my.Game", null)
    assert not settings.has_environment and settings.environment == EnvironmentConfig()
    assert settings_of("environment=null", "environment.max_turns=3").environment.max_turns == 3


def test_a_component_may_be_its_path_alone():
    """A reward keeps all arguments of the one before."""
    rewards = "rewards.0=torchtune_grpo.rewards.format_reward"
    settings = settings_of("sampler=torchtune_grpo.data.ShuffledSampler", rewards)
    assert settings.sampler == {"_component_": "torchtune_grpo.data.ShuffledSampler"}
    assert settings.rewards[0].name == "correctness"


WITHOUT_EFFECT = [
    ("objective.correction_cap=3.0", "objective.correction_cap: nothing is capped"),
    ("evaluation.stop_at=1 evaluation.every_n_steps=null", "stop_at: .*set evaluation.every_n"),
    ("evaluation.samples=0 evaluation.sampling.top_k=5", "evaluation.sampling: set"),
    ("evaluation.samples=0 evaluation.sampling.repetition_penalty=1.1", None),
    ("loss.dual_clip=3.0 loss.epsilon_low=0.1", "loss.epsilon_low, loss.dual_clip: with"),
    ("objective.sampling_correction=token_mask objective.correction_cap=3.0", None),
    ("loss.dual_clip=3.0 objective.sampling_correction=old_logprobs", None),
]


@pytest.mark.parametrize(("changes", "sentence"), WITHOUT_EFFECT, ids=lambda x: str(x)[:40])
def test_settings_without_effect_are_named(changes, sentence, caplog):
    settings_of(*changes.split())
    assert len(caplog.messages) == (sentence is not None)
    assert sentence is None or re.search(sentence, caplog.messages[0])


@pytest.mark.parametrize("name", [*config_files(), *OF_BENCHMARKS])
def test_shipped_configs_are_valid_and_use_what_is_shipped(name):
    cfg = load_config(name)
    if OmegaConf.is_missing(cfg, "model_dir"):
        cfg.model_dir = "/tmp/model"
    assert list(without_effect(read_config(cfg))) == []


def mistakes_in(cfg):
    try:
        return Run(cfg).check()[0]
    except ConfigError as error:
        return error.problems


def test_the_folder_of_a_model_is_asked_for_by_its_key(tmp_path):
    """One line, which names ``model_dir`` and not the nodes that have it from there."""

    def mistakes(*overrides):
        return mistakes_in(load_config("hf_lora_grpo", ["device=cpu", *overrides]))

    (problem,) = mistakes()
    assert problem.startswith("model_dir: missing from the config; give model_dir=<value>.")
    none, empty = tmp_path / "none", tmp_path / "empty"
    problem, *_ = mistakes(f"model_dir={none}")  # the others are of data that are not here
    assert problem.startswith(f"model_dir={none}: {none} does not exist; `tune download <model> ")
    empty.mkdir()
    problem, *_ = mistakes(f"model_dir={empty}")
    assert problem.startswith(f"model_dir={empty}: {empty}/config.json does not exist; `tune d")
    (empty / "small.gguf").touch()
    problem, *_ = mistakes(f"model_dir={empty}/small.gguf")
    said = f"small.gguf/config.json does not exist; give {empty}, the folder of the GGUF."
    assert problem.endswith(said)
    _, notes = Run(load_config("hf_lora_grpo", ["device=cpu", f"model_dir={empty}"])).check()
    said = f"model_dir={empty}: its GGUF is converted when a run starts, and not checked yet."
    assert notes == [said]


@pytest.fixture
def mistakes_with_data(tmp_path):
    """Finds the mistakes of a config with eight rows, which a model of 350 tokens answers."""
    folder = write_tokenizer(hf_folder("qwen3", tmp_path / "model", vocab_size=350), "qwen3")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?"}\n' * 8)

    def mistakes(sampler=None, **dataset):
        node = {"_component_": "torchtune_grpo.data.RLDataset", "source": str(rows), **dataset}
        cfg = load_config("hf_lora_grpo", ["device=cpu", f"model_dir={folder}"])
        cfg |= {"dataset": node, "eval_dataset": None, "sampler": sampler}
        cfg |= {"output_dir": str(tmp_path / "out"), "max_generated_tokens": 8}
        cfg.rewards = [{"_component_": "torchtune_grpo.rewards.math_format_reward"}]
        return mistakes_in(cfg)

    return mistakes


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(mistakes_with_data):
    """By the tokens that prompts have; those that none has do no harm."""
    assert mistakes_with_data() == []
    (problem,) = mistakes_with_data(prefill="</think>")
    assert problem.startswith("tokenizer: prompts of dataset have the token 350, but the ")


class NoConstructor:
    pass


class Constructor:
    def __init__(self) -> None:
        from .no_such_module import Client

        self.client = Client()


class NotInstalled:
    def __init__(self) -> None:
        import no_such_module

        self.client = no_such_module.Client()


def test_only_a_loggers_packages_must_be_installed():
    for of_user in (NoConstructor, Constructor):
        check_imports(
            "metric_logger", DictConfig({"_component_": f"{__name__}.{of_user.__name__}"})
        )
    with pytest.raises(ConfigError, match="needs no_such_module; pip install no_such_module."):
        check_imports("metric_logger", DictConfig({"_component_": f"{__name__}.NotInstalled"}))


def test_paths_may_begin_with_the_users_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = load_config("hf_lora_grpo", ["output_dir=~/out", "model_dir=~/model"])
    settings = read_config(cfg)
    assert settings.output_dir == cfg.output_dir == "/home/me/out"
    assert settings.checkpointer.checkpoint_dir == "/home/me/model"


class Recent(ShuffledSampler):
    """Remembers the last pass rates, as a user's class may."""

    def learn(self, rows, pass_rates):
        super().learn(rows, pass_rates)
        self._recent = deque(pass_rates)


def test_a_sampler_whose_state_could_not_be_read_back_is_refused(mistakes_with_data):
    """Although it only gets that state by its first step."""
    (problem,) = mistakes_with_data({"_component_": f"{__name__}.Recent"})
    assert problem.startswith("sampler: its state_dict() cannot be saved")
    assert "(collections.deque); give" in problem


def first_cells(text):
    return re.findall(r"^\| `([\w.]+)` \|", text, re.M)


def test_the_printed_keys_are_those_of_the_code_and_name_pages_that_there_are(tmp_path):
    """At most 44 keys at the top; the README shows some of them."""
    page = run("-m", "torchtune_grpo", "config", cwd=tmp_path).out
    assert first_cells(page) == [path for path, _ in key_paths(GRPOConfig)]
    for name in re.findall(r"docs/\w+\.md", page + aliases.markdown()):
        assert (ROOT / name).is_file(), name
    top = [key for key in first_cells(page) if "." not in key]
    shown = first_cells((ROOT / "README.md").read_text().partition("| File |")[0])
    assert len(top) <= 44 and len(shown) == 7 and set(shown) <= {*top}


def known_keys():
    """Ours, with the arguments of a config's components."""
    nodes = load_config("hf_lora_grpo", ["model_dir=m"]).items()
    nodes = ((k, n) for k, n in nodes if isinstance(n, DictConfig) and "_component_" in n)
    arguments = {f"{k}.{name}" for k, n in nodes for name in parameters(n._component_) or ()}
    return {path for path, _ in key_paths(GRPOConfig)} | arguments


def key_of(text):
    return text.partition(" (")[0].replace("rewards.0.", "rewards.")


def test_names_of_other_libraries_lead_to_keys_that_there_are(tmp_path):
    """All are printed; no name of ours is among them, and none is there twice."""
    page = run("-m", "torchtune_grpo", "config", "--coming-from", cwd=tmp_path).out
    ours = known_keys() | {"rewards.weight"}
    ours |= {f"rollout.engine.{name}" for name in parameters(f"{ENGINES}.native")}
    assert {*map(key_of, aliases.KEYS)} <= ours
    names = [*chain(*aliases.KEYS.values(), *aliases.NO_KEY.values())]
    assert len({*names}) == len(names) and all(f"`{name}`" in page for name in names)
    assert not {*ours, *(key.replace(".", "_") for key in ours)} & {*names}  # GRPO has underscores


GEMMA2 = {"_component_": "torchtune.models.gemma2.gemma2", "intermediate_dim": 64}
GEMMA2 |= {"num_kv_heads": 2}
T5 = {"_component_": "torchtune.models.t5._component_builders.t5_encoder", "mlp_dim": 8}
T5 |= {"rel_pos_num_buckets": 8, "rel_pos_max_dist": 16, "norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (GEMMA2, "model._component_=torchtune.models.gemma2.gemma2: .*set it to .*hf_model"),
        (T5, "makes a T5Encoder; only text models"),
    ],
)
def test_a_model_that_torchtune_computes_otherwise_is_refused(tmp_path, node, message):
    """transformers' Gemma 2 with the same weights gives logits that are 3 away."""
    shape = {"embed_dim": 32, "num_layers": 1, "num_heads": 4, "head_dim": 8}
    model = OmegaConf.create({**node, **shape, "max_seq_len": 128, "vocab_size": 64})
    with pytest.raises(ValueError, match=message):
        check_model(tiny(tmp_path).replace(model=model))

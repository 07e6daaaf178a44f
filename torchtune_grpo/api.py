"""The recipe from Python: ``from torchtune_grpo import GRPO``; docs/python.md shows it."""

from __future__ import annotations

import atexit
import html
import importlib
import math
import os
import signal
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write
from torchtune import utils

from torchtune_grpo.checkpoint.folder import checkpoint_folder, claim_output_dir
from torchtune_grpo.checkpoint.model_card import ModelCard
from torchtune_grpo.config.command_line import do_without_data, load_config, set_key
from torchtune_grpo.config.text import ConfigError, noted, shortened, suggest
from torchtune_grpo.data.load import as_sequence
from torchtune_grpo.machine import lock, parallel
from torchtune_grpo.machine.interrupt import Interrupted
from torchtune_grpo.monitor.record import metrics_of, read_metrics
from torchtune_grpo.plan import lines, make_plan
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe
from torchtune_grpo.run import Run

log = utils.get_logger("INFO")
RLDATASET = "torchtune_grpo.data.RLDataset"
DEFAULT = "hf_lora_grpo"
_PUSH = " `torchtune-grpo push OUTPUT_DIR NAME` uploads a checkpoint."
_ROWS = {"dataset": "data", "eval_dataset": "eval_data"}  # key -> argument for its rows


class GRPO(AbstractContextManager["GRPO"]):
    """A run of the recipe, with the same config and the same checks.

    Args:
        config: name of a shipped config to start from, or a file.
        data: prompts to train on: a list of dicts with ``prompt`` and what rewards need, a
            ``datasets.Dataset``, a pandas DataFrame, the path of a file or a name on the hub.
            None: the config's; with a checkpoint as ``model_dir`` and no ``config``, none, only
            answers to prompts written as in its training.
        eval_data: held-out prompts, of the same kinds, read like ``data``. None with ``data``: no
            evaluation during the run.
        rewards: functions, classes, ``(function, weight)`` pairs, dotpaths, or nodes of a config.
            None: the config's.
        environment: a class, a node ``{"_component_": Class, "max_turns": 4}``, or several by name.
        tools: functions that the policy may call; docs/environments.md.
        **keys: keys of the config: ``num_steps=100``, ``loss={"kl_coeff": 0.0}`` or
            ``**{"loss.kl_coeff": 0.0}``; a class or function for a component; ``algorithm="dapo"``.

    Raises:
        ConfigError: with all mistakes.
    """

    _open: weakref.WeakValueDictionary[Path, GRPO] = weakref.WeakValueDictionary()

    def __init__(
        self,
        config: str | Path = DEFAULT,
        *,
        data: Any = None,
        eval_data: Any = None,
        rewards: Sequence[Any] | None = None,
        environment: Any = None,
        tools: Sequence[Any] | None = None,
        **keys: Any,
    ) -> None:
        algorithm = keys.pop("algorithm", None)
        self.config = load_config(str(config), [f"algorithm={algorithm}"] if algorithm else [])
        self._objects: dict[str, Any] = {}  # what no config can name, by key
        self._run: Run | None = None  # that of the recipe, if there is one
        self._recipe: GRPOFullFinetuneRecipe | None = None
        self._is_open = False
        sections = {name.partition(".")[0] for name in keys}
        is_bare = config == DEFAULT and data is None and "dataset" not in sections
        card = ModelCard.found(keys.get("model_dir")) if is_bare else None
        self._only_answers = card is not None  # of a checkpoint, asked as in its training
        if card is not None:
            self.config.dataset = {"_component_": RLDATASET, **card.asked}
            self.config.eval_dataset = None
        if data is not None:
            self._set_data("dataset", data)
            self.config.eval_dataset = None  # it is of another task
        for name, value in keys.items():
            self._set_key(name, value)
        if self._only_answers:
            do_without_data(self.config)
        if eval_data is not None:
            of_rows = ("source", "rows", "split", "data_files", "num_samples")
            form = {k: v for k, v in self.config.dataset.items() if k not in of_rows}
            self.config.eval_dataset = OmegaConf.merge(form, self.config.eval_dataset or {})
            self._set_data("eval_dataset", eval_data)
        if rewards is not None:
            self._set_rewards(rewards)
        if environment is not None:
            self._set_environment(environment)
        if tools is not None:
            self._set_tools(tools)
        folder = os.path.expanduser(str(self.config.get("output_dir") or ""))
        self._folder = Path(folder).resolve()
        self.config.output_dir = str(self._folder)
        self._check()
        OmegaConf.set_readonly(self.config, True)  # a change would have no effect
        self._take_folder()

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name.startswith("_") or name == "config"):
            raise AttributeError(
                f"{name}={value}: the keys of a run are set when it is made, GRPO(..., {name}="
                f"{value}); with resume_from_checkpoint=True it goes on in the same output_dir."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        known = [each for each in dir(GRPO) if not each.startswith("_")]
        hint = _PUSH if name in ("push", "push_to_hub") else suggest(name, known)
        raise AttributeError(f"GRPO has no {name!r}.{hint}")

    def _set_key(self, name: str, value: Any) -> None:
        """Set a key of the config, or several of a section."""
        if name in _ROWS and not (isinstance(value, (Mapping, str, type(None))) or callable(value)):
            raise _refusal(name, value, f"give rows as {_ROWS[name]}")
        if name == "model_dir" and not isinstance(value, (str, Path)):
            remedy = "give the path of the model's folder; model.save_pretrained(folder) writes one"
            raise _refusal(name, value, remedy)
        set_key(self.config, name, _plain(value))

    def _set_data(self, key: str, data: Any) -> None:
        """Name a source in the config, or keep rows that are in memory."""
        if OmegaConf.select(self.config, f"{key}._component_") != RLDATASET:
            self.config[key] = {"_component_": RLDATASET}
        if isinstance(data, Mapping) and "_component_" in data:
            self.config[key] = _plain(data)
        elif isinstance(data, (str, Path)):
            self.config[key].source = str(data)
        elif not isinstance(data, Iterable):
            raise _refusal(_ROWS[key], data, "give rows, a file or a name on the hub")
        else:
            self._objects[key] = data

    def _set_rewards(self, rewards: Sequence[Any]) -> None:
        """Name the rewards in the config, and keep those that cannot be imported."""
        if isinstance(rewards, str) or not isinstance(rewards, Sequence):
            raise _refusal("rewards", rewards, "give a list, such as [(function, weight)]")
        nodes: list[Any] = []
        for number, reward in enumerate(rewards):
            if isinstance(reward, tuple) and len(reward) != 2:
                node = "{'_component_': f, 'weight': 0.5, 'name': 'n'}"
                remedy = f"give (function, weight), or a node, as in {node}"
                raise _refusal(f"rewards[{number}]", reward, remedy)
            function, weight = reward if isinstance(reward, tuple) else (reward, 1.0)
            if not isinstance(function, Mapping):
                if not (callable(function) or isinstance(function, str)):
                    kinds = "functions, (function, weight) pairs, dotpaths or nodes of a config"
                    raise _refusal(f"rewards[{number}]", function, f"not a reward; give {kinds}")
                function = {"_component_": self._path(f"rewards.{number}", function)}
            nodes.append(_plain({"weight": weight, **function}))
        self.config.rewards = nodes

    def _set_tools(self, tools: Sequence[Any]) -> None:
        if callable(tools):
            raise _refusal("tools", tools, "give a list, as in tools=[f]")
        for number, tool in enumerate(tools):
            if not (isinstance(tool, str) or hasattr(tool, "__name__")):
                remedy = "give a function; of a tool of another library, the function that it wraps"
                raise _refusal(f"tools[{number}]", tool, remedy)
        self.config.tools = [self._path(f"tools.{n}", tool) for n, tool in enumerate(tools)]

    def _set_environment(self, given: Any) -> None:
        """Name environments in the config, and keep those that cannot be imported."""
        if not (callable(given) or isinstance(given, (str, Mapping))):
            raise _refusal("environment", given, "give the class, not an object of it")
        if not isinstance(given, Mapping):
            given = {"_component_": given}
        node = {}
        for name, value in given.items():
            key = "environment" if name == "_component_" else f"environment.{name}"
            node[name] = self._path(key, value) if callable(value) else _plain(value)
        set_key(self.config, "environment", node)

    def _path(self, key: str, component: Any) -> str:
        """Return the dotpath of a class or function; keep one that cannot be imported."""
        path = _dotpath(component) if callable(component) else str(component)
        if path is None:
            self._objects[key] = component
            kind = component if hasattr(component, "__name__") else type(component)
            path = f"{kind.__module__}.{kind.__name__}"
        return path

    def _check(self) -> None:
        """Raise a ConfigError with all mistakes in the config."""
        for key in ("dataset", "eval_dataset"):
            rows = self._objects.get(key)
            if rows is not None and not hasattr(rows, "__len__"):  # a generator can be read once
                self._objects[key] = as_sequence(rows, self.config[key].get("num_samples"))
        problems: list[str] = []
        with noted(problems):
            self._run = Run(self.config, objects=self._objects)
            found, remarks = self._run.check()
            problems += [*found, *(r for r in remarks if r.startswith("device="))]
        if problems or "RANK" in os.environ:  # ranks have to agree on what is left out
            self._drop()
        if problems:
            raise ConfigError(*problems)

    def _take_folder(self) -> None:
        """Claim ``output_dir`` and write the config there; end the run that had it before."""
        before = GRPO._open.get(self._folder)
        if before is not None:
            before._drop()
            before._is_open = False
        GRPO._open[self._folder], self._is_open = self, True
        if os.environ.get("RANK", "0") != "0":
            return
        claim_output_dir(self._folder)
        file = self._folder / "config.yaml"
        text = f"# tune run grpo_full_finetune_single_device --config {file}\n"
        if self._objects:
            remark = f"its {', '.join(self._objects)} exist only in this script."
            log.warning(f"`tune run` cannot repeat this run: {remark}")
            text += f"# But {remark}\n"
        file.write_text(f"{text}{OmegaConf.to_yaml(self.config)}", encoding="utf-8")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics that were logged so far, a dict for each step and each evaluation."""
        return read_metrics(self._folder)

    def plan(self) -> dict[str, Any]:
        """Print whether it will learn, its time and memory, and return the numbers: docs/plan.md.

        Call it before the first step; it changes nothing about the run.
        """
        self._check_has_data()
        if self._recipe is not None:
            raise RuntimeError("Call plan() before train(), or make a new GRPO.")
        plan = make_plan(self.config, self._objects)
        print("\n".join(lines(plan)))
        return asdict(plan)

    def train(self) -> Path:
        """Train, or go on training, up to ``num_steps``; return the last checkpoint.

        Ctrl-C saves a checkpoint and raises a KeyboardInterrupt; another call goes on.
        """
        self._check_has_data()
        recipe = self._set_up()
        run = recipe.run
        if recipe.steps.is_over:
            log.warning(
                f"train: all num_steps={run.cfg.num_steps} are done, or an evaluation ended the "
                "run. To go on, make a GRPO with more num_steps and resume_from_checkpoint=True."
            )
        try:
            recipe.train()
        except BaseException:  # perhaps in the middle of a step, half of which is in memory
            with read_write(self.config):
                if run.checkpoints.last_step > 0:
                    self.config.resume_from_checkpoint = True
            self._drop()
            raise
        code = run.interrupts.exit_code
        if code == 128 + signal.SIGINT:
            raise Interrupted(f"after step {recipe.steps.done}; train() goes on from there")
        if code:
            raise SystemExit(code)
        return checkpoint_folder(self._folder, run.checkpoints.last_step)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Measure the current policy on ``eval_data``, or on rows or a file like ``data``.

        docs/reading_a_run.md names the numbers.
        """
        recipe = self._set_up()
        run = recipe.run
        evaluator = run.evaluator
        if data is not None:
            source = {"source": str(data)} if isinstance(data, (str, Path)) else {"rows": data}
            dataset = run.dataset.alike(**source)
            run.check_dataset(dataset, "data")
            evaluator = run.make_evaluator(dataset, run.cfg)
        if evaluator is None:
            raise ValueError("evaluate: the run has no eval_data; give rows.")
        recipe.model.eval()
        evaluation = evaluator(recipe.parts.engine, state=recipe.steps.trainer_state)
        return metrics_of(evaluation.record)

    def generate(
        self,
        prompts: Any,
        *,
        num_samples: int = 1,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Any:
        """Answer a prompt, or several, encoded like those of the training data.

        A prompt is a text, or a list of messages ``{"role": ..., "content": ...}``. A temperature
        of 0 is greedy, and the same seed gives the same answers; None takes the config's.

        Returns ``num_samples`` texts with the prefill in front, as rewards see them, or a list of
        such lists for several prompts.
        """
        is_one = isinstance(prompts, str)
        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts={prompts}: give a text, a list of messages, or several.")
        asked = [prompts] if is_one else list(prompts)
        if asked and isinstance(asked[0], Mapping):  # messages
            asked, is_one = [asked], True
        if not asked or num_samples < 1:
            raise ValueError(f"prompts={asked}, num_samples={num_samples}: give at least one.")
        recipe = self._set_up()
        run = recipe.run
        items = run.items_of(asked)
        params = run.cfg.sampling_params
        if temperature is not None:
            if not 0 <= temperature < math.inf:
                raise ValueError(f"temperature={temperature}: give 0 or more.")
            params = params.replace(temperature=temperature) if temperature else params.greedy
        recipe.model.eval()
        rows = run.answer(
            recipe.parts.engine,
            items,
            group_size=num_samples,
            params=params,
            seed=run.cfg.seed if seed is None else seed,
        )
        starts = range(0, rows.num_rows, num_samples)
        texts = [[*map(str, rows.completions[i : i + num_samples])] for i in starts]
        return texts[0] if is_one else texts

    def close(self) -> None:
        """End reward processes, free the model, and let other runs use ``output_dir``."""
        self._drop()
        if self._is_open:
            lock.release(self._folder)
        self._is_open = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        step = self._recipe.steps.done if self._recipe else 0
        state = f"step {step} of {self.config.num_steps}" if self._is_open else "closed"
        return f"GRPO(output_dir={str(self._folder)!r}, {state})"

    def _repr_html_(self) -> str | None:
        """Show the run's page in a notebook, as soon as there is one."""
        page = self._folder / "run.html"
        text = html.escape(page.read_text(encoding="utf-8")) if page.exists() else None
        return text and f'<iframe srcdoc="{text}" width="100%" height="700"></iframe>'

    def _check_has_data(self) -> None:
        if self._only_answers:
            raise ValueError(f"model_dir={self.config.model_dir}: to train it, give data.")

    def _set_up(self) -> GRPOFullFinetuneRecipe:
        if not self._is_open:
            raise RuntimeError(
                f"This run is closed, or another has begun in {self._folder}; make a new GRPO."
            )
        if self._recipe is None:
            atexit.register(parallel.end_process_group)
            run = self._run = self._run or Run(self.config, objects=self._objects)
            recipe = GRPOFullFinetuneRecipe(run.given, run=run)
            recipe.setup(run.given)
            if "RANK" not in os.environ:
                run.interrupts.leave = signal.default_int_handler  # ends the call, not the process
            self._recipe = recipe
        return self._recipe

    def _drop(self) -> None:
        """End the recipe; the ranks stay together for the next one."""
        run, self._run, self._recipe = self._run, None, None
        if run is not None:
            run.close()


def _refusal(key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{key}={shortened(repr(value))}: {remedy}.")


def _plain(value: Any) -> Any:
    """Turn a value into what a config holds: classes and functions become dotpaths."""
    if isinstance(value, DictConfig):
        return OmegaConf.to_container(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    if callable(value):
        return _dotpath(value) or shortened(repr(value))
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _dotpath(component: Any) -> str | None:
    """Return a dotpath by which other processes can import a class or function, if there is one."""
    module, name = getattr(component, "__module__", None), getattr(component, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    with suppress(ImportError):  # its module was made by exec, or loaded without being registered
        if getattr(importlib.import_module(module), name, None) is component:
            return f"{module}.{name}"
    return None

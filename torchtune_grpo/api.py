"""The recipe from Python: ``from torchtune_grpo import GRPO``; docs/python.md shows it."""

from __future__ import annotations

import atexit
import os
import re
import signal
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import utils

from torchtune_grpo._api_config import Arguments, Row, data_node, rows_of, write_rows
from torchtune_grpo._api_rewards import GivenReward, own_folder, reward_nodes
from torchtune_grpo.checkpoint import claim_output_dir, release_output_dir
from torchtune_grpo.cli.config import check_config
from torchtune_grpo.cli.sample import items_of
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.errors import ConfigError, Problems, problems_in
from torchtune_grpo.config.files import extend_import_path
from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.evaluation.evaluator import Evaluator
from torchtune_grpo.machine import parallel
from torchtune_grpo.machine.device import find_device
from torchtune_grpo.machine.interrupt import Interrupted
from torchtune_grpo.monitor.jsonl import read_jsonl
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe
from torchtune_grpo.rollout import roll_out
from torchtune_grpo.training.policy_checks import check_prompts

log = utils.get_logger("INFO")

_HEADER = """\
# Written by torchtune_grpo.GRPO. The same run:
#   tune run grpo_full_finetune_single_device --config {file}
"""


@dataclass
class _Held:
    """What an open run holds, apart from it, so that it is freed when the run is forgotten."""

    folder: Path
    recipe: GRPOFullFinetuneRecipe | None = None

    def drop(self) -> None:
        """Ends the recipe."""
        recipe, self.recipe = self.recipe, None
        if recipe is not None:  # the ranks stay together for the next one
            recipe._rewards.close()
            recipe._observer.close()

    def close(self) -> None:
        """Ends all."""
        self.drop()
        release_output_dir(self.folder)


class GRPO:
    """A run of the recipe, with the same config and the same checks.

    The config goes to ``output_dir/config.yaml``, and rows and rewards that are given as Python
    objects to files beside it, so that ``tune run`` can do the same run.

    Args:
        config (str): name of a shipped config to start from, or a file.
        data (Any): prompts to train on: a list of dicts with ``prompt`` and what rewards need, a
            ``datasets.Dataset``, the path of a file or of a saved data set, a name on the hub, or a
            node of a config with ``_component_``. None leaves the config's.
        eval_data (Any): held-out prompts, of the same kinds; None with ``data`` means none.
        rewards (Sequence[Any] | None): functions, classes, ``(function, weight)`` pairs, dotpaths,
            or nodes of a config. None leaves the config's.
        **keys: keys of the config: ``num_steps=100``; below a node ``loss_kl_coeff=0.0`` or
            ``loss={"kl_coeff": 0.0}``; a class or function is named by its dotpath.

    Raises:
        ConfigError: all that is wrong, with names as they were given.
    """

    _open: weakref.WeakValueDictionary[Path, GRPO] = weakref.WeakValueDictionary()

    def __init__(
        self,
        *,
        config: str = "hf_lora_grpo",
        data: Any = None,
        eval_data: Any = None,
        rewards: Sequence[Any] | None = None,
        **keys: Any,
    ) -> None:
        self._given: list[GivenReward] = []
        self._file = Path(str(config))
        if not isinstance(config, (str, Path)):
            raise ConfigError([f"config={config!r}: name a shipped config, or a file."])
        try:
            self._arguments = Arguments(load_config(str(config)))
        except ValueError as error:
            raise ConfigError([str(error).replace("--config ", "config=")]) from error
        self._resumes = False
        problems = self._arguments.problems
        rows = self._put_data(problems, keys, data=data, eval_data=eval_data)
        if rewards is not None:
            nodes, self._given = reward_nodes(rewards, problems)
            if nodes:
                with problems.noted():
                    self._arguments.put("rewards", nodes, written="rewards")
            OmegaConf.update(self.config, "evaluation.reward", None)  # another reward's name
        self._arguments.set_keys(keys)
        if isinstance(eval_data, (str, Path, Sequence, datasets.Dataset)):
            self._arguments.form_alike("dataset", "eval_dataset")
        self._held = _Held(_folder(self.config, problems))
        self._end = weakref.finalize(self, self._held.close)
        self._take_folder(rows)

    def _put_data(
        self, problems: Problems, keys: Mapping[str, Any], **given: Any
    ) -> dict[str, tuple[str, Sequence[Row]]]:
        """Puts data into the config; returns rows to be written, by their key."""
        rows: dict[str, tuple[str, Sequence[Row]]] = {}
        for name, key in (("data", "dataset"), ("eval_data", "eval_dataset")):
            if given[name] is None:
                continue
            with problems.noted():
                if key in keys:
                    raise ValueError(f"{name} and {key}: are the same key; give one of them.")
                node, found = data_node(given[name], name)
                if found is not None:
                    rows[key] = (name, found)
                self._arguments.put(key, node, written=name, whole=True)
        if given["data"] is not None and given["eval_data"] is None:
            self.config.eval_dataset = None  # of another task
        return rows

    def _take_folder(self, rows: Mapping[str, tuple[str, Sequence[Row]]]) -> None:
        """Checks the config, and writes it and what it names into ``output_dir``."""
        problems, folder = Problems(self._arguments.problems), self._held.folder
        checked = self.config.copy()  # of rows that are not those of the folder's run before
        for key, (name, _) in rows.items():
            self.config[key].source = str(folder / f"{name}.parquet")
            checked[key].source = str(folder / f"new_{name}.parquet")
        for reward in self._given:
            reward.register()
        extend_import_path(folder)
        if os.environ.get("RANK", "0") != "0":
            self._take_over()  # the first rank checks and writes; the others meet it in the recipe
            return
        notes: list[str] = []
        with problems.noted():
            try:
                claim_output_dir(folder)
                for key, (name, found) in rows.items():
                    with problems.noted():
                        write_rows(found, Path(checked[key].source), name)
                notes += [note for reward in self._given if (note := reward.write(folder))]
            except OSError as error:
                raise ValueError(f"output_dir={folder}: cannot be written to: {error}.") from error
        # Instead of data that are none, the config's own would be read, from the hub.
        have_data = not any(re.match(r"(eval_)?data\b", problem) for problem in problems)
        found_wrong, _ = check_config(checked, read_data=have_data)
        problems += self._arguments.told(found_wrong)
        with problems.noted():
            find_device(str(self.config.get("device", "cuda")))
        other = GRPO._open.get(folder)
        if problems:
            self._end.detach()
            for key in rows:
                Path(checked[key].source).unlink(missing_ok=True)
            if other is None or not other._end.alive:
                release_output_dir(folder)
            by_key = {re.split("[=:]", problem)[0]: problem for problem in reversed(problems)}
            raise ConfigError(list(by_key.values())[::-1])
        self._take_over()
        for key in rows:
            Path(checked[key].source).replace(self.config[key].source)
        file = folder / "config.yaml"
        text = _HEADER.format(file=file)
        for node in self.config.rewards:
            own = own_folder(node._component_, self._file)
            if own not in (None, folder):  # `tune` looks beside the config
                notes.append(
                    f"{node._component_} is in {own}; for `tune run`, set PYTHONPATH={own}"
                )
        for note in notes:
            log.warning(note)
            text += f"# But {note}.\n"
        file.write_text(f"{text}\n{OmegaConf.to_yaml(self.config)}", encoding="utf-8")

    def _take_over(self) -> None:
        """Ends the run that has the folder, if any; it is ours now."""
        other = GRPO._open.get(self._held.folder)
        if other is not None:
            other._end.detach()
            other._held.drop()
        GRPO._open[self._held.folder] = self

    @property
    def config(self) -> DictConfig:
        """The config; what is changed in it counts until the first call that needs the model."""
        return self._arguments.cfg

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the run has logged so far, a dict for each step and each evaluation."""
        file = self._held.folder / "metrics.jsonl"
        return read_jsonl(file) if file.exists() else []

    def train(self) -> Path:
        """Trains up to ``num_steps``, or goes on with it.

        Ctrl-C saves a checkpoint, as in the recipe, and is raised then; another call goes on.

        Returns:
            Path: the last checkpoint.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM.
        """
        recipe = self._set_up()
        try:
            recipe.train()
        except BaseException:  # somewhere in a step: what is in memory may be half of one
            self._resumes = recipe._checkpoints.last_step > 0
            self._held.drop()
            raise
        code = recipe.interrupts.exit_code
        if code == 128 + signal.SIGTERM:
            raise SystemExit(code)
        if code:
            raise Interrupted(f"after step {recipe.global_step}; train() goes on from there")
        return self._held.folder / f"step_{recipe._checkpoints.last_step:06d}"

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Measures the current policy, as the run's own evaluations do.

        Args:
            data (Any): rows like those of the training data: a list of dicts, a
                ``datasets.Dataset``, or the path of a file; None takes the config's
                ``eval_dataset``.

        Returns:
            dict[str, float]: ``eval/accuracy`` and so on; docs/metrics.md names them.

        Raises:
            ValueError: if there is no held-out data, or rows cannot be used.
        """
        recipe = self._set_up()
        evaluator = recipe._evaluator
        if data is not None:
            evaluator = self._evaluator_of(recipe, data)
        if evaluator is None:
            raise ValueError("evaluate: the run has no eval_data; give rows.")
        recipe._model.eval()
        with torch.random.fork_rng(devices=[]):  # what rewards draw is not the run's
            metrics = evaluator(recipe._engine, state=recipe._trainer_state).metrics
        return {name: value for name, value in metrics.items() if name.startswith("eval/")}

    def _evaluator_of(self, recipe: GRPOFullFinetuneRecipe, data: Any) -> Evaluator:
        source = str(data) if isinstance(data, (str, Path)) else None
        rows = rows_of(data, "data") if source is None else None
        dataset: RLDataset = recipe._dataset.alike(source=source, rows=rows)
        recipe._rewards.check_data(dataset, key="data")
        check_prompts(
            recipe.cfg,
            longest={"data": dataset.max_prompt_length},
            highest_tokens={"data": dataset.highest_token},
        )
        return Evaluator(recipe.cfg, dataset, tokenizer=recipe._tokenizer, rewards=recipe._rewards)

    def generate(
        self,
        prompts: Any,
        *,
        num_samples: int = 1,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Any:
        """What the current policy answers to prompts in the form of the training data's.

        Args:
            prompts (Any): a prompt, or a list of prompts; a prompt is a text, or a list of
                messages ``{"role": ..., "content": ...}``.
            num_samples (int): answers to each prompt.
            temperature (float | None): 0 for greedy answers; None for the config's.
            seed (int | None): the same one gives the same answers; None for the config's.

        Returns:
            list[str] | list[list[str]]: ``num_samples`` texts, for a list of prompts a list of
            such; each with the prefill in front, as rewards see it.

        Raises:
            ValueError: if there is no prompt, one is too long, or the number is not positive.
        """
        recipe = self._set_up()
        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise ValueError(
                f"prompts={prompts}: give a text, a list of messages, or many of them."
            )
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        is_one = isinstance(prompts, str)
        if asked and isinstance(asked[0], Mapping):  # messages
            asked, is_one = [asked], True
        if not asked or num_samples < 1:
            raise ValueError(
                f"prompts={asked}, num_samples={num_samples}: give one of each or more."
            )
        params = recipe.cfg.sampling_params
        if temperature is not None:
            params = params.greedy if temperature == 0 else params.replace(temperature=temperature)
        items = items_of(asked, recipe._dataset)
        check_prompts(
            recipe.cfg,
            longest={"prompts": max(len(item["tokens"]) for item in items)},
            highest_tokens={"prompts": max(max(item["tokens"], default=0) for item in items)},
        )
        recipe._model.eval()
        rows = roll_out(
            recipe._engine,
            collate_prompts(items),
            tokenizer=recipe._tokenizer,
            params=params,
            group_size=num_samples,
            prefill=recipe._dataset.prefill,
            seed=recipe.seed if seed is None else seed,
            step=0,
        )
        starts = range(0, rows.num_rows, num_samples)
        texts = [rows.completions[i : i + num_samples] for i in starts]
        return texts[0] if is_one else texts

    def close(self) -> None:
        """Ends reward processes, frees the model, and lets other runs use ``output_dir``."""
        self._end()

    def __enter__(self) -> GRPO:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        recipe = self._held.recipe
        state = f"step {recipe.global_step if recipe else 0} of {self.config.num_steps}"
        state = state if self._end.alive else "closed"
        return f"GRPO(output_dir={str(self._held.folder)!r}, {state})"

    def _set_up(self) -> GRPOFullFinetuneRecipe:
        """The recipe, with the model loaded.

        Raises:
            ConfigError: if something is wrong that was not known before.
            RuntimeError: if the run is closed.
        """
        if not self._end.alive:
            raise RuntimeError(
                f"This run is closed, or another has begun in {self._held.folder}; make a new GRPO."
            )
        if self._held.recipe is None:
            for reward in self._given:
                reward.register()
            cfg = self.config.copy()
            if self._resumes:
                cfg.resume_from_checkpoint = True
            atexit.register(parallel.end_process_group)
            try:
                recipe = GRPOFullFinetuneRecipe(cfg=cfg)
                recipe.setup(cfg=cfg)
            except ValueError as error:
                # With `prepare`, only now are there files to check all that depends on them.
                problems = check_config(cfg)[0] or problems_in(error)
                raise ConfigError(self._arguments.told(problems)) from error
            if "RANK" not in os.environ:
                recipe.interrupts.leave = _raise_interrupt
            self._held.recipe = recipe
        return self._held.recipe


def _folder(cfg: DictConfig, problems: Problems) -> Path:
    """``output_dir``, which stays the same wherever the process goes.

    Raises:
        ConfigError: if there is none, with all that is known to be wrong besides.
    """
    given = None
    with suppress(OmegaConfBaseException):
        given = cfg.output_dir
    if not isinstance(given, str) or not given:
        raise ConfigError([*problems, f"output_dir={given}: name a folder."])
    folder = Path(given).resolve()
    cfg.output_dir = str(folder)
    return folder


def _raise_interrupt(number: int) -> None:
    """A second Ctrl-C ends the call, not a notebook's process."""
    raise KeyboardInterrupt

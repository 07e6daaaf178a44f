"""The choice of the engine that generates responses, and what it can do, before it is made."""

from __future__ import annotations

import inspect
from contextlib import suppress

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import utils
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.check import arguments_of, instantiate
from torchtune_grpo.config.keys import ENGINES, GRPOConfig, RolloutConfig
from torchtune_grpo.config.text import ConfigError, noted
from torchtune_grpo.models.kinds import kind_of
from torchtune_grpo.rollout.decoder import unsupported_reason
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import Capabilities, EngineContext, RolloutEngine
from torchtune_grpo.rollout.sampling import filters_in
from torchtune_grpo.rollout.transformers import TransformersEngine
from torchtune_grpo.rollout.vllm import VLLMEngine, VLLMServer

log = utils.get_logger("INFO")

# The shipped engines: ``rollout.engine: native`` names this module's ``native``.
native = NativeEngine
transformers = TransformersEngine
vllm = VLLMEngine
vllm_server = VLLMServer


def engine_class(settings: RolloutConfig) -> type[RolloutEngine]:
    """Return the class of the config's engine; raises a ConfigError if it names none."""
    found = _get_component_from_path(settings.engine._component_)
    if not (isinstance(found, type) and issubclass(found, RolloutEngine)):
        raise ConfigError(
            f"{_key(settings)}: not an engine; give a class that is derived from "
            "torchtune_grpo.rollout.RolloutEngine (docs/extending.md#an-engine)."
        )
    return found


def capabilities_of(settings: RolloutConfig) -> Capabilities:
    """Return what the config's engine can do with the arguments that the config gives it."""
    engine, given = engine_class(settings), arguments_of(settings.engine)
    needed = inspect.signature(engine.capabilities).parameters.values()
    names = [p.name for p in needed if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    keys = [f"rollout.engine.{name}" for name in names if name not in given]
    if keys:
        raise ConfigError(*(f"{key}: missing; give {key}=<value>." for key in keys))
    try:
        return engine.capabilities(**given)
    except TypeError as error:  # an argument that it does not take
        raise ConfigError(f"{_key(settings)}: {error}") from error


def add_wishes(cfg: DictConfig) -> None:
    """Let the engine choose ``objective.sampling_correction``, if the config leaves it open."""
    with suppress(Exception):  # ``read_config`` tells of mistakes, a user's module's too
        rollout = OmegaConf.to_container(cfg, resolve=True).get("rollout") or {}
        correction = capabilities_of(RolloutConfig.model_validate(rollout)).correction
        if correction and "sampling_correction" not in (cfg.get("objective") or {}):
            OmegaConf.update(cfg, "objective.sampling_correction", correction, force_add=True)


def check_engine(cfg: GRPOConfig) -> None:
    """Raise a ConfigError with all in a config that its engine cannot do."""
    engine, can = engine_class(cfg.rollout), capabilities_of(cfg.rollout)
    problems: list[str] = []
    if cfg.has_environment and not can.turns:
        problems.append(
            f"{_key(cfg.rollout)}: samples responses of one turn, and an environment or a tool "
            "needs several; set rollout.engine to native."
        )
    changes = {"sampling": dict(cfg.sampling), "evaluation.sampling": cfg.evaluation.sampling}
    for section, values in changes.items() if not can.filters else ():
        problems += [
            f"{section}.{name}={value}: {_key(cfg.rollout)} has no filters and penalties; remove "
            "it, or set rollout.engine to native."
            for name, value in filters_in(values).items()
        ]
    with noted(problems):
        engine.check(cfg)
    if problems:
        raise ConfigError(*problems)


def _key(settings: RolloutConfig) -> str:
    return f"rollout.engine={settings.engine._component_.removeprefix(f'{ENGINES}.')}"


def engine_for(settings: RolloutConfig, model: nn.Module) -> type[RolloutEngine]:
    """Return the config's engine or, for a model that the default does not sample, one that does.

    Raises a ConfigError if another engine does not sample it.
    """
    chosen, modules = engine_class(settings), kind_of(model).modules
    if modules in capabilities_of(settings).modules:
        return chosen
    if chosen is not NativeEngine or arguments_of(settings.engine):
        raise ConfigError(
            f"{_key(settings)}: does not sample models that {modules}' modules compute; leave the "
            "choice of the engine, with its arguments, out of the config."
        )
    return TransformersEngine


def make_engine(context: EngineContext) -> RolloutEngine:
    """Make the config's engine, or the one that samples transformers' modules."""
    settings = context.settings
    if (chosen := engine_for(settings, context.model)) is TransformersEngine:
        return TransformersEngine(context)
    if chosen is NativeEngine and (reason := unsupported_reason(context.model)):
        raise ConfigError(
            f"{_key(settings)}: cannot sample this model: {reason}. Set model._component_ to "
            "torchtune_grpo.models.transformers_model, or rollout.engine to a class of your own "
            "(docs/extending.md#an-engine)."
        )
    if not capabilities_of(settings).reproducible:
        log.warning(
            f"{_key(settings)}: its samples are not reproducible, so a resumed or repeated run "
            "will differ."
        )
    return instantiate("rollout.engine", settings.engine, context)

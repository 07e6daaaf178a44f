"""The choice of the engine that generates responses."""

from __future__ import annotations

from omegaconf import DictConfig
from torchtune import utils
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.check import instantiate, parameters
from torchtune_grpo.config.keys import GRPOConfig, RolloutConfig
from torchtune_grpo.rollout.decoder import unsupported_reason
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext, RolloutEngine
from torchtune_grpo.rollout.torchtune import TorchtuneEngine

log = utils.get_logger("INFO")


def make_engine(context: EngineContext) -> RolloutEngine:
    """Make the config's engine, or torchtune's for a model that the native one cannot run."""
    chosen = context.settings.engine
    if chosen == "native":
        reason = unsupported_reason(context.model)
        if reason is None:
            return NativeEngine(context)
        log.warning(f"rollout.engine=native: {reason}; generating with torchtune's own modules.")
    if isinstance(chosen, str):
        return TorchtuneEngine(context)
    engine = instantiate("rollout.engine", chosen, context)
    if not isinstance(engine, RolloutEngine):
        raise ValueError(
            f"rollout.engine={chosen._component_}: an engine has generate(request) and "
            "is_reproducible; see docs/rollout.md."
        )
    if not engine.is_reproducible:
        log.warning(
            f"rollout.engine={chosen._component_}: its samples are not reproducible, so a resumed "
            "or repeated run will differ."
        )
    return engine


def check_engine(cfg: GRPOConfig) -> None:
    """Let the config's engine raise a ConfigError with what it cannot do of the config."""
    node = cfg.rollout.engine
    if isinstance(node, DictConfig):
        getattr(_get_component_from_path(node._component_), "check", lambda cfg: None)(cfg)


def longest_row(settings: RolloutConfig) -> int | None:
    """Return the most tokens of a prompt with its response; None = as many as the model takes."""
    if not isinstance(settings.engine, DictConfig):
        return None
    argument = (parameters(settings.engine._component_) or {}).get("max_model_len")
    return None if argument is None else settings.engine.get("max_model_len", argument.default)

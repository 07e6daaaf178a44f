"""The config's metric logger, of the first rank alone, and its profiler."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from omegaconf import DictConfig
from torchtune import config, training

from torchtune_grpo.machine.parallel import rank


class _SilentLogger:
    """Stands for the metric logger on all ranks but the first."""

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def make_metric_logger(node: DictConfig) -> Any:
    """The config's metric logger; only the first rank's logs anything.

    Raises:
        ValueError: if it cannot be made: a package is missing, or its folder cannot be written.
    """
    if rank() > 0:
        return _SilentLogger()
    # What torchtune's loggers do at their end fails if their beginning has, and Python says so.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with redirect_stdout(io.StringIO()):  # they print where they write
            return config.instantiate(node)
    except Exception as error:
        message = f"metric_logger={node._component_}: {str(error).rstrip('.')}. {_remedy(error)}"
    finally:
        sys.unraisablehook = hook
    raise ValueError(message)


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError):
        return "Set output_dir or metric_logger.log_dir to a folder that can be written."
    other = "take torchtune.training.metric_logging.DiskLogger"
    if isinstance(error, ImportError):
        cause = error if error.name else error.__cause__
        package = str(getattr(cause, "name", None) or "NAME").partition(".")[0]
        return f"Install the package (pip install {package}), or {other}, which needs none."
    return f"Set what it asks for, or {other}."


def make_profiler(node: DictConfig | None) -> Any:
    """The config's profiler, or one that does nothing."""
    if node is None or node.get("enabled") is False:
        return training.DummyProfiler()
    return config.instantiate(node)[0]

"""Decorator that turns a recipe's main function into a command."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig

from torchtune_grpo.checkpoint.folder import write_error
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.text import end_on_ctrl_c, errors_in_one_line

_PATIENCE = 5.0  # seconds for threads to end after the run


def parse(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Decorate a recipe's entry point, as ``torchtune.config.parse`` does.

    Overrides may also reach into lists, and errors end in one line: see ``load_config`` and
    ``errors_in_one_line``.
    """

    @functools.wraps(recipe_main)
    def main() -> object:
        parser = argparse.ArgumentParser(description=recipe_main.__doc__)
        parser.add_argument("--config", required=True, help="name of a shipped config, or a file")
        args, overrides = parser.parse_known_args()
        end_on_ctrl_c()  # as on other signals, until the recipe handles them
        code = 1
        try:
            with errors_in_one_line(keep=write_error):
                code = recipe_main(load_config(args.config, overrides))
        finally:
            threading.Thread(target=_end, args=(code or 0,), daemon=True).start()
        if code:  # a signal's; Python would wait for threads left behind by rewards it has dropped
            with suppress(OSError):  # the terminal is closed
                sys.stdout.flush()
            os._exit(code)
        return code

    return main


def _end(code: int) -> None:
    """End a process that has finished, if a thread is left for which Python would wait for ever."""
    time.sleep(_PATIENCE)
    threads = [t for t in threading.enumerate() if not t.daemon and t != threading.main_thread()]
    if threads:
        names = ", ".join(thread.name for thread in threads)
        sys.stderr.write(f"Ends without waiting for threads that a reward may have left: {names}\n")
        sys.stdout.flush()
        os._exit(code)

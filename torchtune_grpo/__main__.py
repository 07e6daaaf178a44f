"""The command ``torchtune-grpo``, or ``python -m torchtune_grpo``.

``config``, ``evaluate``, ``plan``, ``sample`` and ``report`` are its own; ``ls``, ``cp``, ``cat``,
``run`` and ``validate`` go to torchtune's command, even where the hook in ``import torch`` is off.
"""

import importlib
import sys

from torchtune_grpo.config.text import end_on_ctrl_c

COMMANDS = {  # name -> its function, and what it does
    "config": ("cli.commands:config", "check a config, or print the table of all keys"),
    "evaluate": ("cli.evaluate:main", "compare held-out answers before and after training"),
    "plan": ("plan:main", "say what a run is going to be like, before its first step"),
    "sample": ("cli.commands:sample", "print what a policy answers"),
    "report": ("monitor.report:main", "write a run's page"),
}


def main() -> None:
    """Run one of the commands above; any other word is a command of ``tune``."""
    end_on_ctrl_c()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        module, _, function = COMMANDS[name][0].partition(":")
        getattr(importlib.import_module(f"torchtune_grpo.{module}"), function)()
        return
    if name in ("-h", "--help"):
        lines = (f"  {command:10}{doc}" for command, (_, doc) in COMMANDS.items())
        print("usage: torchtune-grpo COMMAND ...", "", *lines, sep="\n")
        print("  ls, cp, cat, run, validate: as `tune` does")
        return
    from torchtune_grpo.cli.tune import register

    register()

    from torchtune._cli.tune import main as tune

    tune()


if __name__ == "__main__":
    main()

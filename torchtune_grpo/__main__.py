"""The command ``torchtune-grpo``, or ``python -m torchtune_grpo``.

Words that are not its own go to torchtune's command, even if the hook in ``import torch`` is off.
"""

import importlib
import platform
import sys

from torchtune_grpo.config.text import end_on_ctrl_c, errors_in_one_line, suggest

COMMANDS = {  # name -> its function, and what it does
    "config": ("cli.commands:config", "check a config, or print the table of all keys"),
    "evaluate": ("cli.evaluate:main", "compare held-out answers before and after training"),
    "plan": ("plan:main", "predict whether a run will learn, its time and its memory"),
    "prompts": ("cli.prompts:main", "compare prompts on training questions, to start from one"),
    "sample": ("cli.commands:sample", "print what a policy answers"),
    "score": ("cli.score:main", "score a run's saved completions with other rewards"),
    "push": ("checkpoint.push:main", "upload a run's model to the Hugging Face hub"),
    "report": ("monitor.report:main", "write a run's page"),
}

_OF_TUNE = ("download", "ls", "cp", "run", "validate", "cat")


def print_versions() -> None:
    """Print the versions on which a bug may depend."""
    import torch

    from torchtune_grpo.monitor.record import versions

    for name, version in versions().items():
        print(name.replace("_", "-"), version)
    print(platform.platform())
    if torch.version.cuda:  # what torch was built for; a driver may be too old for it
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU found"
        print(f"CUDA {torch.version.cuda}, {gpu}")


def main() -> None:
    """Run one of the commands above; any other word is a command of ``tune``."""
    end_on_ctrl_c()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    with errors_in_one_line():
        if name in COMMANDS:
            sys.argv[:2] = [f"torchtune-grpo {name}"]
            module, _, function = COMMANDS[name][0].partition(":")
            getattr(importlib.import_module(f"torchtune_grpo.{module}"), function)()
            return
        if name in ("-h", "--help"):
            lines = (f"  {command:10}{doc}" for command, (_, doc) in COMMANDS.items())
            print("usage: torchtune-grpo COMMAND ...", "", *lines, sep="\n")
            print(f"  {'train':10}train a config on one device, with key=value after its name")
            print(
                "  ls, cp, cat, run, validate: as `tune` does\n  --version: what a bug report needs"
            )
            return
        if name == "--version":
            print_versions()
            return
    from torchtune_grpo.cli.tune import RECIPES, register

    register()
    if name == "train":
        config, *overrides = [*sys.argv[2:], ""]
        if config in ("", "-h", "--help"):
            sys.exit("usage: torchtune-grpo train CONFIG [key=value ...], on one device")
        sys.argv[1:] = ["run", next(iter(RECIPES)), "--config", config, *overrides[:-1]]
        if config.startswith("--config"):  # as `tune run` has it
            sys.argv[3:5] = config.split("=", 1)
    elif name not in _OF_TUNE and not name.startswith("-"):
        known = [*COMMANDS, "train", *_OF_TUNE]
        sys.exit(f"Error: {name}: no such command.{suggest(name, known)} --help lists them.")

    from torchtune._cli.tune import main as tune

    tune()


if __name__ == "__main__":
    main()

"""The environment variables that a training on CPU needs, in the driver and in every Ray worker.

Imports only the standard library, because the variables must be set before torch and verl are imported.
``python -m recipes.cpu.environment [ASSETS]`` prints them for a shell.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

RECIPE = Path(__file__).resolve().parent
REPOSITORY = RECIPE.parent.parent

ASSETS_VARIABLE = "CPU_ASSETS"
TRACE_VARIABLE = "CPU_ROLLOUT_TRACE"


def cpu_environment(assets: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The variables to add to ``os.environ``; ``assets`` is the folder that ``make_assets`` created."""
    variables = {
        # verl's device, and the module that provides it, which every process that imports verl also imports.
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": _with("recipes.cpu.plugin", "VERL_USE_EXTERNAL_MODULES", ","),
        "PYTHONPATH": _with(str(REPOSITORY), "PYTHONPATH", os.pathsep),
        # The configuration refers to files in this folder.
        "CPU_RECIPE": str(RECIPE),
        # One thread per process: results do not depend on the number of cores, and processes do not compete for them.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Makes the iteration order of sets of strings the same in every run.
        "PYTHONHASHSEED": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_DEDUP_LOGS": "0",
        # vLLM's model runs in its scheduler's process (distributed_executor_backend=uni), on any core.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **_QUIET,
    }
    if assets is not None:
        variables[ASSETS_VARIABLE] = str(Path(assets).resolve())
    return variables


# Turns off deprecation messages, usage statistics, warnings about missing GPUs, and progress bars for a tiny model.
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


def _with(first: str, variable: str, separator: str) -> str:
    """``first`` prepended to the current value of the variable, unless it is already there."""
    rest = [part for part in os.environ.get(variable, "").split(separator) if part and part != first]
    return separator.join([first, *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description='Print the variables: eval "$(python -m recipes.cpu.environment)"')
    parser.add_argument("assets", nargs="?", help="folder with the model and data made by recipes.cpu.assets")
    for name, value in cpu_environment(parser.parse_args().assets).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()

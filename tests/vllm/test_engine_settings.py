"""The list of vLLM arguments that do not affect the tokens contains only real arguments."""

from __future__ import annotations

import dataclasses
import fnmatch

from vllm.config import CompilationConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from verl_rollout_skip.fingerprint.engine_settings import VLLM

# Arguments of versions before the installed one.
OLD = {
    *("swap_space", "preemption_mode", "disable_mm_preprocessor_cache", "max_num_partial_prefills"),
    *("max_long_partial_prefills", "scheduler_delay_factor", "num_scheduler_steps", "multi_step_stream_outputs"),
    *("disable_async_output_proc", "use_v2_block_manager", "cuda_graph_sizes", "max_seq_len_to_capture"),
    *("worker_use_ray", "disable_log_requests", "disable_frontend_multiprocessing"),
    *("compilation_config.level", "compilation_config.use_cudagraph", "compilation_config.full_cuda_graph"),
}


def test_every_name_on_the_list_is_an_argument_of_vllm() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    known = {action.dest for action in parser._actions}
    known |= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    known |= {f"compilation_config.{field.name}" for field in dataclasses.fields(CompilationConfig)}
    listed = {name.removesuffix(".*") for names in VLLM.values() for name in names}
    assert {name for name in listed - OLD if not fnmatch.filter(known, name)} == set()
    assert {name for name in OLD if name in known} == set()

"""A worker whose weights can be replaced, which verl's vLLM rollout needs on CPU.

``engine_kwargs.vllm.worker_extension_cls`` names the class, and vLLM makes its worker class inherit from it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from recipes.cpu import trace

# Held by the first server of a training: only one training on this machine may use vLLM at a time.
LOCK = Path(tempfile.gettempdir()) / "verl-rollout-skip-vllm-engine.lock"


def lock_engine(wait_seconds: float = 240.0) -> IO[str]:
    """Wait until no other training uses vLLM; the lock is held until the file is closed or the process ends.

    verl sends weights through a socket in /tmp that is named after the Ray job, and the first job of every Ray cluster
    has the same ID: two trainings would receive each other's weights.
    """
    file, deadline = LOCK.open("w"), time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise RuntimeError(
                    f"another training on this machine uses vLLM (lock {LOCK}), and verl would mix up the weights of "
                    "both: start this one when it has ended"
                ) from None
            time.sleep(0.2)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's own extension, in a worker whose linear layers keep their weights.

    With oneDNN, vLLM packs the weights of a linear layer when it loads the model and drops the originals, so the
    trainer's weights cannot be copied into it. Without oneDNN, vLLM uses torch's layers.
    """

    def __new__(cls, **kwargs: Any) -> CPUWorkerExtension:
        import vllm._custom_ops as ops

        ops._supports_onednn = False
        worker = super().__new__(cls, **kwargs)
        # No weights are sent before all servers of a training have started.
        if os.environ.get("VERL_REPLICA_RANK", "0") == "0":
            worker.engine_lock = lock_engine()
        return worker

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        self.syncs = getattr(self, "syncs", 0) + 1
        # The server knows the version of the weights, its worker does not.
        trace.write(trace.trace_file("vllm"), "sync", None, self.syncs)

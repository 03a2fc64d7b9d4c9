"""A Ray cluster of several nodes on one machine. A node may have its own disk where the others share a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster

UNITS = 2
_DETECT_DEAD_NODES_QUICKLY = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


class Nodes:
    """A head node for the driver, and nodes that TransferQueue's storage units run on."""

    def __init__(self) -> None:
        head = {"num_cpus": 4, "include_dashboard": False, "_system_config": _DETECT_DEAD_NODES_QUICKLY}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cluster.add_node(num_cpus=UNITS + 2)
        ray.init(address=self._cluster.address, log_to_driver=False)
        self.head = ray.get_runtime_context().get_node_id()
        self._started: list[subprocess.Popen[bytes]] = []

    def others(self) -> list[str]:
        return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != self.head]

    def add(self, own_disk: Path | None = None) -> str:
        """Start another node. On this node, ``own_disk`` is an empty folder on a disk that no other node has."""
        before = set(self.others())
        start = [str(Path(sys.executable).parent / "ray"), "start", f"--address={self._cluster.address}", "--block"]
        command = [*start, "--num-cpus=1", "--object-store-memory=150000000", "--disable-usage-stats"]
        if own_disk is not None:
            mount = f"mount -t tmpfs none {own_disk} && exec " + " ".join(command)
            command = ["unshare", "--mount", "sh", "-c", mount]
        self._started.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        )
        while not set(self.others()) - before:
            assert self._started[-1].poll() is None, "the node did not start"
        (added,) = set(self.others()) - before
        return added

    def kill_last(self) -> None:
        """End the node that was added last, as if its machine had lost power."""
        node = psutil.Process(self._started[-1].pid)
        for process in [*node.children(recursive=True), node]:
            process.kill()
        self._started.pop().wait()

    def shut_down(self) -> None:
        while self._started:
            self.kill_last()
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def cluster() -> Iterator[Nodes]:
    """The driver on one node, TransferQueue on both; tests add more nodes.

    Ray writes the address of a cluster to its temporary folder, where other processes on this machine would find it.
    """
    before = os.environ.get("RAY_TMPDIR")
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        nodes = Nodes()
        try:
            tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": UNITS}}}))
            yield nodes
        finally:
            tq.close()
            nodes.shut_down()
            os.environ.pop("RAY_TMPDIR")
            if before is not None:
                os.environ["RAY_TMPDIR"] = before


def has_own_disks() -> bool:
    """Whether this process may mount a disk that no other process sees."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return os.path.isdir("/mnt") and subprocess.run(command, capture_output=True).returncode == 0

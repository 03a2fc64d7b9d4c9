"""verl's platform "cpu": where verl expects a device module such as torch.cuda, it finds the CPU.

Memory queries return zero, and switching devices does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

CPU = torch.device("cpu")


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> ModuleType:
    """torch.cpu with the names of torch.cuda that verl calls."""
    module = ModuleType("recipes.cpu.device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    switches = ("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "reset_peak_memory_stats", "set_device")
    module.__dict__.update(
        dict.fromkeys(counters, _zero),
        **dict.fromkeys(switches, _nothing),
        mem_get_info=lambda *_: (0, 0),
        # False keeps verl from using its helpers for accelerator memory.
        is_available=lambda: False,
        current_device=lambda: CPU,
        device_count=lambda: 1,
        get_device_name=lambda *_: "CPU",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU as verl's device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]
        # verl calls tensor.to(current_device()), where an index would mean a CUDA device.
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """gloo. In verl's workers, this also initializes the process group.

        verl's workers request this name just before they call ``init_process_group("cpu:gloo,{device}:{name}")``, which
        torch rejects if the device is also the CPU ("Duplicate device type cpu"). verl skips its call if there is a
        process group, and there is no other moment to create one.
        """
        in_worker = os.environ.get("WG_BACKEND") == "ray" and "MASTER_ADDR" in os.environ
        if in_worker and not torch.distributed.is_initialized():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl's resource check counts only GPUs and NPUs, so the configuration declares as many GPUs as workers.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

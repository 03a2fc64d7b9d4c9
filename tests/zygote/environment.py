"""Which environment variables count at import time: those that Python code looked at, and those of C libraries."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType

# Looked at by the interpreter and by C libraries while they load, where no Python code can watch them, or in a copy.
UNWATCHED = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OPENSSL_", "SSL", "RUST_", "GFORTRAN_", "THP_", "NO_COLOR"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "INTEL_"),
    *("MPI_", "I_MPI_", "OMPI_", "NPY_", "NUMPY_", "ACC_", "ARROW_", "FSSPEC_"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "KINETO_"),
)
# Honoured by every child anew, except the last: verl sets it for compilers of CUDA extensions, no import looks at it.
FREE = ("PYTHONPATH", "PYTHONUNBUFFERED", "LAZY_LEGACY_OP", "TORCH_CUDA_ARCH_LIST")


class EnvironmentReads:
    """While entered, notes the names under which ``os.environ`` is looked up; copying it whole is no look-up."""

    def __init__(self, environ: os._Environ[str]) -> None:
        self.names: set[str] = set()
        self.before = dict(environ)
        self.after: dict[str, str] = {}
        self._environ = environ
        self._plain_type = type(environ)

    def __enter__(self) -> EnvironmentReads:
        self._environ.__class__ = watching(self._plain_type, self.names)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._environ.__class__ = self._plain_type
        self.after = dict(self._environ)

    def difference(self, env: Mapping[str, str]) -> list[str]:
        """The variables that the imports looked at, or may have, and that are not the same in ``env``."""
        unwatched = {name for name in (*self.before, *env) if name.startswith(UNWATCHED)}
        names = self.names.union(unwatched).difference(FREE)
        return sorted(n for n in names if env.get(n) not in (self.before.get(n), self.after.get(n)))

    def completed(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` with what the imports have added to the environment, as they would have in a process of its own."""
        added = {name: value for name, value in self.after.items() if name not in self.before}
        return {**added, **env}


def watching(plain: type[os._Environ[str]], names: set[str]) -> type[os._Environ[str]]:
    """The type of ``os.environ``, with each name that is looked up added to ``names``."""
    copied: deque[str] = deque()

    class WatchedEnviron(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if copied and copied[0] == name:
                copied.popleft()
            else:
                copied.clear()
                names.add(name)
            value: str = super().__getitem__(name)
            return value

        def __contains__(self, name: object) -> bool:
            names.add(str(name))
            return super().__contains__(name)

        def __iter__(self) -> Iterator[str]:
            # A copy looks up each name in the order of the iteration, during it or after it.
            in_order = list(super().__iter__())
            copied.clear()
            copied.extend(in_order)
            return iter(in_order)

    return WatchedEnviron

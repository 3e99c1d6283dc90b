"""How Orbax reads and writes arrays for us: few of them in memory at a time, and telling how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from qwen35_jax.checkpoint.progress import Advance

_COMMIT_BYTES = 4 << 20


class HostArrays(ocp.type_handlers.NumpyHandler):
    """Deals with one parameter (or a few small ones) to the end before the next, to have no more in memory.

    Writes `LazyParameter`s. Reads NumPy arrays, or with `to_device` arrays on JAX's default device.
    """

    def __init__(self, advance: Advance, *, to_device: bool = False):
        super().__init__(deepcopy_host_arrays=False)
        self._advance = advance
        self._to_device = to_device

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        start, nbytes = 0, 0
        for stop, value in enumerate(values, start=1):
            nbytes += value.nbytes
            # Each commit writes the directory of all before it anew, so small parameters share one.
            if nbytes >= _COMMIT_BYTES or stop == len(values):
                await self._commit(values[start:stop], infos[start:stop], args[start:stop])
                self._advance(nbytes)
                start, nbytes = stop, 0
        return []

    async def _commit(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any]) -> None:
        """Read and write to the end; with the return nothing holds what was read."""
        arrays = [value.read() for value in values]
        for commit in await super().serialize(arrays, infos, args):
            commit.result()

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[np.ndarray]:
        arrays: list[Any] = []
        for info, arg in zip(infos, args or [ocp.RestoreArgs()] * len(infos), strict=True):
            (array,) = await super().deserialize([info], [arg])
            self._advance(array.nbytes)
            arrays.append(jax.device_put(array) if self._to_device else array)
        return arrays


class PlacedArrays(ocp.type_handlers.ArrayHandler):
    """Reads every array straight onto the devices of its sharding, several at a time."""

    def __init__(self, advance: Advance):
        super().__init__()
        self._advance = advance

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        async def read(info: Any, arg: Any) -> jax.Array:
            (array,) = await super(PlacedArrays, self).deserialize([info], [arg])
            self._advance(array.nbytes)
            return array

        arguments = args or [ocp.ArrayRestoreArgs()] * len(infos)
        return await asyncio.gather(*map(read, infos, arguments))

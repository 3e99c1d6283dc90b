"""Where the arrays of a generation lie: on the parameters' device, or cut over the parameters' mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from qwen35_jax.cache import Cache
from qwen35_jax.logical_axes import shards
from qwen35_jax.model import Parameters
from qwen35_jax.sharding import cache_shardings
from qwen35_jax.sharding.rules import fitting_sharding

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Decides where arrays go. Two of them are equal when they decide alike, so that one may be a static argument.

    On a mesh, caches are cut as the sharding rules say. Everything else is per row and has the batch in front: its
    rows are cut over the axes of `batch` where they divide, and what has no rows is whole on every device.

    Attributes:
        whole: of a value that every device needs.
    """

    whole: Sharding

    @classmethod
    def beside(cls, parameters: Parameters) -> Placement:
        """The placement on the devices where parameters lie."""
        sharding = jax.tree.leaves(parameters)[0].sharding
        if isinstance(sharding, NamedSharding):
            return cls(NamedSharding(sharding.mesh, PartitionSpec()))
        return cls(sharding)

    def filled_rows(self, rows: int) -> int:
        """The next number of rows that can be cut evenly."""
        cut = 1
        if isinstance(self.whole, NamedSharding):
            cut = shards(self.whole.mesh, "batch")
        return -(-rows // cut) * cut

    def shardings(self, tree: Tree) -> Tree:
        """The sharding of every array, as a tree of its structure. Caches may stand anywhere in it."""
        return jax.tree.map(self._one, tree, is_leaf=lambda node: isinstance(node, Cache))

    def put(self, tree: Tree) -> Tree:
        """Moves arrays to where they belong."""
        return jax.device_put(tree, self.shardings(tree))

    def keep(self, tree: Tree) -> Tree:
        """Inside a program: the results lie where the arguments do, whatever the compiler would choose.

        So a loop never moves its cache, and finds its program compiled at every call.
        """
        if not isinstance(self.whole, NamedSharding):
            return tree
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def _one(self, node: Any) -> Any:
        if not isinstance(self.whole, NamedSharding):
            return jax.tree.map(lambda array: self.whole, node)
        if isinstance(node, Cache):
            return cache_shardings(self.whole.mesh, node)
        return fitting_sharding(self.whole.mesh, ("batch",), node.shape[:1]) if node.ndim else self.whole

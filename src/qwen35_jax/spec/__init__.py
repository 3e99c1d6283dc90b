"""What a configuration describes, in closed form: graph, tensor shapes, parameter counts. No arrays."""

from qwen35_jax.spec.graph import graph_nodes
from qwen35_jax.spec.node import Node
from qwen35_jax.spec.summary import Specification, specify
from qwen35_jax.spec.tensors import hf_tensor_shapes

__all__ = ["Node", "Specification", "graph_nodes", "hf_tensor_shapes", "specify"]

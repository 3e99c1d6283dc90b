"""Programs are compiled for TPUs where their compiler is: it is made for Linux on x86-64 alone."""

from __future__ import annotations

from qwen35_jax.planning.topologies import can_compile

collect_ignore = [] if can_compile() else ["test_compiled_programs.py", "test_compiled_plans.py"]

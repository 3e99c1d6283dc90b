"""The package's public names are there, and come from one place each."""

import subprocess
import sys

import pytest

import qwen35_jax


@pytest.mark.parametrize("name", qwen35_jax.__all__)
def test_public_name_is_importable_and_listed(name):
    assert callable(getattr(qwen35_jax, name))
    assert name in dir(qwen35_jax)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="lod"):
        qwen35_jax.lod  # noqa: B018 - the access is the test


def test_importing_the_package_imports_no_jax():
    code = "import sys, qwen35_jax; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

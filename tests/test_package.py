"""The package as a user meets it: small imports, subject modules at hand, extras named when they are missing."""

import subprocess
import sys

import pytest

import jaxdp

SUBJECTS = ("conversions", "convolution", "diffusion", "iteration", "mixing", "shuffle", "training", "plot")
HEAVY = ("optax", "matplotlib", "xarray", "tqdm", "orbax", "dp_accounting")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_jaxdp_imports_no_optional_package_and_not_optax():
    loaded = run_python("import sys, jaxdp; print(*sys.modules)").split()
    assert "jaxdp" in loaded
    assert not {name for name in loaded if name.split(".")[0] in HEAVY}


def test_subject_modules_are_attributes_without_an_import_of_their_own():
    code = f"import jaxdp; print(*(getattr(jaxdp, name).__name__ for name in {SUBJECTS}))"
    assert run_python(code).split() == [f"jaxdp.{name}" for name in SUBJECTS]


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        jaxdp.nonsense  # noqa: B018


def test_every_public_name_exists():
    assert [name for name in jaxdp.__all__ if not hasattr(jaxdp, name)] == []
    assert set(SUBJECTS) <= set(dir(jaxdp))

"""The package as a user sees it: what an import loads, which names exist, and that imports inside it point down."""

import ast
import pathlib
import subprocess
import sys

import pytest

import jaxdp

SUBJECTS = ("conversions", "convolution", "diffusion", "iteration", "mixing", "shuffle", "training", "plot")
HEAVY = ("optax", "matplotlib", "xarray", "tqdm", "orbax", "dp_accounting")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_importing_jaxdp_imports_no_optional_package_and_not_optax():
    loaded = run_python("import sys, jaxdp; print(*sys.modules)").split()
    assert "jaxdp" in loaded
    assert not {name for name in loaded if name.split(".")[0] in HEAVY}


@pytest.mark.slow
def test_subject_modules_are_attributes_without_an_import_of_their_own():
    code = f"import jaxdp; print(*(getattr(jaxdp, name).__name__ for name in {SUBJECTS}))"
    assert run_python(code).split() == [f"jaxdp.{name}" for name in SUBJECTS]


@pytest.mark.slow
def test_a_fresh_process_reads_the_json_of_every_record():
    code = (
        "import jaxdp, pkgutil; from jaxdp.serialization import records_by_name; known = set(records_by_name());"
        "[__import__(m.name) for m in pkgutil.walk_packages(jaxdp.__path__, 'jaxdp.') if '__main__' not in m.name];"
        "print(len(known), *set(records_by_name()) - known)"
    )
    number, *unknown = run_python(code).split()
    assert int(number) > 30 and unknown == []


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        jaxdp.nonsense  # noqa: B018


def test_every_public_name_exists():
    assert [name for name in jaxdp.__all__ if not hasattr(jaxdp, name)] == []
    assert set(SUBJECTS) <= set(dir(jaxdp))


# Folders and files of jaxdp, layer by layer. A part may import parts of lower layers only (further down in this list),
# none of its own layer.
LAYERS = (
    ("__main__",),
    ("cli", "__init__"),
    ("report",),
    ("plot", "sweep", "interop", "training", "serialization"),
    ("calibration",),
    ("accounting",),
    ("sources", "diffusion", "conversions"),
    ("mechanisms", "mixing", "convolution"),
    ("allocation",),
    ("contour", "iteration", "shuffle"),
    ("sampled_gaussian", "closed_forms"),
    ("numerics", "interval"),
    ("runtime",),
    ("validate",),
    ("domains",),
    ("typing",),
)


def imports(source):
    """Names of the parts of jaxdp that a source imports: `from jaxdp.shuffle import law` or `from jaxdp import law`."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        yield from (name.split(".")[1] for name in names if name.startswith("jaxdp."))


def upward(files):
    """Pairs (part, imported part) whose import does not point down. files: pairs (part, source text)."""
    rank = {part: place for place, layer in enumerate(LAYERS) for part in layer}
    seen = {(part, name) for part, source in files for name in imports(source) if name != part and name in rank}
    return {(part, name) for part, name in seen if rank[name] <= rank[part]}


def test_imports_point_down():
    root = pathlib.Path(jaxdp.__file__).parent
    files = [(f.relative_to(root).parts[0].removesuffix(".py"), f.read_text()) for f in root.rglob("*.py")]
    assert {part for part, _ in files} <= {part for layer in LAYERS for part in layer}
    assert upward(files) == set()


def test_an_import_that_points_up_is_noticed():
    assert upward([("shuffle", "from jaxdp.accounting import epsilon")]) == {("shuffle", "accounting")}
    assert upward([("shuffle", "from jaxdp import plot, numerics")]) == {("shuffle", "plot")}

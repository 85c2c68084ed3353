"""Execute notebooks from top to bottom; the files are left as they are."""

import pathlib
import sys
import time

import nbformat
from nbclient import NotebookClient


def run(path: pathlib.Path) -> None:
    """Execute one notebook in its own folder; raises on the first failing cell."""
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    print(f"{path}: {time.perf_counter() - start:.0f} s")


for name in sys.argv[1:]:
    run(pathlib.Path(name))

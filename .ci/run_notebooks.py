"""Execute notebooks from top to bottom, two at a time; the files are left as they are."""

import concurrent.futures
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
    print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    # processes: compiling, which takes most of the time, is done by one thread
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        list(pool.map(run, map(pathlib.Path, sys.argv[1:])))

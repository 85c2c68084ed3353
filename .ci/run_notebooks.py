"""Execute notebooks from top to bottom, two at a time, and compare what they print with what is stored in them.

Without an option the files are left as they are, and a difference is an error. ``--store`` writes the new outputs.
What a cell with the tag "processor" prints, such as the accuracy of a trained model, is not compared.
"""

import argparse
import concurrent.futures
import math
import pathlib
import re
import sys
import time

import nbformat
from nbclient import NotebookClient

# Tolerances of printed numbers. A certified bound may move by its relative gap, at most 1e-6. The gap itself may be
# printed, too: any number below 1e-6.
RELATIVE, ABSOLUTE = 1e-5, 1e-6
NUMBER = re.compile(r"[-+]?(?<![\w.])\d+(?:,\d{3})*\.?\d*(?:e[-+]?\d+)?")


def printed(cell: nbformat.NotebookNode) -> str:
    """Text that one cell printed or showed as its value; pictures and matplotlib's objects are left out."""
    if "processor" in cell.metadata.get("tags", []):
        return ""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])]
    return "\n".join(text for text in texts if "<" not in text and not text.startswith("[Text"))


def differences(stored: str, now: str) -> list[str]:
    """Where two printed texts differ: in their words, or in a number by more than the tolerance."""
    if NUMBER.sub("#", stored).split() != NUMBER.sub("#", now).split():
        return [f"stored:\n{stored}\nnow:\n{now}"]
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(now), strict=True)
    return [
        f"stored {old}, now {new}"
        for old, new in pairs
        if not math.isclose(*(float(x.replace(",", "")) for x in (old, new)), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    ]


def run(path: pathlib.Path, store: bool) -> list[str]:
    """Execute one notebook in its own folder; differences by cell. Raises on the first failing cell."""
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    before = [printed(cell) for cell in cells]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)
    if store:
        for cell in cells:
            cell.metadata.pop("execution", None)  # times at which the cell ran
        nbformat.write(notebook, path)
        return []
    return [
        f"{path}: {each}" for old, cell in zip(before, cells, strict=True) for each in differences(old, printed(cell))
    ]


def main() -> int:
    """Run the notebooks named on the command line; exit status 1 when a printed number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="write the outputs into the files")
    parser.add_argument("notebooks", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    # processes and not threads: compiling takes most of the time, and one process compiles in one thread
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        found = sum(pool.map(run, arguments.notebooks, [arguments.store] * len(arguments.notebooks)), [])
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

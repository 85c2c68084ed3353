"""Import of optional packages, each installed by an extra of the distribution; a progress bar for long calls."""

import importlib
from collections.abc import Iterator
from typing import Any


def require(module: str, user: str, extra: str) -> Any:
    """The imported module. ImportError, naming ``user``, the package and the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f'{user} needs {package}: pip install "jaxdp-accounting[{extra}]".') from error


def pieces(count: int, progress: bool, rows: int = 64) -> Iterator[slice]:
    """Slices that cover ``count`` rows: one slice, or with ``progress`` slices of ``rows`` and a progress bar."""
    if not progress:
        yield slice(0, count)
        return
    with require("tqdm", "a progress bar", "sweep").tqdm(total=count, unit="row") as bar:
        for start in range(0, count, rows):
            yield slice(start, start + rows)
            bar.update(min(rows, count - start))

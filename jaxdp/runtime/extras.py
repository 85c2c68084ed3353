"""Optional packages, each behind an extra of the distribution; a bar for calls that take minutes."""

import importlib
from collections.abc import Iterator
from typing import Any


def require(module: str, user: str, extra: str) -> Any:
    """The module; ImportError naming its package and the extra where ``user``, which needs it, has to do without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f'{user} needs {package}: pip install "jaxdp-accounting[{extra}]".') from error


def pieces(count: int, progress: bool, rows: int = 64) -> Iterator[slice]:
    """Slices of ``count`` rows: all at once, or ``rows`` at a time with a bar that moves after each."""
    if not progress:
        yield slice(0, count)
        return
    with require("tqdm", "a progress bar", "sweep").tqdm(total=count, unit="row") as bar:
        for start in range(0, count, rows):
            yield slice(start, start + rows)
            bar.update(min(rows, count - start))

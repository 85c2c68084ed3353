"""A bar for calls that take minutes."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdp.runtime.extras import require


def pieces(count: int, progress: bool, rows: int = 64) -> Iterator[slice]:
    """Slices of ``count`` rows: all at once, or ``rows`` at a time with a bar that moves after each."""
    if not progress:
        yield slice(0, count)
        return
    with require("tqdm", "a progress bar", "sweep").tqdm(total=count, unit="row") as bar:
        for start in range(0, count, rows):
            yield slice(start, start + rows)
            bar.update(min(rows, count - start))

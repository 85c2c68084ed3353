"""A bar for calls that take minutes."""

from __future__ import annotations

from collections.abc import Iterator


def pieces(count: int, progress: bool, rows: int = 64) -> Iterator[slice]:
    """Slices of ``count`` rows: all at once, or ``rows`` at a time with a bar that moves after each."""
    if not progress:
        yield slice(0, count)
        return
    try:
        import tqdm
    except ImportError as error:
        raise ImportError('a progress bar needs tqdm: pip install "jaxdp-accounting[sweep]".') from error
    with tqdm.tqdm(total=count, unit="row") as bar:
        for start in range(0, count, rows):
            yield slice(start, start + rows)
            bar.update(min(rows, count - start))

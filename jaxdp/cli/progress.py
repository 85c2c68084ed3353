"""A bar for calls that take minutes."""

from __future__ import annotations

from collections.abc import Iterator

_ROWS = 64  # computed between two movements of the bar


def pieces(count: int, progress: bool) -> Iterator[slice]:
    """Slices of ``count`` rows: all at once, or in pieces with a bar on standard error."""
    if not progress:
        yield slice(0, count)
        return
    try:
        import tqdm
    except ImportError as error:
        raise ImportError('--progress needs tqdm: pip install "jaxdp-accounting[sweep]".') from error
    with tqdm.tqdm(total=count, unit="row") as bar:
        for start in range(0, count, _ROWS):
            yield slice(start, start + _ROWS)
            bar.update(min(_ROWS, count - start))

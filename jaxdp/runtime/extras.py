"""Optional packages, each behind an extra of the distribution."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, user: str, extra: str) -> Any:
    """The module; ImportError naming its package and the extra where ``user``, which needs it, has to do without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f'{user} needs {package}: pip install "jaxdp-accounting[{extra}]".') from error

"""A hash that identifies a computation: it covers the code of a function and every value the code refers to."""

import functools
import hashlib
import pathlib
import sysconfig
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# The code of these packages is not hashed: callers add the package versions to the hash.
_OPAQUE = ("jaxdp", "jax", "jaxlib", "numpy", "scipy", "builtins")


def fingerprint(*values: Any) -> str:
    """SHA-256, as hex, of functions (code, defaults, closure, globals used), arrays, records and plain values.

    Within one Python version equal computations have equal hashes. A changed constant, closure value or global number
    changes the hash, also one of the user's modules (`settings.RATE`) that is imported outside the function. An object
    of an unknown class is hashed by its class name and its `vars`, a class by its methods.
    """
    digest = hashlib.sha256()
    for value in values:
        _feed(digest, value, {})
    return digest.hexdigest()


def _feed(digest: Any, value: Any, seen: dict[int, tuple[int, Any]]) -> None:
    digest.update(f"<{type(value).__name__}>".encode())
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None), np.generic)):
        digest.update(repr(value).encode())
        return
    if id(value) in seen:
        digest.update(str(seen[id(value)][0]).encode())  # which of the earlier values it is
        return
    seen[id(value)] = len(seen), value  # keeps the value alive: Python reuses the id of a freed object
    if isinstance(value, (np.ndarray, jax.Array)):
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        digest.update(str(len(value)).encode())  # [[1], 2] is not [[1, 2]]
        items = sorted(value.items(), key=repr) if isinstance(value, dict) else value
        for item in sorted(items, key=repr) if isinstance(items, (set, frozenset)) else items:
            _feed(digest, item, seen)
    elif isinstance(value, functools.partial):
        _feed(digest, (value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        _feed(digest, (value.__func__, value.__self__), seen)
    elif isinstance(value, types.FunctionType) and str(value.__module__).split(".")[0] not in _OPAQUE:
        _feed_function(digest, value, seen)
    else:
        _feed_object(digest, value, seen)


def _feed_function(digest: Any, function: types.FunctionType, seen: dict[int, Any]) -> None:
    _feed_code(digest, function.__code__, seen)
    _feed(digest, (function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        _feed(digest, cell.cell_contents, seen)
    _feed_names(digest, _names(function.__code__), function.__globals__, seen)


def _feed_names(
    digest: Any, names: set[str], scope: Mapping[str, Any], seen: dict[int, Any], inside: tuple[Any, ...] = ()
) -> None:
    """The values of the names that the scope has; of a module of the user, the attributes that are among the names."""
    for name in sorted(names & scope.keys()):
        value = scope[name]
        _feed(digest, (name, value), seen)
        if isinstance(value, types.ModuleType) and _is_of_user(value) and value not in inside:
            _feed_names(digest, names, vars(value), seen, (*inside, value))


def _is_of_user(module: types.ModuleType) -> bool:
    """Whether a module is neither installed, nor part of Python, nor one of the packages that are not hashed."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if file is None or module.__name__.split(".")[0] in _OPAQUE:
        return False
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not path.is_relative_to(sysconfig.get_paths()["stdlib"])


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


def _feed_code(digest: Any, code: types.CodeType, seen: dict[int, Any]) -> None:
    digest.update(code.co_code)
    _feed(digest, code.co_names + code.co_varnames, seen)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(digest, constant, seen)
        else:
            _feed(digest, constant, seen)


def _feed_object(digest: Any, value: Any, seen: dict[int, Any]) -> None:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    digest.update(f"{getattr(value, '__module__', type(value).__module__)}.{name}".encode())
    if isinstance(value, type):  # a class of the user: its methods and constants, and those of its bases
        own = value.__module__.split(".")[0] not in _OPAQUE
        written = {k: v for k, v in vars(value).items() if k[:2] != "__" or k in ("__call__", "__post_init__")}
        _feed(digest, (written, value.__bases__) if own else (), seen)
    elif isinstance(value, (property, classmethod, staticmethod)):
        _feed(digest, value.fget if isinstance(value, property) else value.__func__, seen)
    elif not isinstance(value, (types.ModuleType, types.FunctionType)):
        _feed(digest, (type(value), dict(getattr(value, "__dict__", {}))), seen)

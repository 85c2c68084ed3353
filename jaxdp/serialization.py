"""Mechanisms as JSON text that every later release can read."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.mechanisms.base import Mechanism, not_a_mechanism

SCHEMA = 1
"""Version number of the JSON format. A release reads its own format and all formats with smaller numbers."""

_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# Modules with records that `import jaxdp` does not load.
_OTHER_MODULES = ("jaxdp.diffusion", "jaxdp.interop", "jaxdp.training")


def to_json(mechanism: Mechanism) -> str:
    """JSON text of a mechanism and of all mechanisms inside it.

    >>> jaxdp.to_json(jaxdp.Gaussian(2.0))
    '{"jaxdp": 1, "mechanism": {"class": "Gaussian", "noise_multiplier": 2.0}}'

    The 1 is the schema number. A finite number becomes a JSON number that reads back as the same float64. Infinities
    and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan". An array becomes a list of lists, an array
    without entries ``{"empty": shape}``.

    Raises TypeError if the argument is not a mechanism, holds a traced number, or its class is not part of jaxdp.
    """
    if not isinstance(mechanism, Mechanism):
        raise not_a_mechanism(mechanism)
    return json.dumps({"jaxdp": SCHEMA, "mechanism": _encoded("mechanism", mechanism)}, allow_nan=False)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object; ValueError for a repeated name, because readers differ in which value they take."""
    content = dict(pairs)
    if len(content) < len(pairs):
        repeated = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"text must have each name once in an object, got {repeated!r} twice.")
    return content


def from_json(text: str) -> Mechanism:
    """The mechanism in a text that `to_json` of this release or an older one wrote; equal to the original mechanism.

    Its numbers are checked when the mechanism is used, for example by `jaxdp.epsilon`.

    >>> jaxdp.from_json('{"jaxdp": 1, "mechanism": {"class": "Gaussian", "noise_multiplier": 2.0}}')
    Gaussian(noise_multiplier=2.0)

    Raises TypeError if text is not a string. Raises ValueError if it is not JSON or not a mechanism of jaxdp, and for
    an unknown schema number, an unknown class or field, or a missing field.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}.")
    try:
        content = json.loads(text, object_pairs_hook=_each_once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            "text must be the JSON of a mechanism, as jaxdp.to_json writes it (of a file, its content); "
            f"not JSON: {error}."
        ) from None
    if not isinstance(content, dict) or set(content) != {"jaxdp", "mechanism"}:
        raise ValueError('text must be {"jaxdp": schema number, "mechanism": {...}}, as jaxdp.to_json writes it.')
    schema = content["jaxdp"]
    if isinstance(schema, bool) or not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ValueError(
            f'schema number ("jaxdp") must be in 1..{SCHEMA}, got {schema!r}: this release cannot read the text. '
            "Install the release that wrote it, or a newer one."
        )
    mechanism = _decoded("mechanism", content["mechanism"], numeric=True)
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f'"mechanism" must be an object with a "class", got {content["mechanism"]!r}.')
    return mechanism


def _encoded(name: str, value: Any) -> Any:
    if isinstance(value, Mechanism):
        cls = type(value)
        if _loaded().get(cls.__name__) is not cls:
            raise TypeError(
                f"{name} must be of a class of jaxdp, got {cls.__name__}, which jaxdp.from_json could not read. "
                "Save the parameters of your own mechanisms in a format of your own."
            )
        fields = {each.name: _encoded(each.name, getattr(value, each.name)) for each in dataclasses.fields(cls)}
        return {"class": cls.__name__, **fields}
    if isinstance(value, tuple):
        return [_encoded(name, each) for each in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if validate.is_traced(value):
        raise TypeError(f"{name} is a traced number; call to_json outside jit, vmap and grad.")
    array = np.asarray(value)
    if array.dtype in (object, np.longdouble):  # fractions and the like
        array = validate.real_array(name, value)
    return strict(array.tolist()) if array.size else {"empty": list(array.shape)}


def strict(value: object) -> object:
    """A number or a nested list of numbers as JSON values; the strings "inf", "-inf" and "nan" for other numbers."""
    if isinstance(value, list):
        return [strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(name: str, value: Any, numeric: bool) -> Any:
    """The field value for a JSON value. numeric: whether the field holds numbers or mechanisms, not configuration."""
    if isinstance(value, dict):
        if set(value) != {"empty"}:
            return _record(name, value)
        shape = value["empty"]
        if not isinstance(shape, list) or 0 not in shape or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f'{name}: "empty" must be a shape, whole numbers >= 0 of which one is 0; got {shape!r}.')
        return np.zeros(shape)
    if isinstance(value, list) and all(isinstance(each, dict) and "class" in each for each in value):
        return tuple(_decoded(name, each, numeric) for each in value)
    if not numeric or value is None:
        return value
    if isinstance(value, list):
        try:
            array = np.array(_number(name, value))
        except ValueError:
            array = np.array(None)
        if array.dtype.kind not in "iufb":
            raise ValueError(f"{name} must be an array of numbers, every row as long as the others.")
        return array
    return _number(name, value)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_number(name, each) for each in value]
    if isinstance(value, str):
        if value not in _NOT_FINITE:
            raise ValueError(f"{name} must be a number, {', '.join(map(repr, _NOT_FINITE))}; got {value!r}.")
        return _NOT_FINITE[value]
    return value


def _record(name: str, content: dict[str, Any]) -> Mechanism:
    kind = content.get("class")
    cls = _loaded().get(kind) or records_by_name().get(kind) if isinstance(kind, str) else None
    if cls is None:
        known = sorted(each for each in records_by_name() if each[0] != "_")
        raise ValueError(f"{name}: unknown class {kind!r}; known: {', '.join(known)}.")
    fields = {each.name: each for each in dataclasses.fields(cls)}
    given = {key: value for key, value in content.items() if key != "class"}
    unknown, missing = sorted(set(given) - set(fields)), sorted(set(fields) - set(given))
    required = [key for key in missing if fields[key].default is dataclasses.MISSING]
    if unknown or required:
        wrong = [f"unknown field {key!r}" for key in unknown] + [f"missing field {key!r}" for key in required]
        raise ValueError(f"{kind}: {', '.join(wrong)}; its fields are {', '.join(fields)}.")
    values = {key: _decoded(key, value, not fields[key].metadata.get("static")) for key, value in given.items()}
    for key, value in values.items():
        if fields[key].type == "Mechanism" and not isinstance(value, Mechanism):
            raise ValueError(f'{kind}: {key} must be an object with a "class", got {content[key]!r}.')
        parts = value if isinstance(value, tuple) else (None,)
        if fields[key].type == "tuple[Mechanism, ...]" and not all(isinstance(part, Mechanism) for part in parts):
            raise ValueError(f'{kind}: {key} must be a list of objects with a "class", got {content[key]!r}.')
    return cls(**values)


def records_by_name() -> dict[str, type[Mechanism]]:
    """All record classes of jaxdp, by class name."""
    for module in _OTHER_MODULES:
        importlib.import_module(module)
    return _loaded()


def _loaded() -> dict[str, type[Mechanism]]:
    """The record classes of the modules imported so far."""
    classes: list[type[Mechanism]] = [Mechanism]
    for cls in classes:  # the list grows: subclasses of subclasses follow
        classes += cls.__subclasses__()
    ours = (cls for cls in classes if cls.__module__.startswith("jaxdp."))
    return {cls.__name__: cls for cls in ours if "__dataclass_fields__" in vars(cls)}

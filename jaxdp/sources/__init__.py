"""The choice of routes: which sources of bounds answer for which mechanism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxdp.mechanisms.allocation import RandomAllocation
from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import Stack, flat_rows, flatten, is_gaussian, normal_form
from jaxdp.mechanisms.shuffled import Shuffled
from jaxdp.mechanisms.truncated import TruncatedPoisson
from jaxdp.sources.allocation import epoch_route, epochs_route
from jaxdp.sources.base import Route
from jaxdp.sources.contour import contour_route
from jaxdp.sources.gaussian import gaussian_route
from jaxdp.sources.shuffled_rounds import rounds_route
from jaxdp.sources.shuffling import shuffled_route
from jaxdp.sources.truncated import truncated_route


def choose_routes(mechanism: Mechanism, directions: Sequence[str], shape: tuple[int, ...]) -> list[Route]:
    """One route for each direction of a mechanism. All hold the same parameters: broadcast to ``shape``, then flat."""
    atoms = flatten(mechanism)
    if len(atoms) == 1 and isinstance(atoms[0][0], Shuffled) and isinstance(atoms[0][1], int) and atoms[0][1] == 1:
        return [shuffled_route(atoms[0][0], shape) for _ in directions]
    record, times = atoms[0] if len(atoms) == 1 else (None, 0)
    if isinstance(record, RandomAllocation) and record.is_once() and isinstance(times, int) and times == 1:
        return [epoch_route(flat_rows(record, shape), direction) for direction in directions]
    stacks = normal_form(mechanism, shape)
    if is_gaussian(mechanism):
        return [gaussian_route(stacks) for _ in directions]
    if any(isinstance(record, RandomAllocation) for record, _ in stacks):
        return [epochs_route(stacks, direction) for direction in directions]
    route: Callable[[tuple[Stack, ...], str], Route] = contour_route
    for kind, other in ((TruncatedPoisson, truncated_route), (Shuffled, rounds_route)):
        route = other if any(isinstance(record, kind) for record, _ in stacks) else route
    return [route(stacks, direction) for direction in directions]

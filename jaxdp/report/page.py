"""The HTML of the page: one function per section, which puts the facts into words and tables."""

import ast
import dataclasses
import html
import inspect
import math
import platform
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import everything, held
from jaxdp.mechanisms.text import as_text
from jaxdp.report.facts import Facts
from jaxdp.report.figures import Curve, figure
from jaxdp.report.style import STYLE
from jaxdp.report.text import factor, number, outward, percent
from jaxdp.runtime import backend

_RATES = {"0.1 %": 1e-3, "1 %": 1e-2, "10 %": 0.1}
_NEIGHBOURS = {
    "add": ("D′ is D with one more person's record", "adding one person's record"),
    "remove": ("D′ is D without one person's record", "removing one person's record"),
    "add_or_remove": (
        "D′ is D with one person's record added, or with one removed",
        "adding or removing one person's record",
    ),
    "replace_one": (
        "D′ is D with one person's record replaced by any other",
        "replacing one person's record by any other",
    ),
}
_ONE_ORDER = (
    "The statement is for this order of D and D′ only, as the relation asks; it says nothing about the other order."
)
_ASSUMED = (
    "The program that ran is the mechanism described above, with these parameters.",
    "A record is all that one person contributed. A person with several records may be protected less.",
    "The random numbers are secret, independent of the data, and follow the stated distributions exactly. What a "
    "program loses there by limited precision is not counted here.",
    "The parameters were chosen without looking at the data.",
    "Nothing else that depends on the data is released. Further releases have to be accounted together with this one.",
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(facts: Facts) -> str:
    """The HTML text of the page. It loads nothing, and its content security policy forbids the browser to."""
    sections = (_summary, _guarantee, _attack, _curves, _description, _assumptions, _reproduction)
    body = "\n".join(section(facts) for section in sections)
    names = dict.fromkeys(type(each).__name__ for each in everything(facts.mechanism))
    title = f"Privacy report: {', '.join(name for name in names if name not in ('Repeated', 'Composed'))}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{_safe(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _safe(text: object) -> str:
    return html.escape(str(text))


def _near(share: float) -> str:
    return f"{100 * share:.2f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], own: int) -> str:
    """An HTML table. own: index of the column that is highlighted."""
    heads = "".join(f"<th>{each}</th>" for each in head)
    body = ""
    for row in rows:
        body += "<tr>" + "".join(f"<td{' class=own' * (i == own)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _bounds_table(name: str, given: str, points: np.ndarray, lower: Any, upper: Any) -> str:
    rows = [
        (number(_typed(point)), number(outward(low, False, 9)), number(outward(high, True, 9)))
        for point, low, high in zip(points, np.ravel(lower), np.ravel(upper), strict=True)
    ]
    return _table((given, f"{name}, certified lower bound", f"{name}, certified upper bound"), rows, own=2)


def _typed(value: Any) -> str:
    """A number that the caller gave, with all its digits."""
    return repr(float(value)).removesuffix(".0")


def _headline(facts: Facts) -> tuple[str, str]:
    """The first certified (epsilon, delta) as text; the computed number of the two is rounded up."""
    epsilon, delta = facts.pairs[0]
    if facts.target == "delta":
        return outward(epsilon, True, 6), _typed(delta)
    return _typed(epsilon), outward(delta, True, 6)


def _is_void(facts: Facts) -> bool:
    epsilon, delta = facts.pairs[0]
    return epsilon == math.inf or delta >= 1


def _summary(facts: Facts) -> str:
    epsilon, delta = map(number, _headline(facts))
    holds = f"the certified guarantee, for {_NEIGHBOURS[facts.relation][1]}"
    if _is_void(facts):
        holds = "no guarantee: every program meets it"
    return (
        "<h1>Privacy report</h1><p>How much can the results of a computation give away about one person whose record "
        "it used? This page says how much at most, with proof, provided that what stands under “What has to be true” "
        f'is true.</p><div class="cards"><div class="card"><b>ε = {epsilon}, δ = {delta}</b><span>{holds}'
        f'</span></div><div class="card"><b>at most '
        f"{percent((1 + Fraction(facts.total.upper)) / 2)}</b><span>how often the best possible attacker guesses right "
        "which of two such data sets was used, where a coin is right 50 % of the time</span></div></div>"
    )


def _guarantee(facts: Facts) -> str:
    epsilon, delta = _headline(facts)
    plain = f"with ε = {number(epsilon)} and δ = {number(delta)}."
    if not _is_void(facts):
        ratio = factor(epsilon) if float(epsilon) <= 20 else f"e<sup>{epsilon}</sup>"
        plain += (
            " In words: whatever one looks for in the results, its probability with D is at most "
            f"<b>{ratio} times</b> its probability with D′{f', plus {number(delta)}' * (float(delta) > 0)}."
        )
    order = "D and D′ may be exchanged: the statement holds in both orders." if facts.symmetric else _ONE_ORDER
    meaning = (
        "It holds against attackers with any computing power and any knowledge of the other records, and after any "
        "later processing of the results. It limits what the results give away about one person beyond what they "
        "would give away had that record been otherwise; what is true of people in general can still be learned."
    )
    name, given = ("ε", "δ") if facts.target == "delta" else ("δ", "ε")
    reading = (
        f"The smallest {name} for which the statement is true lies between the two bounds, all errors of arithmetic "
        "counted. The upper bound is the guarantee. The lower bound limits what a better analysis could still gain, in "
        "the worst case that the description of the mechanism allows; 0 says that no positive one is known. Printed "
        "bounds are rounded outward."
    )
    return (
        f"<h2>The guarantee</h2><p>Take any two data sets D and D′ such that {_NEIGHBOURS[facts.relation][0]}, and any "
        'set S of possible results. Then</p><p class="formula">Pr[result from D is in S] ≤ e<sup>ε</sup> · '
        f"Pr[result from D′ is in S] + δ</p><p>{plain} {order}</p><p>{meaning}</p>"
        f'{_bounds_table(name, given, facts.targets, *facts.bounds)}<p class="note">{reading}</p>'
    )


def _attack(facts: Facts) -> str:
    epsilon = facts.pairs[0][0]
    total = Fraction(facts.total.upper)
    rows = [
        ["Guesses right, D and D′ equally likely", percent((1 + total) / 2), _near(_truth(epsilon)), "50.00 %"],
        ["Advantage: true minus false positive rate", percent(total), _near(2 * _truth(epsilon) - 1), "0.00 %"],
    ]
    for text, rate in _RATES.items():
        found = percent(1 - Fraction(float(facts.missed(rate))))
        response = min(math.exp(min(epsilon, 700.0)) * rate, 1 - math.exp(-epsilon) * (1 - rate))
        rows.append([f"Recognises D, at {text} false positives", found, _near(response), _near(rate)])
    head = ["The best attacker", "This mechanism, at most", "Randomized response, same ε", "Perfect privacy"]
    reference = (
        "<p>Randomized response with the same ε is a familiar yardstick: each person answers one yes-or-no question, "
        f"truthfully with probability e<sup>ε</sup>/(1 + e<sup>ε</sup>) = {_near(_truth(epsilon))} and with the "
        "opposite answer otherwise. No mechanism with this ε and δ = 0 makes D and D′ easier to tell apart.</p>"
    )
    if not math.isfinite(epsilon):
        for row in (head, *rows):
            del row[2]
        reference = ""
    least = percent((1 + Fraction(facts.total.lower)) / 2, upward=False)
    worst = f" In the worst case that the description allows, some attacker is right at least {least} of the time."
    return (
        "<h2>What an attacker can do</h2><p>This attacker sees all results and knows every record of D and of D′. One "
        "question is left: did the results come from D or from D′? A <b>false positive</b> is the answer “D” where it "
        "was D′; a <b>false negative</b> is the answer “D′” where it was D. Whoever knows less can do no better."
        f"{worst * (facts.total.lower > 0)}</p>{_table(head, rows, own=1)}{reference}"
    )


def _truth(epsilon: float) -> float:
    """Probability e^epsilon / (1 + e^epsilon) of the true answer in randomized response."""
    return 1 / (1 + math.exp(-epsilon))


def _curves(facts: Facts) -> str:
    grid = facts.grid
    table = _bounds_table("δ", "ε", grid, *facts.profile)
    return (
        '<h2>The whole picture</h2><p class="note">Each curve joins certified points by straight lines; the points are '
        f'certified, the lines between them guide the eye.</p><div class="figures">{_profile_figure(facts)}'
        f"{_tradeoff_figure(facts)}</div><details><summary>The {grid.size} certified points of the privacy profile"
        f"</summary>{table}</details>"
    )


def _profile_figure(facts: Facts) -> str:
    shown = facts.grid >= 0
    grid, lower, upper = facts.grid[shown], facts.profile.lower[shown], facts.profile.upper[shown]
    curves = [Curve("this mechanism, certified upper bound", "own", grid, upper)]
    if lower.any() and np.any(upper > 1.02 * lower):
        curves.append(Curve("certified lower bound", "lower", grid, lower))
    epsilon = facts.pairs[0][0]
    if math.isfinite(epsilon):
        x = np.linspace(0.0, min(epsilon, grid[-1]), 200)
        curves.append(Curve("randomized response, same ε", "reference", x, -np.expm1(x - epsilon) * _truth(epsilon)))
    marks = [(e, d) for e, d in facts.pairs if math.isfinite(e) and d > 0]
    smallest = min([d for _, d in marks] or [max(float(upper[upper > 0].min(initial=1.0)), 1e-12)])
    bottom = 10.0 ** (math.floor(math.log10(max(smallest, 1e-250))) - 1)
    caption = (
        "Privacy profile: the δ that is certified at each ε. Lower is more private; perfect privacy is δ = 0 "
        "everywhere. Dots are the guarantees of the table above."
    )
    x_axis, y_axis = ("ε", 0.0, float(grid[-1])), ("δ", bottom, 1.0)
    return figure("Privacy profile", x_axis, y_axis, curves, caption, marks, logarithmic=True)


def _tradeoff_figure(facts: Facts) -> str:
    t = np.linspace(0.0, 1.0, 81)
    rates = t * t * (3 - 2 * t)
    curves = [Curve("this mechanism, certified lower bound", "own", rates, facts.missed(rates))]
    epsilon = facts.pairs[0][0]
    if math.isfinite(epsilon):
        corners = np.array([0.0, 1 - _truth(epsilon), 1.0])
        curves.append(Curve("randomized response, same ε", "reference", corners, corners[::-1]))
    ends = np.array([0.0, 1.0])
    curves.append(Curve("perfect privacy: no better than guessing", "perfect", ends, ends[::-1]))
    caption = (
        "Trade-off curve: no attacker has a smaller false negative rate than this at any false positive rate. Higher "
        "is more private."
    )
    x_axis, y_axis = ((f"false {kind} rate", 0.0, 1.0) for kind in ("positive", "negative"))
    return figure("Trade-off curve", x_axis, y_axis, curves, caption)


def _description(facts: Facts) -> str:
    theorem = ""
    if facts.theorem:
        theorem = f"<p>Theorem behind the upper bounds of shuffling: <b>{_safe(facts.theorem)}</b>."
        theorem += " “stronger” is proved in jaxdp's notebooks and not peer reviewed." * ("stronger" in facts.theorem)
        theorem += "</p>"
    return f"<h2>What runs on the data</h2><ul>{_tree(facts.mechanism)}</ul>{theorem}"


def _tree(mechanism: Mechanism) -> str:
    """A list item: the class of the record, the first sentence of its docstring, its numbers, the mechanisms in it."""
    values = ((each.name, getattr(mechanism, each.name)) for each in dataclasses.fields(mechanism))
    numbers = ", ".join(
        f"<code>{_safe(name)} = {_safe(_brief(value))}</code>"
        for name, value in values
        if value is not None and not isinstance(value, (Mechanism, tuple))
    )
    inner = "".join(map(_tree, held(mechanism)))
    said = re.split(r"(?<=[.:])\s", _docstring(mechanism), maxsplit=1)[0].rstrip(":.")
    return (
        f"<li><b>{_safe(type(mechanism).__name__)}</b>{': ' if said else ''}{_prose(said)}"
        f"{'<br>' if numbers else ''}{numbers}{f'<ul>{inner}</ul>' if inner else ''}</li>"
    )


def _brief(value: Any) -> str:
    array = np.asarray(value)
    return as_text(value) if array.size <= 8 else f"{array.size} numbers from {array.min():g} to {array.max():g}"


def _docstring(mechanism: Mechanism) -> str:
    return inspect.cleandoc(type(mechanism).__doc__ or "")


def _prose(text: str) -> str:
    """HTML of docstring text; literals in backquotes become <code>."""
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", _safe(" ".join(text.split())))


def _assumptions(facts: Facts) -> str:
    own = {}
    for each in everything(facts.mechanism):
        found = re.search(r"^Assumes[:,] ?(.*?)(?:\n\n|\Z)", _docstring(each), re.DOTALL | re.MULTILINE)
        if found:
            own[type(each).__name__] = found[1]
    items = [f"<li>{_safe(text)}</li>" for text in _ASSUMED]
    items += [f"<li><b>{_safe(name)}</b>: {_prose(text)}</li>" for name, text in own.items()]
    return (
        "<h2>What has to be true</h2><p>The bounds are theorems about the mechanism as described. The numbers cannot "
        f"show whether the following is true; it is for this review to ask.</p><ul>{''.join(items)}</ul>"
    )


def _reproduction(facts: Facts) -> str:
    import jaxdp

    text = repr(facts.mechanism)
    names = {each.id for each in ast.walk(ast.parse(text, mode="eval")) if isinstance(each, ast.Name)}
    targets = as_text(facts.targets if facts.targets.size > 1 else facts.targets[0])
    verb = "epsilon_bounds" if facts.target == "delta" else "delta_bounds"
    call = (
        f"import jaxdp\nfrom jaxdp import {', '.join(sorted(names & set(dir(jaxdp))))}\n\nmechanism = {text}\n"
        f"print(jaxdp.{verb}(mechanism, {targets}, relation={facts.relation!r}))\n"
        f"page = jaxdp.report(mechanism, {facts.target}={targets}, relation={facts.relation!r})"
    )
    digits = "".join(
        f"<li>{name}: <code>{_safe(as_text(side if side.size > 1 else side[0]))}</code></li>"
        for name, side in zip(("lower", "upper"), map(np.atleast_1d, facts.bounds), strict=True)
    )
    versions = (
        f"jaxdp {jaxdp.__version__}, jax {jax.__version__}, jaxlib {jax.lib.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, backend {backend.platform()}, "
        f"machine {sys.platform} {platform.machine()}"
    )
    return (
        f"<h2>How to compute it again</h2><pre>{_safe(call)}</pre><p>All digits of the bounds, as computed here:</p>"
        f'<ul>{digits}</ul><p class="note">{_safe(versions)}</p>'
    )

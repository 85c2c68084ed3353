"""Numbers as text for people. A bound is never rounded to the side on which it would be false."""

import decimal
import math
from fractions import Fraction

_PRECISE = decimal.Context(prec=40)


def outward(value: float, upward: bool, digits: int) -> str:
    """The value rounded to ``digits`` significant digits, up, or down where ``upward`` is False."""
    if not math.isfinite(value):
        return str(value)
    rounding = decimal.ROUND_CEILING if upward else decimal.ROUND_FLOOR
    return f"{float(decimal.Context(prec=digits, rounding=rounding).create_decimal(value)):.{digits}g}"


def percent(share: Fraction, upward: bool = True) -> str:
    """A share between 0 and 1 in percent, rounded to 0.01 %, up, or down where ``upward`` is False."""
    hundredths = share * 10_000
    return f"{(math.ceil(hundredths) if upward else math.floor(hundredths)) / 100:.2f} %"


def factor(epsilon: str) -> str:
    """e^epsilon rounded up to four digits."""
    exact = decimal.Decimal(epsilon).exp(_PRECISE).next_plus(_PRECISE)
    return f"{decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).plus(exact):f}"


def number(text: str) -> str:
    """HTML of a number such as "1e-06", shown with a power of ten; the plain text is its machine-readable value."""
    shown = text.replace("inf", "∞").replace("-", "−")
    if "e" in text:
        mantissa, exponent = text.split("e")
        power = f"10<sup>{str(int(exponent)).replace('-', '−')}</sup>"
        shown = power if mantissa == "1" else f"{mantissa.replace('-', '−')}·{power}"
    return f'<data value="{text}">{shown}</data>'

"""Numbers as text for people, never rounded to the side on which a bound would be false."""

import decimal
import math
from fractions import Fraction

_PRECISE = decimal.Context(prec=40)


def outward(value: float, upward: bool, digits: int) -> str:
    """The number in so many digits, not below it (not above it where ``upward`` is False)."""
    if not math.isfinite(value):
        return str(value)
    rounding = decimal.ROUND_CEILING if upward else decimal.ROUND_FLOOR
    return f"{float(decimal.Context(prec=digits, rounding=rounding).create_decimal(value)):.{digits}g}"


def percent(share: Fraction, upward: bool = True) -> str:
    """A share between 0 and 1 in hundredths of a percent, not below it (not above it)."""
    hundredths = share * 10_000
    return f"{(math.ceil(hundredths) if upward else math.floor(hundredths)) / 100:.2f} %"


def factor(epsilon: str) -> str:
    """e^epsilon in four digits, not below it."""
    exact = decimal.Decimal(epsilon).exp(_PRECISE).next_plus(_PRECISE)
    return f"{decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).plus(exact):f}"


def number(text: str) -> str:
    """HTML of a number, with powers of ten as people write them and the plain text as its value."""
    shown = text.replace("inf", "∞").replace("-", "−")
    if "e" in text:
        mantissa, exponent = text.split("e")
        power = f"10<sup>{str(int(exponent)).replace('-', '−')}</sup>"
        shown = power if mantissa == "1" else f"{mantissa.replace('-', '−')}·{power}"
    return f'<data value="{text}">{shown}</data>'

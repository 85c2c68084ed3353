"""How bad input is refused."""

import contextlib
import re

import pytest


@contextlib.contextmanager
def refused_in_one_line(error, match):
    """As `pytest.raises`; the message is one line: a sentence that says what is wrong, and at most one with advice."""
    with pytest.raises(error, match=match) as raised:
        yield
    message = str(raised.value)
    assert re.fullmatch(r"[^\n]+\.", message) and len(re.findall(r"\. [A-Z]", message)) <= 1, message

"""Sphinx: pages in Markdown, notebooks by their stored outputs, formulas as MathML; nothing is fetched or executed."""

import importlib.metadata
import re

import latex2mathml.converter
from docutils import nodes

project = "jaxdp"
author = "The jaxdp authors"
release = importlib.metadata.version("jaxdp-accounting")
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
default_role = "literal"
html_theme = "sphinx_book_theme"
html_title = "jaxdp"
html_math_renderer = "mathml"
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "navbar_persistent": []}
html_static_path = ["static"]
html_css_files = ["formulas.css"]
html_copy_source = False

_ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")
_LITERAL = re.compile(r"(``.*?``|`[^`]*`)")


def visit_inline(self, node: nodes.math) -> None:
    """One formula within a line."""
    self.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def visit_block(self, node: nodes.math_block) -> None:
    """One formula on lines of its own; wide ones scroll."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    self.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Assumes|Reference|Example):")


def to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Our docstrings as reStructuredText: arguments become a list, indented formulas stay as they are typed."""
    out, state, inside = [], "", False
    for line in "\n".join(lines).split("\n"):
        section = _SECTION.fullmatch(line)
        if section:
            out += ["", f"**{section[1]}**", ""]
            state, inside = "", True
            continue
        inside = inside and (line.startswith("    ") or not line.strip())
        line = line[4:] if inside else line
        argument = _ARGUMENT.fullmatch(line)
        if not line.strip():
            out.append("")
            state = ""
        elif line.startswith(">>> ") or state == "doctest":
            out += [""] * (state != "doctest") + [line]
            state = "doctest"
        elif argument:
            out += [""] * (state != "argument") + [f"* **{argument[1]}**: {escape(argument[2])}"]
            state = "argument"
        elif state == "argument" and (line.startswith(" ") or not line[0].isupper()):
            out.append("  " + escape(line.strip()))
        elif line.startswith(" "):
            out += ["", "::", ""] * (state != "formula") + ["    " + line]
            state = "formula"
        else:
            out += [""] * (state in ("argument", "formula")) + [escape(line)]
            state = "text"
    lines[:] = out


def escape(line: str) -> str:
    """Bars, stars and trailing underscores mean themselves outside of literals."""
    parts = _LITERAL.split(line)
    return "".join(p if i % 2 else re.sub(r"([|*\\]|_(?=\W|$))", r"\\\1", p) for i, p in enumerate(parts))


def setup(app) -> None:
    """Formulas are MathML, which browsers draw by themselves; docstrings are read as they are written."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("autodoc-process-docstring", to_rst)

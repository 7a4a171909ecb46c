"""How Sphinx makes the site of README.md and docs/; scripts/docs.sh runs it.

The source folder is the repository, so that the pages' links are right on a forge and on the site.
"""

import inspect
import pathlib
import re
import sys

from sphinx.util import logging

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs/tools"))

import undocumented  # noqa: E402

project = "FlashDSA"
version = re.search(r"project\(flashdsa VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md"]
exclude_patterns = ["build*", ".git"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]

html_theme = "furo"
html_title = f"FlashDSA {version}"
html_copy_source = False
pygments_dark_style = "monokai"

breathe_projects = {"flashdsa": str(ROOT / "build/docs/doxygen/xml")}
breathe_default_project = "flashdsa"
suppress_warnings = ["duplicate_declaration.cpp"]  # the namespace, which every header opens

# Docstrings are read without the compiled module and without what the package computes on.
autodoc_mock_imports = ["ml_dtypes", "numpy", "torch", "tvm_ffi"]
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def add_pages(app, name, source):
    """The pages that README.md lists are those of the site, in that order."""
    if name == root_doc:
        listed = re.findall(r"\]\((docs/\w+)\.md\)", source[0].partition("\n## Pages\n")[2])
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *listed, "```", ""])


def check_docstring(app, what, name, obj, options, lines):
    for fault in undocumented.faults(obj, inspect.cleandoc("\n".join(lines))):
        logging.getLogger(__name__).warning("%s: %s", name, fault)


def setup(app):
    app.connect("source-read", add_pages)
    app.connect("autodoc-process-docstring", check_docstring, priority=100)  # as it was written

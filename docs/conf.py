"""Sphinx: ``make docs``. The API reference comes from the docstrings, the other pages are the Markdown files here."""

import memlean

project = "memlean"
author = "the memlean authors"
version = release = memlean.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"page_width": "75rem", "description": "log-probability and entropy without the vocabulary"}
html_copy_source = False
html_show_copyright = False
default_role = "any"  # `patch` is a reference
autodoc_typehints = "none"  # the signature has them, the text says shapes and dtypes
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
myst_heading_anchors = 3
nitpick_ignore = [("py:class", "torch.Tensor")]  # in torch's own documentation

"""Sphinx builds the documentation site from this folder: `make docs`."""

from llmtrain.versions import __version__

project = "llmtrain"
author = "the llmtrain authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx_copybutton",  # a button that copies a block of code
]
exclude_patterns = ["_build", "notebook.ipynb", "migrate"]
nitpicky = False

# Links such as guides/machines.md#which-config, which also work in the repository.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

highlight_language = "none"  # of blocks that name no language
smartquotes = False  # it would turn --flag into a dash

html_theme = "furo"
html_title = f"llmtrain {__version__}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

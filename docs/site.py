"""A hook of mkdocs: pages lie in the site as in the repository, so that one link is right in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = (
    "*.md",
    "docs/**/*.md",
    "docs/img/*",
    "docs/js/*.js",
    "docs/css/*.css",
    "deploy/*.md",
    "bench/results/*.md",
    "bench/results/*.png",
)


def on_files(files: Files, config: Any) -> Files:
    """In the place of those under docs/: all pages of the repository; the theme's own files stay."""
    found = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    ours = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in found]
    return Files([*ours, *(file for file in files if file.src_dir != config.docs_dir)])

"""The text of every page of the documents, by its path in the repository."""

from __future__ import annotations

from tests.support.sources import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}

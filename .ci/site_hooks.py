"""What the built site has beyond the pages in docs/: the repository's own pages, and each command's real --help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md", "readme.md": "README.md"}
COMMAND = re.compile(r"^## `attn-oracle ([a-z ]+)`$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's pages, their links turned towards the site's."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text.replace("](docs/", "](").replace("](LICENSE)", "](#)")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to the repository's pages lead to the site's; the command line's reference shows what --help prints."""
    for name, source in PAGES.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})").replace(f"]({source})", f"]({name})")
    if page.file.src_uri != "cli.md":
        return markdown
    return COMMAND.sub(lambda found: f"{found[0]}\n\n{_help(found[1])}", markdown)


def _help(command: str) -> str:
    start = "import sys; from fuzz.cli import main; sys.argv[0] = 'attn-oracle'; sys.exit(main())"
    printed = subprocess.run(
        [sys.executable, "-c", start, *command.split(), "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "94", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return f"```text\n{printed.strip()}\n```\n"

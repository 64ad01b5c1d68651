"""Check the Markdown files: relative links resolve, and docs/cli.md has the commands and options of the code.

Prints one line for each fault and exits 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMAND = re.compile(r"^## `attn-oracle ([a-z ]+)`$", re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    """One line for each link of `page` to a missing file or heading; other sites are not asked."""
    faults = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            faults.append(f"{page.relative_to(ROOT)}: no such file: {link}")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            faults.append(f"{page.relative_to(ROOT)}: no such heading: {link}")
    return faults


def documented(text: str) -> dict[str, set[str]]:
    """Command to options, as the reference has them: a section for each command, options in backticks."""
    parts = COMMAND.split(text)
    return {
        name: set(OPTION.findall(" ".join(re.findall(r"^- `(.+?)`", body.split("\n## ")[0], re.MULTILINE))))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def implemented(group: Any, prefix: str = "") -> dict[str, list[set[str]]]:
    """Command to options, as the code has them: for each option its spellings (`--ledger`, `--no-ledger`)."""
    found: dict[str, list[set[str]]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= implemented(command, f"{prefix}{name} ")
        else:
            spellings = [
                {flag for flag in [*param.opts, *param.secondary_opts] if flag.startswith("--")}
                for param in command.params
            ]
            found[prefix + name] = [flags for flags in spellings if flags and "--help" not in flags]
    return found


def differences(docs: dict[str, set[str]], code: dict[str, list[set[str]]]) -> list[str]:
    """One line for each command or option that only one side has; an option needs one of its spellings."""
    faults = [f"docs/cli.md: `{name}` is not a command" for name in sorted(docs.keys() - code.keys())]
    faults += [f"docs/cli.md: the command `{name}` is missing" for name in sorted(code.keys() - docs.keys())]
    for name in sorted(docs.keys() & code.keys()):
        unknown = docs[name].difference(*code[name])
        faults += [f"docs/cli.md: `{name}` has no option {flag}" for flag in sorted(unknown)]
        missing = [min(flags, key=len) for flags in code[name] if not flags & docs[name]]
        faults += [f"docs/cli.md: `{name}` lacks the option {flag}" for flag in missing]
    return faults


def command_line_faults() -> list[str]:
    if not (ROOT / "fuzz" / "cli.py").exists() and not (ROOT / "fuzz" / "cli").exists():
        print("not checked: docs/cli.md against the code, which has no command line yet")
        return []
    import typer

    from fuzz import cli

    app = next(value for value in vars(cli).values() if isinstance(value, typer.Typer))
    return differences(documented((ROOT / "docs" / "cli.md").read_text()), implemented(typer.main.get_command(app)))


def main() -> int:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    faults = [fault for page in pages for fault in broken_links(page)] + command_line_faults()
    for fault in faults:
        print(fault)
    print(f"{len(pages)} pages, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

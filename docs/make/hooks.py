"""Hooks of the site: the API reference, pages that lie beside docs/, and pages that the navigation does not name.

mkdocs calls these functions; nothing is written but the site.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "docs" / "make"))
sys.path.insert(0, str(ROOT))

from reference import pages_of  # noqa: E402 - found beside this file

BESIDE = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""Pages of the site that are in the root of the repository, where people look for them."""

SHOWN = (".py", ".toml", ".md", ".txt", ".in", ".csv", "")
"""Suffixes of files whose text is shown on a page of its own."""

TOPICS = "Guides"
"""Section of pages that the navigation does not name, so that a new page is never lost."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Name in the navigation what it does not name itself."""
    reference = next(item for item in config.nav if "Reference" in item)
    reference["Reference"] = [*reference["Reference"][:1], *({page.title: page.path} for page in pages_of(ROOT))]
    named = {path for item in config.nav for path in _paths(item)}
    found = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).rglob("*.md"))]
    left = [path for path in found if path not in named and not path.startswith("make/")]
    if left:
        config.nav.insert(3, {TOPICS: left})
    return config


def _paths(item: Any) -> list[str]:
    if isinstance(item, str):
        return [item]
    values = item.values() if isinstance(item, dict) else item
    return [path for value in values for path in _paths(value)]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made and those that lie elsewhere."""
    for page in pages_of(ROOT):
        files.append(File.generated(config, page.path, content=page.text))
    for source in _linked_files(Path(config.docs_dir)):
        kind = {".py": "python", ".toml": "toml", ".json": "json"}.get(source.suffix, "")
        text, title = source.read_text(encoding="utf-8"), source.relative_to(ROOT).as_posix()
        content = f"---\nsearch:\n  exclude: true\n---\n\n# `{title}`\n\n````{kind}\n{text}\n````\n"
        file = File.generated(config, f"files/{title}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(file)
    for name in BESIDE:
        if (ROOT / name).exists():
            files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def _linked_files(docs: Path) -> list[Path]:
    """Return the files outside of docs/ that pages link to: each becomes a page with its text."""
    found = set()
    for page in [*docs.rglob("*.md"), *(ROOT / name for name in BESIDE)]:
        for _, _, target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if "://" not in target and path.is_file() and path.suffix in SHOWN and not path.is_relative_to(docs):
                found.add(path)
    return sorted(found - {ROOT / name for name in BESIDE})


def _ranked(here: str) -> dict[str, Any]:
    """Options of the search for a page: readers look for guides and for names of the reference, seldom for an old change."""
    if here in BESIDE:
        return {"exclude": True}
    boost = {"reference/extend.md": 0.5, "reference/write-a-federated-method.md": 0.5}.get(here)
    return {"boost": boost or 2} if here.startswith("reference/") else {}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links into the repository lead to pages, those of files included; other names of files are plain."""
    here = page.file.src_uri
    beside = here in BESIDE
    page.meta.setdefault("search", _ranked(here))
    if here.startswith(("files/", "reference/")):
        return markdown
    if 8 * "|---" in markdown:  # a table of eight columns needs the width of the window
        page.meta.setdefault("hide", ["navigation", "toc"])

    def turned(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        if re.match(r"[a-z]+:|/", target):
            return found[0]
        folder = ROOT if beside else Path(config.docs_dir, here).parent
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT):
            return found[0]
        try:
            source = path.relative_to(config.docs_dir).as_posix()
        except ValueError:
            source = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(f"files/{source}.md") is not None:
            source = f"files/{source}.md"
        if files.get_file_from_path(source) is None:
            return found[0] if picture or not path.exists() else f"`{path.relative_to(ROOT).as_posix()}`"
        steps = [".."] * (len(Path(here).parts) - 1)
        return f"{picture}[{text}]({'/'.join([*steps, source])}{anchor or ''})"

    # Not in code, where brackets and parentheses are something else.
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(block if block.startswith("```") else _LINK.sub(turned, block) for block in blocks)

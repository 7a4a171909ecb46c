"""Checks that README.md or a page of docs/ quotes every program of docs/examples as it stands, and
that no relative link of these pages leads nowhere.

Prints one line per fault and exits 1 when there is one.
"""

import pathlib
import re
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def broken_links(page: pathlib.Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [f"{page.name}: link to {target}, which does not exist"
            for target in LINK.findall(text)
            if "://" not in target and not (page.parent / target).exists()]


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def unquoted_examples(root: pathlib.Path) -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in pages(root))
    examples = sorted((root / "docs/examples").glob("*.cc"))
    if not examples:
        return ["docs/examples: expected programs, got none"]
    return [f"docs/examples/{example.name}: no page quotes it as it stands"
            for example in examples
            if f"```cpp\n{example.read_text(encoding='utf-8')}```\n" not in text]


def faults(root: pathlib.Path) -> list[str]:
    found = unquoted_examples(root)
    for page in pages(root):
        found += broken_links(page)
    return found


def main() -> int:
    found = faults(pathlib.Path(sys.argv[1]))
    print("\n".join(found) if found else "links and examples are right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

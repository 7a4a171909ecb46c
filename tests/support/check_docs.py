"""Checks that README.md quotes every program of docs/examples as it stands, and that no relative
link of README.md or docs/*.md leads nowhere.

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


def unquoted_examples(root: pathlib.Path) -> list[str]:
    readme = (root / "README.md").read_text(encoding="utf-8")
    examples = sorted((root / "docs/examples").glob("*.cc"))
    if not examples:
        return ["docs/examples: expected programs, got none"]
    return [f"README.md: does not quote docs/examples/{example.name} as it stands"
            for example in examples
            if f"```cpp\n{example.read_text(encoding='utf-8')}```\n" not in readme]


def faults(root: pathlib.Path) -> list[str]:
    found = unquoted_examples(root)
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        found += broken_links(page)
    return found


def main() -> int:
    found = faults(pathlib.Path(sys.argv[1]))
    print("\n".join(found) if found else "links and examples are right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

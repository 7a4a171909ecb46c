"""Checks that every sentence which docs/troubleshooting.md explains stands in the sources, and that
its table of the metadata's status has the enumerators of the header.

A sentence is an item of a list, alone on its line: "- `<operation>: out of memory`". What varies
stands between angle brackets there, and is a field of a format string or an f-string in the
sources; the rest must be equal. The operation in front may come from elsewhere. The section of
other programs' sentences is left out.

Prints one line per fault and exits 1 when there is one.
"""

import ast
import pathlib
import re
import sys

FIELD = "\0"
SENTENCE = re.compile(r"^- `(.+)`$", re.MULTILINE)
OTHERS = re.compile(r"^## Sentences of other programs$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)

# One or several literals of C++ that the compiler joins.
LITERAL = r'"(?:[^"\\\n]|\\.)*"'
LITERALS = re.compile(rf"{LITERAL}(?:\s*{LITERAL})*")
ENUMERATOR = re.compile(r"^\s*(k\w+) = (\d+),", re.MULTILINE)
STATUS_ROW = re.compile(r"^\| (\d+) \| `(k\w+)` \|", re.MULTILINE)


def of_page(sentence: str) -> str:
    return re.sub(r"<[^<>]*>", FIELD, sentence)


def of_cpp(text: str) -> set[str]:
    text = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    found = set()
    for match in LITERALS.finditer(text):
        joined = "".join(part[1:-1] for part in re.findall(LITERAL, match.group()))
        found.add(re.sub(r"{[^{}]*}", FIELD, joined.replace('\\"', '"')))
    return found


def of_python(text: str) -> set[str]:
    found = set()
    parts: set[int] = set()  # of f-strings, which are no sentences by themselves
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            found.add("".join(part.value if isinstance(part, ast.Constant) else FIELD
                              for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (
                id(node) not in parts):
            found.add(node.value)
    return found


def of_shell(text: str) -> set[str]:
    return {re.sub(r"\$(?:{[^{}]*}|\w+)", FIELD, literal)
            for literal in re.findall(r'"([^"\n]*)"', text)}


READERS = {".h": of_cpp, ".cc": of_cpp, ".cu": of_cpp, ".cuh": of_cpp, ".py": of_python,
           ".sh": of_shell}


def of_sources(root: pathlib.Path) -> set[str]:
    found: set[str] = set()
    for folder in ("src", "tools", "python", "scripts"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in READERS:
                found |= READERS[path.suffix](path.read_text(encoding="utf-8"))
    return found


def faults(root: pathlib.Path) -> list[str]:
    page = OTHERS.sub("", (root / "docs/troubleshooting.md").read_text(encoding="utf-8"))
    sentences = SENTENCE.findall(page)
    if not sentences:
        return ["troubleshooting.md: expected sentences, got none"]
    known = of_sources(root)
    found = [f"troubleshooting.md: no source has the sentence: {sentence}"
             for sentence in sentences
             if not {of_page(sentence), of_page(sentence).removeprefix(f"{FIELD}: ")} & known]
    header = (root / "include/flashdsa/metadata.h").read_text(encoding="utf-8")
    status = {(number, name) for name, number in ENUMERATOR.findall(header)}
    if set(STATUS_ROW.findall(page)) != status:
        found.append("troubleshooting.md: the table of the status must be that of MetadataStatus")
    return found


def main() -> int:
    found = faults(pathlib.Path(sys.argv[1]))
    print("\n".join(found) if found else "every sentence stands in the sources")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

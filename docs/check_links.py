"""Check that every relative link of the project's Markdown leads to a file that exists."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def broken_links(root: Path) -> list[str]:
    """`file: target` for each relative link without a target; web addresses are not followed."""
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    return [
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]


if __name__ == "__main__":
    broken = broken_links(ROOT)
    print("\n".join(broken) or "every link leads somewhere")
    sys.exit(bool(broken))

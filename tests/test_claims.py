"""Numbers on pages: every result of the README and of docs/ is in docs/claims.toml, with its command and conditions.

A result is a number with a unit (%, ×, "times", points, a time, a size, FLOPs), or a number in a table. Names of models,
versions and code are left out, and so is a page that a program writes, which `generated` names.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUND = tomllib.loads((ROOT / "docs" / "claims.toml").read_text(encoding="utf-8"))
CLAIMS = FOUND["claim"]
FREE = ("contributing", "howto/coming-from", "howto/compatibility", "howto/not-faster", "howto/pruning", "concepts/costs")
"""Pages whose numbers are settings, not results."""
PAGES = [
    "README.md",
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not path.relative_to(ROOT / "docs").as_posix().startswith(FREE)
    ),
]
NUMBER = r"(?<![\w.-])\d[\d,]*(?:\.\d+)?"
UNIT = r"(?: |-)?(?:%|×|(?:ms|µs|s|h|times|points?|seconds?|minutes?|hours?|MiB|GiB|KB|MB|[kMGT]?FLOPs)\b)"


def results_of(text):
    """Numbers of a page that are results."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.M | re.S)
    found = set()
    for line in text.splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line):
            for cell in line.strip("|").split("|")[1:]:
                if not re.search(r"[A-Za-z]{4}", cell):
                    found |= set(re.findall(NUMBER, cell))
    for part in re.findall(rf"{NUMBER}(?:(?:,| to| and| ±|–| against| or|;| /) {NUMBER})*{UNIT}", text):
        found |= set(re.findall(NUMBER, part))
    return {number.rstrip(",") for number in found}


def values_of(claim):
    return {number.rstrip(",") for number in re.findall(NUMBER, claim["values"])}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_result_that_is_not_in_the_file_of_claims(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in FOUND["generated"]:
        assert FOUND["generated"][page] in text, "the page names the command that writes it"
        return
    known = {number for claim in CLAIMS if page in claim["pages"] for number in values_of(claim)}
    missing = results_of(text) - known
    assert missing == set(), f"add them to `values` of a claim of {page} in docs/claims.toml, with command and commit"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim["name"]))
def test_a_claim_says_all_that_a_reader_needs_to_repeat_it_and_is_on_its_pages(claim):
    assert set(claim) == {"name", "pages", "unit", "condition", "command", "commit", "values"}
    assert all(claim.values())
    assert re.fullmatch(r"[0-9a-f]{8}", claim["commit"])
    for program in re.findall(r"(?:benchmarks|examples|tests)/[\w/]+\.py", claim["command"]):
        assert (ROOT / program).exists(), program
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in claim["pages"])
    gone = {number for number in values_of(claim) if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", text)}
    assert gone == set(), "no page has these numbers any more"


def test_commits_of_claims_exist():
    """Where the history is there: an archive or a shallow copy has none."""
    if subprocess.run(["git", "cat-file", "-e", CLAIMS[0]["commit"]], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("no history")
    commits = "\n".join(claim["commit"] for claim in CLAIMS)
    done = subprocess.run(
        ["git", "cat-file", "--batch-check"], cwd=ROOT, input=commits, capture_output=True, text=True, check=True
    )
    assert "missing" not in done.stdout

"""Results on pages: tables are drawn from rows of results/, and numbers in prose are in docs/claims.toml, with their command.

A result in prose is a number with a unit (%, ×, "times", points, a time, a size, FLOPs). Names of models, versions and code
are left out. A table has results if a cell other than the first has a number and no words, or a number with a unit.
"""

import re
import runpy
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


TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
DRAWN = runpy.run_path(str(ROOT / "docs" / "make" / "tables.py"))
TABLES = DRAWN["drawn"]()


def _plain(text):
    """Text without code, the targets of links and comments."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.M | re.S)


def results_of(text):
    """Numbers in the prose of a page that are results."""
    found = set()
    for part in re.findall(rf"{NUMBER}(?:(?:,| to| and| ±|–| against| or|;| /) {NUMBER})*{UNIT}", TABLE.sub("", _plain(text))):
        found |= set(re.findall(NUMBER, part))
    return {number.rstrip(",") for number in found}


def tables_of(text):
    """Heads of tables that have results."""
    heads = []
    for found in TABLE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        head, _, *lines = found.splitlines()
        cells = [_plain(cell) for line in lines for cell in re.split(r"(?<!\\)\|", line.strip("|"))[1:]]
        if any(re.search(r"\d", cell) and not re.search(r"[A-Za-z]{4}", cell) for cell in cells):
            heads.append(head)
    return heads


def values_of(claim):
    return {number.rstrip(",") for number in re.findall(NUMBER, claim["values"])}


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_results_is_drawn_from_rows_and_has_their_cells(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in FOUND["generated"]:
        assert FOUND["generated"][page] in text, "the page names the command that writes it"
        return
    assert set(tables_of(text)) - set(TABLES.get(page, {})) - set(FOUND["settings"].get(page, ())) == set(), (
        "write a function for this head in docs/make/tables.py"
    )
    assert DRAWN["placed"](page, text, TABLES.get(page, {})) == text, "run `python docs/make/tables.py`"


@pytest.mark.parametrize("page", PAGES)
def test_the_prose_of_a_page_has_no_result_that_is_not_in_the_file_of_claims(page):
    known = {number for claim in CLAIMS if page in claim["pages"] for number in values_of(claim)}
    text = (ROOT / page).read_text(encoding="utf-8")
    for pages, begin, _ in DRAWN["SENTENCES"]:
        text = re.sub(rf"{re.escape(begin)}[^.]*\.", "", text) if page in pages else text
    missing = set() if page in FOUND["generated"] else results_of(text) - known
    assert missing == set(), f"add them to `values` of a claim of {page} in docs/claims.toml, with command and commit"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim["name"]))
def test_a_claim_says_all_that_a_reader_needs_to_repeat_it_and_is_on_its_pages(claim):
    assert set(claim) == {"name", "pages", "unit", "condition", "command", "commit", "values"}
    assert all(claim.values())
    assert re.fullmatch(r"[0-9a-f]{8}", claim["commit"])
    for program in re.findall(r"(?:benchmarks|examples|tests)/[\w/]+\.py", claim["command"]):
        assert (ROOT / program).exists(), program
    text = "\n".join(TABLE.sub("", (ROOT / page).read_text(encoding="utf-8")) for page in claim["pages"])
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

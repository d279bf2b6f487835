"""Laws of a release and of CI: each command that CI runs exists, the page of versions has CI's table, the citation file and the
changelog are those of the version, and the bill of materials names each file."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


versions = loaded(ROOT / "docs" / "site" / "versions.py")


def test_the_page_of_versions_has_the_table_of_ci():
    text = versions.PAGE.read_text()
    assert text == versions.page(text), "python docs/site/versions.py"
    assert len(versions.rows()) >= 20


def test_each_command_of_ci_exists_and_no_long_form_is_left_out():
    commands = [each for job in versions.jobs().values() for run in versions.runs_of(job) for each in run[0]]
    targets = {target for each in commands for target in re.findall(r"\bmake ([\w-]+)", each)}
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert targets - phony == set() and not any("${{" in each for each in commands)
    for file in {word for each in commands for word in each.split() if word.startswith(".ci/")}:
        assert os.access(ROOT / file, os.X_OK), file
    asked = "asan lint docs wheel release test-torch test-without-numpy test-aarch64 test-musl test-free-threaded"
    assert {*asked.split(), "test-long", "tsan", "fuzz", "crash", "mutate-events"} <= targets
    assert {"2.4.1", "2.11.0"} <= set(versions.jobs()["torch"]["strategy"]["matrix"]["torch"])


def test_each_target_of_the_makefile_that_is_no_file_is_phony():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE)) == phony


def test_the_citation_and_the_changelog_are_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "type"} <= cited.keys()
    assert cited["version"] == PROJECT["version"] and cited["license"] == PROJECT["license"]
    assert cited["authors"] == [{"name": each["name"]} for each in PROJECT["authors"]]
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert releases[0].startswith(PROJECT["version"])
    assert all(len(each.splitlines()) <= 50 for each in releases), "one screen for each release"


def test_the_bill_of_materials_names_each_file_with_its_checksum(tmp_path):
    """The schema is checked by the program itself. The same files give the same bytes."""
    pytest.importorskip("cyclonedx.validation.json", reason="needs requirements/release.txt")
    name = f"{PROJECT['name']}-{PROJECT['version']}"
    metadata = (
        f"Metadata-Version: 2.4\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\nSummary: S\n"
        "Author: A\nLicense-Expression: Apache-2.0\nRequires-Dist: torch>=2.4\nRequires-Dist: rich; extra == 'observe'\n"
    )
    (tmp_path / name).mkdir()
    (tmp_path / name / "PKG-INFO").write_text(metadata)
    with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / name, name)
    with zipfile.ZipFile(tmp_path / f"{name}-cp310-abi3-x.whl", "w") as archive:
        archive.writestr("x", "x")
    texts = []
    for _ in range(2):
        command = [sys.executable, str(ROOT / ".ci" / "sbom.py"), str(tmp_path)]
        subprocess.run(command, check=True, timeout=150, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
        texts.append((tmp_path / f"{name}.cdx.json").read_text())
    assert texts[0] == texts[1]
    made = json.loads(texts[0])
    assert [each["name"] for each in made["components"]] == ["torch"]  # extras are not installed
    files = {each["name"]: each["hashes"][0]["content"] for each in made["metadata"]["component"]["components"]}
    there = [*tmp_path.glob("*.tar.gz"), *tmp_path.glob("*.whl")]
    assert files == {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in there}

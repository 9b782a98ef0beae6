"""`deploy/release/changelog.py`: the form of fragments, and the release that is cut from them."""

import importlib.util
import re
import shutil
import subprocess

import pytest

from deploy.containers import DEPLOY
from harness.server import ROOT


def module():
    """Returns the module `deploy/release/changelog.py`."""
    spec = importlib.util.spec_from_file_location("changelog", DEPLOY / "release/changelog.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_fragments_are_well_formed():
    assert module().mistakes(ROOT / "changelog.d") == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("flag-of-limits.added.md", "`--limit` is new.\n", ""),
        ("names.migration.md", "New names:\n\n| old | new |\n|---|---|\n| `a` | `b` |\n", ""),
        ("flag.new.md", "New.\n", "one of the kinds"),
        ("A flag.added.md", "New.\n", "SUBJECT.KIND.md"),
        ("flag.added.md", "", "begin at once"),
        ("flag.added.md", "New.", "one line break"),
        ("flag.added.md", "- New.\n", "without headings and items"),
        ("flag.added.md", "New\n", "full stop"),
        ("flag.added.md", "word " * 91 + ".\n", "at most 90"),
        ("flag.added.md", "See [Limits](docs/src/guides/limits.md).\n", "begin with ../"),
    ],
)
def test_a_malformed_fragment_is_reported(name, text, expected):
    wrong = module().mistake(name, text)
    assert expected in wrong and bool(expected) == bool(wrong)


@pytest.fixture
def tree(tmp_path):
    """A tree with the files that have the version, and two fragments."""
    for path in (*module().WITH_VERSION, "Cargo.toml", "Cargo.lock", "tests/fuzz/Cargo.lock"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nText.\n\n## 0.1.0 (2026-01-01)\nFirst.\n")
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d/README.md").write_text("# Changes\n")
    (tmp_path / "changelog.d/two.fixed.md").write_text("Two is\ntwo; see [Limits](../docs/src/guides/limits.md).\n")
    (tmp_path / "changelog.d/one.added.md").write_text("One is new.\n")
    return tmp_path


def test_a_release_has_the_fragments_and_the_version(tree):
    changelog, old = module(), module().current(ROOT)
    changelog.cut(tree, "99.0.1", "2030-01-02")
    assert (tree / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nText.\n\n## 99.0.1 (2030-01-02)\n\n### Added\n- One is new.\n\n"
        "### Fixed\n- Two is\n  two; see [Limits](docs/src/guides/limits.md).\n\n## 0.1.0 (2026-01-01)\nFirst.\n"
    )
    assert [path.name for path in (tree / "changelog.d").iterdir()] == ["README.md"]
    assert changelog.current(tree) == "99.0.1"
    for path in changelog.WITH_VERSION:
        assert "99.0.1" in (tree / path).read_text(), path
        assert not re.search(rf"(?<![\d.]){re.escape(old)}\b", (tree / path).read_text()), path
    own = [text for text in (tree / "Cargo.lock").read_text().split("[[package]]") if "source = " not in text]
    assert len([text for text in own if 'version = "99.0.1"' in text]) > 10
    sources = [text for text in (ROOT / "Cargo.lock").read_text().split("[[package]]") if "source = " in text]
    assert [text for text in sources if text not in (tree / "Cargo.lock").read_text()] == []


def test_a_release_needs_a_higher_version_and_fragments(tree):
    changelog = module()
    for version, expected in (("v99.0", "three numbers"), ("0.0.1", "must be higher than")):
        with pytest.raises(SystemExit, match=expected):
            changelog.cut(tree, version, "2030-01-02")
    (tree / "changelog.d/bad.md").write_text("Bad.\n")
    with pytest.raises(SystemExit, match="changelog.d/bad.md: the name must be"):
        changelog.cut(tree, "99.0.1", "2030-01-02")
    for path in (tree / "changelog.d").glob("*.*.md"):
        path.unlink()
    (tree / "changelog.d/bad.md").unlink()
    with pytest.raises(SystemExit, match="no fragments"):
        changelog.cut(tree, "99.0.1", "2030-01-02")


def test_every_file_with_the_version_is_listed():
    """A file that a release must change, and that the list lacks, would keep the old version."""
    changelog = module()
    found = subprocess.run(["git", "grep", "-lF", changelog.current(ROOT)], cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("not a clone")
    known = {*changelog.WITH_VERSION, "Cargo.toml", "Cargo.lock", "tests/fuzz/Cargo.lock", "worker/llamacpp/Cargo.lock", "CHANGELOG.md"}
    # Lists of the versions of other packages, and texts about an earlier version.
    others = re.compile(r"^(changelog\.d/|tests/|.*requirements.*\.txt$|deploy/release/changelog\.py|docs/src/reference/versions\.md)")
    assert [path for path in found.stdout.split() if path not in known and not others.match(path)] == []

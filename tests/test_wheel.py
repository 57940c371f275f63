"""The wheel: one import root, and everything that `tritium serve` needs."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.architecture import ROOT, TOP_FOLDERS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The names of the files in a wheel that is built from a copy of the source tree."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in (*TOP_FOLDERS, "model_repository", "tritium"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for path in (*ROOT.glob("requirements*.txt"), *ROOT.glob("*.toml"), ROOT / "README.md"):
        shutil.copy(path, source)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", directory, source),
        ],
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_only_name_to_import_is_tritium(files):
    tops = {name.partition("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tritium"}


def test_it_has_all_of_the_source(files):
    for folder in TOP_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert f"tritium/{path.relative_to(ROOT).as_posix()}" in files


def test_it_has_models_to_serve_and_the_backend(files):
    assert "tritium/model.py" in files
    for path in (ROOT / "model_repository").rglob("*"):
        if path.suffix in (".py", ".pbtxt"):
            assert f"tritium/{path.relative_to(ROOT).as_posix()}" in files

"""Compiled code is kept by state of the sources: a change in any of them, and only such a change, is another folder."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeweaver.kernel_cache import KEPT_DAYS, _state, is_empty, use_kernel_cache


def test_a_change_in_any_compiled_source_is_another_state(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import numba\n")
    (tmp_path / "b.py").write_text("import numba\nX = 1\n")
    (tmp_path / "plain.py").write_text("Y = 1\n")
    before = _state(tmp_path)
    (tmp_path / "plain.py").write_text("Y = 2\n")
    assert _state(tmp_path) == before
    (tmp_path / "b.py").write_text("import numba\nX = 2\n")
    assert _state(tmp_path) != before


def test_old_states_go_recent_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "pipeweaver"
    old, recent = home / "kernels-old", home / "kernels-recent"
    old.mkdir(parents=True)
    recent.mkdir()
    past = time.time() - (KEPT_DAYS + 1) * 86_400
    os.utime(old, (past, past))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    use_kernel_cache()
    assert {folder.name for folder in home.iterdir()} == {"kernels-recent", Path(os.environ["NUMBA_CACHE_DIR"]).name}


def test_a_folder_that_was_chosen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unused"))
    use_kernel_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path)
    assert not (tmp_path / "unused").exists()


def test_nothing_is_kept_before_something_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one_kernel.py").write_text(
        "import numba\nfrom pipeweaver.kernel_cache import is_empty\n"
        "@numba.njit(cache=True)\ndef double(x): return 2 * x\n"
        "assert is_empty()\ndouble(1)\nassert not is_empty()\n"
    )
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": root}
    subprocess.run([sys.executable, str(tmp_path / "one_kernel.py")], env=environment, check=True, timeout=60)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # numba's own way: nobody knows
    assert not is_empty()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    use_kernel_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == ""

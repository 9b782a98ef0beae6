"""Limits of workers. Control groups with all controllers need a kernel that gives them to version 2, so these tests run in a guest;
`worker_limits.py` contains them."""

import re
from pathlib import Path

import pytest

from harness import guest_kernel

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(guest_kernel.missing()), reason=guest_kernel.missing())]
TESTS = Path(__file__).with_name("worker_limits.py")
LIMIT_S = 900
"""A guest is several times slower than its machine."""


def test_limits_of_workers_in_a_guest(tmp_path):
    if reason := guest_kernel.refusal(tmp_path):
        pytest.skip(reason)
    output = guest_kernel.run(TESTS, tmp_path, LIMIT_S)
    passed = set(re.findall(r"^PASSED .*::(\w+)", output, re.MULTILINE))
    assert "exit status 0" in output, output
    assert passed == set(re.findall(r"^def (test_\w+)", TESTS.read_text(), re.MULTILINE)), output

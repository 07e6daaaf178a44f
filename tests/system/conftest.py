"""The sandboxes that the tests of code rewards share."""

import os
import tempfile

import pytest
from code_sandboxes import LIMITS
from processes import children

from torchtune_grpo.sandbox import CodeSandbox

FENCES = ["namespaces", "landlock"]


@pytest.fixture(scope="module", params=FENCES)
def sandbox(request, tmp_path_factory):
    """One sandbox for all programs, so that one of them could harm the next."""
    folder, before = tmp_path_factory.mktemp("tmp"), tempfile.tempdir
    tempfile.tempdir, processes = str(folder), set(children())
    sandbox = CodeSandbox(LIMITS, namespaces=request.param == "namespaces")
    if request.param == "namespaces" and "of their own" not in sandbox.confinement():
        pytest.skip("the kernel refuses namespaces here")
    yield sandbox
    sandbox.close()
    tempfile.tempdir = before
    assert set(children()) == processes
    assert not os.listdir(folder)
